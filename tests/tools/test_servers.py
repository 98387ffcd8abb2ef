"""Servers as reported by the head."""

from __future__ import annotations

from launcher.tools import servers
from tests.served import make_spec, request, server_row


def test_a_server_of_this_version_is_read_back() -> None:
    """Specs of `serve` can be parsed by other commands."""
    (server,) = servers.parse_servers({"servers": [server_row(request("mp"))]}).servers

    assert server.desired == make_spec(request("mp"))
