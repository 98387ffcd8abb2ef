"""Endless, random or no output: every command ends in time, in bounded memory, with an answer."""

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
    """Shorten the grace period after a timeout."""
    monkeypatch.setattr(channel, "GRACE", 0.2)


def execute(server: Adversary, *, timeout: float = 20.0, stdin: bytes = b"") -> Answer:
    with Fleet(inventory_of(server)) as nodes:
        source = (lambda: stdin) if stdin else None
        began = time.monotonic()
        (answer,) = nodes.run(
            [Command(node="gpu01", argv=("true",), timeout=timeout, stdin=source)]
        )
        assert time.monotonic() - began < timeout + 60
        return answer


def test_random_bytes(adversary: Start) -> None:
    """Without the marker it is a login shell's noise: evidence of limited size."""

    def act(session: paramiko.Channel, _: str) -> None:
        session.sendall(GARBAGE)
        session.sendall_stderr(GARBAGE)
        session.send_exit_status(1)

    answer = execute(adversary(act))
    assert (answer.code, answer.ok) == (1, False)
    assert 0 < len(answer.out) <= 64 * 2**10
    answer.tail.encode()


def test_a_good_beginning_and_then_garbage(adversary: Start) -> None:
    """Everything after the marker is the answer."""

    def act(session: paramiko.Channel, line: str) -> None:
        session.sendall(b"motd\n" + marker(line) + b'{"nodes": ' + GARBAGE)
        session.send_exit_status(0)

    answer = execute(adversary(act))
    assert answer.ok
    assert answer.out.startswith('{"nodes": ')


@pytest.mark.parametrize("status", [256, 512, 2**32 - 1])
def test_an_exit_status_that_no_process_has(adversary: Start, status: int) -> None:
    """The protocol has four bytes for it; as our exit status, 256 would be success."""

    def act(session: paramiko.Channel, line: str) -> None:
        session.sendall(marker(line))
        session.send_exit_status(status)

    answer = execute(adversary(act))
    assert not answer.ok
    assert 0 < answer.code < 255


@pytest.mark.parametrize("started", [True, False])
def test_output_without_end(adversary: Start, started: bool) -> None:
    """On both streams at once, faster than it can be read, past the deadline."""

    def act(session: paramiko.Channel, line: str) -> None:
        if started:
            session.sendall(marker(line))
            session.sendall_stderr(marker(line))
        chunk = b"x" * 2**15
        while server.send(session, chunk) and server.send(session, chunk, error=True):
            pass

    server = adversary(act)
    answer = execute(server, timeout=0.3)
    assert (answer.timed_out, answer.code) == (True, 124)
    assert len(answer.out) <= LIMIT + 100
    assert len(answer.err) <= LIMIT + 100


@pytest.mark.parametrize(
    "stdin", [b"", b"x" * 100_000, b"x" * 20_000_000], ids=["none", "small", "large"]
)
def test_nothing_at_all(adversary: Start, stdin: bytes) -> None:
    """No output, no end, and stdin unread: the deadline limits reading and writing."""
    server = adversary(lambda *_: server.closed.wait(), window=64)  # type: ignore[arg-type, return-value]
    answer = execute(server, timeout=0.1, stdin=stdin)
    assert (answer.timed_out, answer.code) == (True, 124)


def test_memory_of_a_gigabyte() -> None:
    """Memory stays within the limit, with and without a callback."""
    chunk, lines = b"x" * 2**18, list[str]()
    collected, followed = Output("m"), Output("m", lines.append)
    tracemalloc.start()
    for output in (collected, followed):
        output.feed(b"m\n")
        for _ in range(2**30 // len(chunk)):
            output.feed(chunk)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * LIMIT
    assert followed.end() == ""
    assert [len(line) for line in lines] == [LONGEST_LINE]


def test_memory_of_single_bytes() -> None:
    """The number of pieces does not matter."""
    output = Output("m")
    output.feed(b"m\n")
    output.feed(b"x" * LIMIT)
    tracemalloc.start()
    for _ in range(500_000):
        output.feed(b"y")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A reference to each piece would be 4 MB; other tests' threads allocate meanwhile, too.
    assert peak < 2_000_000


def test_a_slow_reader_slows_the_node(adversary: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless log in a pager: unread output stays on the node."""
    monkeypatch.setattr(fleet, "_AHEAD", 20)

    def act(session: paramiko.Channel, line: str) -> None:
        session.sendall(marker(line))
        while server.send(session, b"x" * 1000 + b"\n"):
            pass
        over.set()

    over = threading.Event()
    server = adversary(act)
    with Fleet(inventory_of(server)) as nodes:
        lines = nodes.stream([Command(node="gpu01", argv=("true",), timeout=math.inf)])
        assert isinstance(next(lines), Line)
        before = -1
        while before != server.sent:
            before = server.sent
            time.sleep(0.15)
        assert before < 8 * 2**20
        lines.close()  # type: ignore[attr-defined]
        assert over.wait(60)


@pytest.mark.skipif(
    "VLAUNCH_EXAMPLES" not in os.environ,
    reason="a gigabyte through a real sshd: set VLAUNCH_EXAMPLES",
)
def test_a_gigabyte_through_sshd(tmp_path: Path) -> None:
    """On both streams; memory stays bounded."""
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
