"""How the processes of an engine are told from others: by the mark that the agent gives them, and
by their session.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import engines
from benchmarks.faults.testbed import wait_until
from launcher.agent.processes import process


@pytest.mark.parametrize(("name", "marked"), [("default", True), ("other", False), ("def", False)])
def test_the_mark_of_a_server(name: str, marked: bool) -> None:
    """As the agent makes it, for any generation."""
    env = {process.MARK: process.mark_value("default.12")}
    with subprocess.Popen(["sleep", "5"], env=env, start_new_session=True) as child:
        # During exec(2) a process has no environment for a moment.
        assert wait_until(lambda: engines._is_marked(child.pid, "default"), 2)
        assert engines._is_marked(child.pid, name) is marked
        assert engines._session_id(child.pid) == child.pid
        child.kill()


def test_what_ray_runs_has_another_mark() -> None:
    """It belongs to no server."""
    with subprocess.Popen(["sleep", "5"], env={process.MARK: process.mark_value("ray")}) as child:
        assert wait_until(
            lambda: b"VLAUNCH_ENGINE" in Path(f"/proc/{child.pid}/environ").read_bytes(), 2
        )
        assert not engines._is_marked(child.pid, "ray")
        assert not engines._is_marked(child.pid, "default")
        child.kill()


def test_frozen_and_thawed() -> None:
    """A process that has gone meanwhile is no error."""
    with subprocess.Popen(["sleep", "5"]) as child:
        engines.freeze([child.pid])
        assert wait_until(lambda: _state(child.pid) == "T", 2)
        engines.thaw([child.pid])
        assert wait_until(lambda: _state(child.pid) == "S", 2)
        child.kill()
    engines.freeze([child.pid])

    assert engines.command_line(child.pid) is None


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
