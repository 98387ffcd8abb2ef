"""Copies between real programs on loopback: nodes that die, hang, corrupt bytes or run out of
space.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.app import certificates
from launcher.core.errors import NodeError, VlaunchError
from launcher.distribute import coordinator as spreading
from launcher.distribute.node.connection import Tls
from launcher.distribute.node.files import CopyManifest
from tests.chains import (
    CHUNK,
    Chain,
    content,
    in_memory,
    make_model,
    on_a_disk,
    rows,
    when,
)

pytestmark = pytest.mark.processes
TOTAL = 12_000_737
SLOWLY = 4_000_000  # bytes per second: three seconds for a fault


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain_ = Chain(tmp_path, 4)
    make_model(chain_.roots["n0"])
    return chain_


def test_every_node_gets_everything(chain: Chain) -> None:
    """Bytes, times and folders; no part twice, and no partial file is left."""
    came = chain.run()

    expected = content(chain.roots["n0"])
    for name in chain.names[1:]:
        root = chain.roots[name]
        assert content(root) == expected
        assert (root / "config.json").stat().st_mtime_ns == 1_700_000_000_123_456_789
        assert [path.name for path in (root / ".vlaunch").iterdir()] == ["records"]
        assert came.members[name].received == TOTAL
    assert came.failed == {}
    assert came.members["n0"].sent == came.members["n1"].sent == TOTAL
    assert came.members["n3"].sent == 0


@pytest.mark.parametrize("pushes", [False, True])
def test_an_encrypted_copy(chain: Chain, pushes: bool) -> None:
    """The same result, even if a node dies in the middle."""
    chain.rate = SLOWLY
    killed = when(0.02, lambda: chain.kill("n1"))
    came = chain.run(at=killed, encrypt=True, pushes=pushes)

    expected = content(chain.roots["n0"])
    assert list(came.failed) == ["n1"]
    assert [content(chain.roots[name]) for name in ("n2", "n3")] == [expected, expected]


def test_a_corrupt_disk_stops_its_node(chain: Chain) -> None:
    """The next node detects it and fetches from another one; the error names the disk's node. The
    damaged copy does not count as complete; the same copy resumes and corrects all bytes.
    """
    chain.rate = SLOWLY
    parts = chain.roots["n1"] / ".vlaunch" / "parts"

    def spoil() -> None:
        # The next node waits meanwhile, so that it is behind.
        chain.kill("n2", signal.SIGSTOP)
        time.sleep(1.0)
        for path in parts.iterdir():
            data = bytearray(path.read_bytes())
            for at in range(0, len(data), 1000):
                data[at] ^= 255
            with path.open("r+b") as file:
                file.write(data)
        chain.kill("n2", signal.SIGCONT)

    came = chain.run(at=when(0.3, spoil))

    expected = content(chain.roots["n0"])
    assert list(came.failed) == ["n1"]
    assert "changed on disk during the copy" in came.failed["n1"]
    assert any("got corrupt data from n1" in event.text for event in chain.events)
    assert content(chain.roots["n1"]) == {}
    assert [content(chain.roots[name]) for name in ("n2", "n3")] == [expected, expected]
    assert chain.run().failed == {}
    assert content(chain.roots["n1"]) == expected


def test_a_second_copy_moves_nothing(chain: Chain) -> None:
    """Digests are compared, and the records of both sides save reading."""
    chain.run()
    came = chain.run()

    assert [came.members[name].received for name in chain.names] == [0, 0, 0, 0]
    assert came.failed == {}


def test_a_changed_file_is_copied_alone(chain: Chain) -> None:
    """Even with an unchanged size and time."""
    chain.run()
    path = chain.roots["n2"] / "model-2.safetensors"
    data = bytearray(path.read_bytes())
    data[1_000_000] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(0, 1_700_000_000_123_456_789))
    came = chain.run()

    assert content(chain.roots["n2"]) == content(chain.roots["n0"])
    received = {name: came.members[name].received for name in chain.names}
    assert received == {"n0": 0, "n1": 0, "n2": 3_000_000, "n3": 0}


def test_a_killed_node_delays_no_others(chain: Chain) -> None:
    """The next one fetches from the one before; the dead node is named, and a repeated copy
    completes it.
    """
    chain.rate = SLOWLY
    came = chain.run(at=when(0.02, lambda: chain.kill("n1")))

    expected = content(chain.roots["n0"])
    assert [content(chain.roots[name]) == expected for name in ("n2", "n3")] == [True, True]
    assert list(came.failed) == ["n1"]
    assert came.members["n2"].received < 1.1 * TOTAL
    assert not (chain.roots["n1"] / "config.json").exists()
    again = chain.run()
    assert content(chain.roots["n1"]) == expected
    assert 0 < again.members["n1"].received < 0.9 * TOTAL
    assert again.members["n2"].received == 0


def test_a_hanging_node_is_skipped(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are open but silent: after some seconds the others continue without it, and
    the launcher abandons it.
    """
    monkeypatch.setattr(spreading, "SILENCE_TIMEOUT", 3.0)
    chain.rate = SLOWLY
    came = chain.run(at=when(0.4, lambda: chain.kill("n2", signal.SIGSTOP)))

    assert content(chain.roots["n3"]) == content(chain.roots["n0"])
    assert "no message from it" in came.failed["n2"]


