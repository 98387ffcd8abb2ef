"""A node that says anything, without end or not at all: every command ends in time, in bounded
memory, with an answer.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
import tracemalloc
from pathlib import Path

import paramiko
import pytest

from launcher.core.domain import Answer
from launcher.core.transport import Command
from launcher.ssh import channel, fleet
from launcher.ssh.fleet import Fleet, Line
from launcher.ssh.output import LIMIT, LONGEST_LINE, Output
from tests.hostile.adversary import Adversary, inventory_of, marker
from tests.hostile.conftest import Start
from tests.ssh import sshd

GARBAGE = random.Random(1).randbytes(100_000)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits ten seconds longer than the node was told to."""
    monkeypatch.setattr(channel, "GRACE", 0.2)


def ask(one: Adversary, *, timeout: float = 20.0, stdin: bytes = b"") -> Answer:
    with Fleet(inventory_of(one)) as nodes:
        given = (lambda: stdin) if stdin else None
        began = time.monotonic()
        (answer,) = nodes.run([Command(node="gpu01", argv=("true",), timeout=timeout, stdin=given)])
        assert time.monotonic() - began < timeout + 3
        return answer


def test_random_bytes(adversary: Start) -> None:
    """Without the marker it is a login shell's noise: the evidence, and no more of it than that."""

    def act(session: paramiko.Channel, _: str) -> None:
        session.sendall(GARBAGE)
        session.sendall_stderr(GARBAGE)
        session.send_exit_status(1)

    answer = ask(adversary(act))
    assert (answer.code, answer.ok) == (1, False)
    assert 0 < len(answer.out) <= 64 * 2**10
    answer.tail.encode()


def test_a_good_beginning_and_then_garbage(adversary: Start) -> None:
    """What comes behind the marker is the answer, whatever it is."""

    def act(session: paramiko.Channel, line: str) -> None:
        session.sendall(b"motd\n" + marker(line) + b'{"nodes": ' + GARBAGE)
        session.send_exit_status(0)

    answer = ask(adversary(act))
    assert answer.ok
    assert answer.out.startswith('{"nodes": ')


@pytest.mark.parametrize("status", [256, 512, 2**32 - 1])
def test_an_exit_status_that_no_process_has(adversary: Start, status: int) -> None:
    """The protocol has four bytes for it; a shell would take 256 for success when we end with
    it.
    """

    def act(session: paramiko.Channel, line: str) -> None:
        session.sendall(marker(line))
        session.send_exit_status(status)

    answer = ask(adversary(act))
    assert not answer.ok
    assert 0 < answer.code < 255


@pytest.mark.parametrize("started", [True, False])
def test_output_without_end(adversary: Start, started: bool) -> None:
    """On both streams at once, faster than it can be read, by a node that knows no deadline."""

    def act(session: paramiko.Channel, line: str) -> None:
        if started:
            session.sendall(marker(line))
            session.sendall_stderr(marker(line))
        chunk = b"x" * 2**15
        while one.send(session, chunk) and one.send(session, chunk, error=True):
            pass

    one = adversary(act)
    answer = ask(one, timeout=0.3)
    assert (answer.timed_out, answer.code) == (True, 124)
    assert len(answer.out) <= LIMIT + 100
    assert len(answer.err) <= LIMIT + 100


@pytest.mark.parametrize(
    "stdin", [b"", b"x" * 100_000, b"x" * 20_000_000], ids=["none", "small", "large"]
)
def test_nothing_at_all(adversary: Start, stdin: bytes) -> None:
    """No word, no end, and nobody who reads: neither the answer nor the question may take longer
    than the deadline.
    """
    one = adversary(lambda *_: one.closed.wait(), window=64)  # type: ignore[arg-type, return-value]
    answer = ask(one, timeout=0.1, stdin=stdin)
    assert (answer.timed_out, answer.code) == (True, 124)


def test_memory_of_a_gigabyte() -> None:
    """What is not kept is not held."""
    chunk, lines = b"x" * 2**18, list[str]()
    kept, followed = Output("m"), Output("m", lines.append)
    tracemalloc.start()
    for each in (kept, followed):
        each.feed(b"m\n")
        for _ in range(2**30 // len(chunk)):
            each.feed(chunk)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * LIMIT
    assert followed.end() == ""
    assert [len(line) for line in lines] == [LONGEST_LINE]


def test_memory_of_single_bytes() -> None:
    """Nor does it matter in how many pieces it comes."""
    kept = Output("m")
    kept.feed(b"m\n")
    kept.feed(b"x" * LIMIT)
    tracemalloc.start()
    for _ in range(500_000):
        kept.feed(b"y")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A reference to each piece would be 4 MB; other tests' threads allocate meanwhile, too.
    assert peak < 2_000_000


def test_who_reads_slowly_is_waited_for(adversary: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log without end, into a pager: what nobody has read yet stays on the node."""
    monkeypatch.setattr(fleet, "_AHEAD", 20)

    def act(session: paramiko.Channel, line: str) -> None:
        session.sendall(marker(line))
        while one.send(session, b"x" * 1000 + b"\n"):
            pass
        over.set()

    over = threading.Event()
    one = adversary(act)
    with Fleet(inventory_of(one)) as nodes:
        lines = nodes.stream([Command(node="gpu01", argv=("true",), timeout=math.inf)])
        assert isinstance(next(lines), Line)
        before = -1
        while before != one.sent:
            before = one.sent
            time.sleep(0.15)
        assert before < 8 * 2**20
        lines.close()  # type: ignore[attr-defined]
        assert over.wait(5)


@pytest.mark.skipif(
    "VLAUNCH_EXAMPLES" not in os.environ,
    reason="a gigabyte through a real sshd: set VLAUNCH_EXAMPLES",
)
def test_a_gigabyte_through_sshd(tmp_path: Path) -> None:
    """On both streams; the process stays small."""
    server = sshd.start(tmp_path / "sshd")
    try:
        script = "head -c 1G /dev/zero & head -c 1G /dev/zero >&2; wait"
        with Fleet(sshd.inventory(server.node())) as nodes:
            tracemalloc.start()
            (answer,) = nodes.run([Command(node="gpu01", argv=("sh", "-c", script), timeout=120)])
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    finally:
        sshd.stop(server)
    assert answer.ok
    assert peak < 200 * 2**20
