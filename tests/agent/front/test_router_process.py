"""The front's router as a child of the agent."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from launcher.agent.front.haproxy import FOLDER
from launcher.agent.front.router_process import SOCKET, TABLE, RouterProcess
from tests.agent.waits import lives, until

pytestmark = pytest.mark.processes


def test_the_router_runs_while_its_table_exists(tmp_path: Path) -> None:
    """It is started again when it dies."""
    folder, router = tmp_path / FOLDER, RouterProcess(str(tmp_path))
    router.tick()
    assert router._process is None
    folder.mkdir(0o700)
    (folder / TABLE).write_text("{}")

    def runs() -> bool:
        router.tick()
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(folder / SOCKET)) == 0

    until(runs, "the router starts")
    assert router._process is not None
    first = router._process.pid
    assert folder.stat().st_mode & 0o777 == 0o711
    assert (folder / SOCKET).stat().st_mode & 0o777 == 0o600
    os.kill(first, signal.SIGKILL)
    until(lambda: not lives(first), "the router dies")
    until(lambda: runs() and router._process is not None, "the router starts again")
    assert router._process is not None
    second = router._process.pid
    (folder / TABLE).unlink()

    def has_ended() -> bool:
        router.tick()
        return router._process is None

    until(has_ended, "the router ends")
    assert not lives(second)