def test_the_sources_death_stops_the_copy(chain: Chain) -> None:
    """A repetition transfers only the rest."""
    chain.rate = SLOWLY
    with pytest.raises(NodeError, match="n0: cannot take part"):
        chain.run(at=when(0.5, lambda: chain.kill("n0")))
    assert not (chain.roots["n1"] / "config.json").exists()
    came = chain.run()

    assert content(chain.roots["n3"]) == content(chain.roots["n0"])
    assert came.members["n1"].received < 0.65 * TOTAL


def test_an_interrupted_copy_resumes(chain: Chain) -> None:
    """The launcher disappears, the programs exit, and received data count the next time."""
    chain.rate = SLOWLY

    def stop() -> None:
        raise KeyboardInterrupt

    for share in (0.2, 0.5):
        with pytest.raises(KeyboardInterrupt):
            chain.run(at=when(share, stop))
    chain.rate = 0
    came = chain.run()

    assert [content(root) == content(chain.roots["n0"]) for root in chain.roots.values()] == (
        [True] * 4
    )
    assert came.members["n1"].received < 0.7 * TOTAL


def test_existing_files_are_passed_on(chain: Chain) -> None:
    """The middle node has a large file, which it sends without receiving it."""
    expected = content(chain.roots["n0"])
    path = chain.roots["n2"] / "model-1.safetensors"
    path.parent.mkdir()
    path.write_bytes(expected["model-1.safetensors"])
    came = chain.run()

    assert content(chain.roots["n3"]) == expected
    assert came.members["n2"].received == TOTAL - len(expected["model-1.safetensors"])
    assert came.members["n3"].received == TOTAL


def test_an_unreachable_source_connects_itself(chain: Chain) -> None:
    """Like this machine, through a tunnel to the first node; also if that one dies."""
    chain.rate = SLOWLY
    came = chain.run(pushes=True, at=when(0.02, lambda: chain.kill("n1")))

    assert content(chain.roots["n3"]) == content(chain.roots["n0"])
    assert list(came.failed) == ["n1"]


def test_a_file_that_differs_from_the_published_one(chain: Chain) -> None:
    """The source detects it while reading; no node gets the file."""
    files = [
        type(row)(row.name, row.size, row.mtime, "0" * 64 if "2" in row.name else "")
        for row in rows(chain.roots["n0"])
    ]
    with pytest.raises(NodeError) as caught:
        chain.run(CopyManifest(files, CHUNK))

    assert "model-2.safetensors is not what was published" in caught.value.evidence
    assert content(chain.roots["n1"]) == {}


def test_two_nodes_with_a_shared_folder_count_as_one(chain: Chain) -> None:
    """One of them gets the files."""
    chain.roots["n2"] = chain.roots["n1"]
    came = chain.run()

    shared = [name for name, member in came.members.items() if member.shared]
    assert shared in (["n1"], ["n2"])
    assert content(chain.roots["n3"]) == content(chain.roots["n0"])


def test_a_name_outside_is_rejected(chain: Chain) -> None:
    """By every receiving node."""
    outside = chain.base / "outside"
    outside.mkdir()
    chain.roots["n1"].mkdir()
    (chain.roots["n1"] / "sub").symlink_to(outside)
    with pytest.raises(NodeError) as caught:
        chain.run(names=["n0", "n1"])
    assert "is outside" in caught.value.evidence
    with pytest.raises(NodeError) as caught:
        chain.run(names=["n0", "n2"], links=[["../../evil", "config.json"]])

    assert "leads out of its folder" in caught.value.evidence
    assert list(outside.iterdir()) == []


