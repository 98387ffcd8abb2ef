"""Server of a copy: idle connections block no others."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from launcher.app import certificates
from launcher.distribute.node import server, wire
from launcher.distribute.node.connection import Tls
from launcher.distribute.node.files import CopyManifest, ManifestFile
from launcher.distribute.node.record import DigestRecords
from launcher.distribute.node.server import Listener
from launcher.distribute.node.store import ChunkStore


def test_idle_connections_delay_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is closed if there are too many, long before its handshake is late."""
    monkeypatch.setattr(server, "_HANDSHAKE_TIMEOUT", 600.0)
    store = ChunkStore(
        str(tmp_path), CopyManifest([ManifestFile("a", 10)], 10), DigestRecords(str(tmp_path))
    )
    tls = Tls(certificates.make_certificate("copy"))
    listener = Listener(store, tls, ("127.0.0.1", 0), lambda connection: None)
    address = ("127.0.0.1", listener.port)
    idle = [socket.create_connection(address) for _ in range(64)]
    for _ in range(3):
        with socket.create_connection(address) as guest:
            wire.send_purpose(tls.connect(guest, 120.0), wire.GIVE)
    idle[0].settimeout(60)
    assert idle[0].recv(100) == b""

    for sock in idle:
        sock.close()
