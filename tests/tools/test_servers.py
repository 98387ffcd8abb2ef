"""Servers as the head tells of them."""

from __future__ import annotations

from launcher.tools import servers
from tests.served import desired, kept, request


def test_a_server_of_this_version_is_read_back() -> None:
    """What `serve` writes is what the others read."""
    (server,) = servers.parse_servers({"servers": [kept(request("mp"))]}).servers

    assert server.desired == desired(request("mp"))
