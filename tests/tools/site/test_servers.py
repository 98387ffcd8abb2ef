"""Servers as reported by the head."""

from __future__ import annotations

from launcher.agent.observed import Drain, Observed
from launcher.tools.site import servers
from tests.served import make_spec, request, server_row


def test_a_server_of_this_version_is_read_back() -> None:
    """Specs of `serve` can be parsed by other commands."""
    (server,) = servers.parse_servers({"servers": [server_row(request("mp"))]}).servers

    assert server.desired == make_spec(request("mp"))


def test_a_replaced_server_that_drains_is_waited_for() -> None:
    """Its status is not that of the new one."""
    drain = Drain(since=1.0, limit=60.0, fronts=["n1"], requests=3)
    before = Observed(name="chat", id="before", asked=1.0, state="ready", draining=drain)
    row = {**server_row(request("mp")), "observed": before.as_json()}
    (server,) = servers.parse_servers({"servers": [row]}).servers

    assert (server.observed, server.state) == (None, "waiting")
    assert servers.server_health(server, agent=0.1) == (
        "waiting",
        "the server before it is draining: 3 requests in progress",
    )
