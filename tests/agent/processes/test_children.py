"""The agent's child processes, and orphans."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.agent.processes import children
from tests.agent.waits import lives, until

pytestmark = pytest.mark.processes
_SUBREAPER = 36  # prctl(2): adopt orphans, like the first process of a container
# Leave a grandchild that exits at once, and print its number.
ORPHAN = "import os\nif not (pid := os.fork()):\n    os._exit(0)\nprint(pid, flush=True)"


@pytest.fixture
def first_process() -> Iterator[None]:
    """Make this process the parent of orphans."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    libc.prctl(_SUBREAPER, 0, 0, 0, 0)


def test_a_short_program() -> None:
    """Its exit code and output; missing programs and timeouts have their own codes."""
    say = "import sys; print('out'); print('\\u00df', file=sys.stderr, flush=True); sys.exit(3)"
    code, out = children.run((sys.executable, "-S", "-c", say), 20.0)
    assert (code, sorted(out.split())) == (3, ["out", "ß"])
    assert children.run(("/no/such/program",), 5.0)[0] == 127
    code, out = children.run(("sleep", "60"), 0.1)
    assert (code, out) == (124, "sleep did not exit within 0.1 s")
    assert children._awaited_pids == set()


def test_orphans_are_reaped(first_process: None) -> None:
    """No other process waits for them, and zombies fill the process table."""
    created = subprocess.run(
        [sys.executable, "-S", "-c", ORPHAN], capture_output=True, check=True, text=True
    )
    pid = int(created.stdout)

    def gone() -> bool:
        children.reap()
        return not Path(f"/proc/{pid}").exists()

    until(gone, "the orphan is reaped")


def test_exit_codes_are_left_to_their_parents(first_process: None) -> None:
    """Code that started a program waits for it, even long after its exit."""
    process = children.spawn((sys.executable, "-S", "-c", "raise SystemExit(7)"))
    until(lambda: not lives(process.pid), "it has ended")
    for _ in range(3):
        children.reap()

    assert process.wait(60) == 7
    children.forget(process)
    children.reap()
    assert children._awaited_pids == set()


def test_no_children() -> None:
    """The reaper runs twice per second."""
    children.reap()


@pytest.mark.parametrize(
    ("soft", "hard", "after"), [(64, 4096, 4096), (64, 1 << 20, 65536), (1 << 17, 1 << 20, 1 << 17)]
)
def test_programs_may_open_many_files(soft: int, hard: int, after: int) -> None:
    """Up to the hard limit; a higher soft limit stays."""
    script = (
        "import resource\n"
        "from launcher.agent.processes import children\n"
        "limits = []\n"
        f"resource.getrlimit = lambda which: ({soft}, {hard})\n"
        "resource.setrlimit = lambda which, both: limits.append(both)\n"
        "children.raise_file_limit()\n"
        "print(limits)"
    )
    printed = subprocess.run(
        (sys.executable, "-c", script), capture_output=True, text=True, check=True
    ).stdout

    assert printed.strip() == str([] if after == soft else [(after, hard)])
