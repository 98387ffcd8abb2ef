"""The side of a copy that serves: who connects and says nothing keeps nobody out."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from launcher.payload.chain import wire
from launcher.payload.chain.files import File, Manifest
from launcher.payload.chain.give import Listener
from launcher.payload.chain.record import Known
from launcher.payload.chain.secure import Cipher
from launcher.payload.chain.store import Store
from launcher.remote import certificate

KEY = bytes(32)
OURS = certificate.make()


@pytest.mark.parametrize("said", [None, OURS], ids=["plain", "encrypted"])
def test_idle_connections_delay_nobody(tmp_path: Path, said: dict[str, str] | None) -> None:
    """The oldest of them is ended where there are too many, and no other."""
    store = Store(str(tmp_path), Manifest([File("a", 10)], 10), Known(str(tmp_path)))
    cipher = Cipher(said)
    listener = Listener(store, KEY, ("127.0.0.1", 0), wire.close, cipher=cipher)
    address = ("127.0.0.1", listener.port)
    idle = [socket.create_connection(address) for _ in range(64)]
    began = time.monotonic()
    for _ in range(3):
        with socket.create_connection(address) as guest:
            wire.introduce(cipher.made(guest, 5.0), KEY, wire.GIVE)
    idle[0].settimeout(5.0)
    while idle[0].recv(100):  # the server's first bytes, then the end
        pass

    assert time.monotonic() - began < 3.0
    for sock in idle:
        sock.close()
