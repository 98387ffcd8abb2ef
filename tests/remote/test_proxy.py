"""Connections that another program carries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.remote import sshd
from tests.remote.conftest import refusal, works

pytestmark = pytest.mark.processes


def test_proxy_command(server: sshd.Sshd, home: Path) -> None:
    """A ProxyCommand carries the connection."""
    relay = (
        "python3 -c 'import socket,sys,threading,os;"
        ' s=socket.create_connection(("%h",%p));t=threading.Thread(target=lambda:[os.write(1,d) for'
        ' d in iter(lambda:s.recv(65536),b"")],daemon=True);t.start();[s.sendall(d) for d in'
        ' iter(lambda:os.read(0,65536),b"")]\''
    )
    (home / ".ssh" / "config").write_text(f"Host 127.0.0.1\n  ProxyCommand {relay}\n")
    assert works(server.node())


def test_failing_proxy_command(server: sshd.Sshd, home: Path) -> None:
    """A ProxyCommand that ends at once is named."""
    (home / ".ssh" / "config").write_text("Host 127.0.0.1\n  ProxyCommand exit 1\n")
    assert "ProxyCommand" in refusal(server.node()).message
    assert "exit status 1" in refusal(server.node()).evidence