def test_other_programs_get_nothing(chain: Chain) -> None:
    """They do not use TLS, or have another certificate; the copy continues."""
    chain.rate = SLOWLY
    answers: list[bytes] = []

    def connect(name: str, has: float) -> None:
        if answers or not has:
            return
        port = next(_listening(chain.pid("n1")))
        with socket.create_connection(("127.0.0.1", port), 5) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            answers.append(sock.recv(65536))
        with (
            socket.create_connection(("127.0.0.1", port), 5) as sock,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            Tls(certificates.make_certificate("copy")).connect(sock, 5.0)

    result = chain.run(at=connect)

    assert answers == [b""]
    assert result.failed == {}


def _listening(pid: int) -> Iterator[int]:
    """Return the ports on which a process listens."""
    inodes = {str(descriptor.readlink()) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        if columns[3] == "0A" and f"socket:[{columns[9]}]" in inodes:
            yield int(columns[1].rpartition(":")[2], 16)


def test_too_little_space_is_reported_first(small_disk: Path, chain: Chain) -> None:
    """By the affected node; others have received no data."""
    chain.roots["n2"] = small_disk / "m"
    with pytest.raises(NodeError) as caught:
        chain.run()

    assert "n2" in caught.value.message
    assert "bytes are missing" in caught.value.evidence
    assert not (chain.roots["n1"] / "config.json").exists()


def test_a_full_disk_stops_only_its_node(small_disk: Path, chain: Chain) -> None:
    """With its reason; once space is free, the same copy completes it."""
    subprocess.run(["mount", "-o", "remount,size=14m", str(small_disk)], check=True)
    chain.roots["n2"] = small_disk / "m"
    chain.rate = SLOWLY
    filling = small_disk / "other"
    came = chain.run(at=when(0.3, lambda: _fill(filling)))

    assert "No space left on device" in came.failed["n2"]
    assert content(chain.roots["n3"]) == content(chain.roots["n0"])
    filling.unlink()
    again = chain.run()
    assert content(chain.roots["n2"]) == content(chain.roots["n0"])
    assert again.members["n2"].received < TOTAL


def _fill(path: Path) -> None:
    with path.open("wb") as file:
        try:
            while True:
                file.write(bytes(65536))
                file.flush()
        except OSError:
            pass


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "small", str(path)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("this user may not mount file systems")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_progress_is_reported_per_node(chain: Chain) -> None:
    """Bytes, rate, sender, and position in the chain; in total as the slowest."""
    chain.rate = SLOWLY
    chain.run()

    steps = [event for event in chain.events if event.kind == "step" and event.node == "n2"]
    assert steps[0].data["total"] == TOTAL
    assert (steps[0].data["from"], steps[0].data["position"]) == ("n1", 2)
    waits = [event for event in chain.events if event.kind == "wait" and event.data]
    assert "the last" in waits[0].text
    assert json.dumps(waits[0].as_json())


def test_a_program_that_cannot_start_is_named(chain: Chain) -> None:
    """With the system's message; no other program starts."""
    chain.roots["n2"].write_text("a file is where a folder shall be")
    with pytest.raises(VlaunchError) as caught:
        chain.run()

    assert "n2" in caught.value.message
    assert "Not a directory" in str(caught.value.evidence) or "File exists" in str(
        caught.value.evidence
    )


@pytest.mark.parametrize("cached", [False, True])
def test_the_page_cache(chain: Chain, cached: bool) -> None:
    """No node caches large files, unless they are about to be read again."""
    name = "model-1.safetensors"
    if not on_a_disk(chain.roots["n0"] / name):
        pytest.skip("the test folder is on a file system in memory")
    chain.run(cached=cached)

    *senders, last = [root / name for root in chain.roots.values()]
    assert (in_memory(last) > 0) == cached
    # On a busy machine up to a fifth of a file that was sent stays, in one copy of seven, for a
    # reason that is not known: no process or socket is left, and dropping it again does not help.
    resident = [in_memory(file) > file.stat().st_size / 2 for file in senders]
    assert resident == [cached] * 3
