"""How the processes of an engine are told from others: by the mark that the agent gives them, and
by their session.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import engines
from benchmarks.faults.practice import until
from launcher.agent import process


@pytest.mark.parametrize(("name", "marked"), [("default", True), ("other", False), ("def", False)])
def test_the_mark_of_a_server(name: str, marked: bool) -> None:
    """As the agent makes it, for any generation."""
    env = {process.MARK: process.mark_value("default.12")}
    with subprocess.Popen(["sleep", "5"], env=env, start_new_session=True) as one:
        # During exec(2) a process has no environment for a moment.
        assert until(lambda: engines._marked(one.pid, "default"), 2)
        assert engines._marked(one.pid, name) is marked
        assert engines._session(one.pid) == one.pid
        one.kill()


def test_what_ray_runs_has_another_mark() -> None:
    """It belongs to no server."""
    with subprocess.Popen(["sleep", "5"], env={process.MARK: process.mark_value("ray")}) as one:
        assert until(lambda: b"VLAUNCH_ENGINE" in Path(f"/proc/{one.pid}/environ").read_bytes(), 2)
        assert not engines._marked(one.pid, "ray")
        assert not engines._marked(one.pid, "default")
        one.kill()


def test_frozen_and_thawed() -> None:
    """A process that has gone meanwhile is no error."""
    with subprocess.Popen(["sleep", "5"]) as one:
        engines.freeze([one.pid])
        assert until(lambda: _state(one.pid) == "T", 2)
        engines.thaw([one.pid])
        assert until(lambda: _state(one.pid) == "S", 2)
        one.kill()
    engines.freeze([one.pid])

    assert engines.command_line(one.pid) is None


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
