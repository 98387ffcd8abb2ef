"""The front's router (`router.py`) as a child of the agent on each of the front's nodes.

Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from ..log import say
from ..processes import children, process
from .haproxy import FOLDER

# In the front's folder: the router's and HAProxy's sockets, and the launcher's models and limits.
SOCKET, SERVERS, TABLE = "router.sock", "servers.sock", "router.json"
# Headers between HAProxy and the router: a server and its replica, and the models of the key.
SERVER, REPLICA, MODELS = "x-vlaunch-server", "x-vlaunch-replica", "x-vlaunch-models"
_RETRY = 1.0  # seconds until the router is started again


class RouterProcess:
    """The router, which runs while its table exists."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(folder, FOLDER)
        self._process: subprocess.Popen[bytes] | None = None
        self._again = 0.0

    def tick(self) -> None:
        """Start the router, start it again when it has exited, or stop it without a table."""
        expected = os.path.exists(os.path.join(self._folder, TABLE))
        if self._process is not None and self._process.poll() is not None:
            children.forget(self._process)
            if expected:
                code = self._process.returncode
                say(f"the front's router exited with code {code}; restarting it")
            self._process, self._again = None, time.monotonic() + _RETRY
        if self._process is not None and not expected:
            self._process.terminate()
        if self._process is None and expected and time.monotonic() >= self._again:
            self._start()

    def _start(self) -> None:
        try:
            self._process = children.spawn(
                (sys.executable, "-m", f"{__package__}.router", self._folder),
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    process.MARK: process.mark_value("router"),
                },
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            say(f"cannot start the front's router: {error.strerror}")
            self._again = time.monotonic() + _RETRY

    @property
    def runs(self) -> bool:
        """True if the router was started, and was not seen to exit."""
        return self._process is not None

    def stop(self) -> None:
        """Stop the router."""
        if self._process is not None:
            self._process.terminate()
