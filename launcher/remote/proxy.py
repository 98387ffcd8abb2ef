"""A `ProxyCommand` as a socket: what it reads and writes is the connection."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from typing import IO

import paramiko


class ProxySocket(socket.socket):
    """One end of a socket pair; the other is the command's standard input and output.

    Closing it ends the command.
    """

    command: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    said = ""

    @classmethod
    def start(cls, command: str) -> ProxySocket:
        """Start `command` in a shell."""
        ours, theirs = socket.socketpair()
        made = cls(fileno=ours.detach())
        made.command = command
        made.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the socket
        with theirs:
            end = theirs.fileno()
            made.process = subprocess.Popen(
                ["sh", "-c", command],
                stdin=end,
                stdout=end,
                stderr=made.errors,
                start_new_session=True,
            )
        return made

    def failure(self) -> paramiko.ProxyCommandFailure | None:
        """Return what the command said if it ended by itself; the connection is closed then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.5)
        self.close()
        if self.process.returncode == -signal.SIGTERM:
            return None
        return paramiko.ProxyCommandFailure(
            self.command, self.said or f"exit status {self.process.returncode}"
        )

    def close(self) -> None:
        """Close the connection and end the command."""
        super().close()
        if self.errors.closed:
            return
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with contextlib.suppress(ValueError):  # two threads may close at once
            self.errors.seek(0)
            self.said = self.errors.read().decode("utf-8", errors="replace").strip()
            self.errors.close()
