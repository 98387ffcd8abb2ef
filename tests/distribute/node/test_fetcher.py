"""Fetching from wrong, hanging or dead nodes: both sides in this process, over loopback."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.app import certificates
from launcher.distribute.node import fetcher, server
from launcher.distribute.node.connection import Tls
from launcher.distribute.node.fetcher import Streams, Upstream
from launcher.distribute.node.files import CopyManifest, ManifestFile
from launcher.distribute.node.record import DigestRecords
from launcher.distribute.node.server import Listener
from launcher.distribute.node.source import SourceAltered, SourceReader
from launcher.distribute.node.store import ChunkStore
from tests.relay import Relay

OURS = certificates.make_certificate("copy")
ENCRYPTED, PLAIN = Tls(OURS), Tls(OURS, plain=True)
CHUNK = 1000
SIZE = 20_500


@dataclass
class Side:
    """One node: its store, its port, and the log of its events."""

    store: ChunkStore
    port: int = 0
    tls: Tls = ENCRYPTED
    log: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    upstream: Upstream | None = None
    streams: Streams | None = None

    def fetch(self, *peers: tuple[str, int]) -> None:
        """Start to fetch from these peers, in this order."""
        self.upstream = Upstream(lambda event, **fields: self.log.append((event, fields)))
        self.upstream.set_peers([(name, "127.0.0.1", port) for name, port in peers])
        self.streams = Streams(self.store, self.tls, 2, self.upstream)
        self.streams.start()

    def events(self, kind: str) -> list[str]:
        return [fields["who"] for event, fields in self.log if event == kind]


def awaited(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def data() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture
def manifest() -> CopyManifest:
    return CopyManifest([ManifestFile("a", SIZE)], CHUNK)


@pytest.fixture
def side(tmp_path: Path, manifest: CopyManifest) -> Callable[..., Side]:
    def make(name: str, content: bytes | None = None, *, tls: Tls = ENCRYPTED) -> Side:
        root = tmp_path / name
        root.mkdir()
        if content is not None:
            (root / "a").write_bytes(content)
        store = ChunkStore(str(root), manifest, DigestRecords(str(root)))
        store.load_state(source=content is not None)
        if content is not None:
            SourceReader(store).run()
        listener = Listener(store, tls, ("127.0.0.1", 0), lambda sock: None)
        return Side(store, listener.port, tls)

    return make


def content(side: Side) -> bytes:
    return Path(side.store.path(0)).read_bytes()


def test_wrong_bytes_do_not_count(side: Callable[..., Side], data: bytes) -> None:
    """The same peer is retried once, then the next one; both failures name the sender."""
    liar, honest, node = side("liar", data), side("honest", data), side("node")
    path = Path(liar.store.path(0))
    changed = bytearray(data)
    changed[4321] ^= 1
    path.write_bytes(changed)
    node.fetch(("liar", liar.port), ("honest", honest.port))

    assert awaited(node.store.is_complete)
    assert content(node) == data
    assert node.events("wrong") == ["liar", "liar"]
    assert node.store.root_digest() == honest.store.root_digest()


def test_a_dead_peer_is_skipped(side: Callable[..., Side], data: bytes) -> None:
    """It is not retried at once."""
    honest, node = side("honest", data), side("node")
    node.fetch(("gone", 1), ("honest", honest.port))

    assert awaited(node.store.is_complete)
    assert content(node) == data
    assert set(node.events("lost")) == {"gone"}


@pytest.mark.parametrize("plain", [False, True])
def test_a_node_of_another_copy_is_skipped(
    side: Callable[..., Side], data: bytes, plain: bool
) -> None:
    """It counts as lost; the event has the reason."""
    other_tls = Tls(certificates.make_certificate("copy"), plain=plain)
    tls = Tls(OURS, plain=plain)
    other, honest = side("other", data, tls=other_tls), side("honest", data, tls=tls)
    node = side("node", tls=tls)
    node.fetch(("other", other.port), ("honest", honest.port))

    assert awaited(node.store.is_complete)
    assert content(node) == data
    assert set(node.events("lost")) == {"other"}
    assert "its certificate is from another run" in node.log[0][1]["why"]
    assert other.store.sent == 0


@pytest.mark.parametrize("tls", [ENCRYPTED, PLAIN], ids=["encrypted", "plain"])
@pytest.mark.parametrize("offset", [0, 1, 2000, 5000])
@pytest.mark.parametrize(
    "edit",
    [
        lambda data, at: data[:at] + bytes([255 - data[at]]) + data[at + 1 :],
        lambda data, at: data[:at] + b"injected" + data[at:],
    ],
    ids=["changed", "inserted"],
)
def test_changed_and_inserted_bytes_are_rejected(
    side: Callable[..., Side],
    data: bytes,
    tls: Tls,
    edit: Callable[[bytes, int], bytes],
    offset: int,
) -> None:
    """A relay edits the data of all connections at one offset."""
    source, honest = side("source", data, tls=tls), side("honest", data, tls=tls)
    node = side("node", tls=tls)
    connection = threading.local()

    def change(block: bytes) -> bytes:
        at = offset - getattr(connection, "position", 0)
        connection.position = offset - at + len(block)
        return edit(block, at) if 0 <= at < len(block) else block

    with Relay(source.port, change) as relay:
        node.fetch(("relay", relay.port), ("honest", honest.port))
        assert awaited(node.store.is_complete)

    assert content(node) == data
    reasons = [fields["why"] for event, fields in node.log if event in ("wrong", "lost")]
    assert reasons
    assert all(reasons)


def test_missing_chunks_are_awaited(
    side: Callable[..., Side], data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats arrive meanwhile, even for longer than the node's timeout."""
    monkeypatch.setattr(server, "_HEARTBEAT_INTERVAL", 0.05)
    monkeypatch.setattr(fetcher, "SILENCE_TIMEOUT", 2.0)
    empty, honest, node = side("empty"), side("honest", data), side("node")
    node.fetch(("empty", empty.port))
    assert awaited(lambda: bool(node.upstream and node.upstream.current))
    time.sleep(3)
    assert node.events("lost") == []
    empty.fetch(("honest", honest.port))

    assert awaited(node.store.is_complete)
    assert content(node) == data


def test_a_chain_of_two(side: Callable[..., Side], data: bytes) -> None:
    """Chunks are passed on as they arrive, and all bytes are received once."""
    source, first, second = side("source", data), side("first"), side("second")
    second.fetch(("first", first.port), ("source", source.port))
    first.fetch(("source", source.port))

    assert awaited(lambda: first.store.is_complete() and second.store.is_complete())
    assert (first.store.received, second.store.received) == (SIZE, SIZE)
    assert source.store.sent == SIZE


def test_an_error_of_the_disk_is_reported(
    side: Callable[..., Side], data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is not to blame."""
    source, node = side("source", data), side("node")

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    node.fetch(("source", source.port))

    assert awaited(lambda: bool(node.streams and node.streams.error))
    assert node.streams is not None
    assert "No space" in str(node.streams.error)
    assert node.events("lost") == []


def test_a_changing_source_is_detected(tmp_path: Path) -> None:
    """During and before reading, and if a file differs from the published one."""
    (tmp_path / "a").write_bytes(bytes(10))
    for file, message in (
        (ManifestFile("a", 11), "another size"),
        (ManifestFile("b", 10), "is gone"),
        (ManifestFile("a", 10, 0, "0" * 64), "not what was published"),
    ):
        store = ChunkStore(str(tmp_path), CopyManifest([file], 4), DigestRecords(str(tmp_path)))
        store.load_state(source=True)
        with pytest.raises(SourceAltered, match=message):
            SourceReader(store).run()
