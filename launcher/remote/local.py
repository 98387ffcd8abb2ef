"""Run one command on this machine: the node one sits at, with the same envelope and the same promises."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable
from typing import IO, Final

from launcher.model import Answer
from launcher.remote import envelope
from launcher.remote.channel import GRACE
from launcher.remote.output import Output
from launcher.remote.running import Running
from launcher.transport import Command

_LINGER: Final = 1.0  # seconds to wait for output that a child in the background still holds open
_CHUNK: Final = 256 * 2**10


def run(
    command: Command,
    *,
    marker: str,
    running: Running,
    on_line: Callable[[str], None] | None = None,
    on_error_line: Callable[[str], None] | None = None,
) -> Answer:
    """Run `command` here and return its answer; arguments as for `channel.run`."""
    start = time.monotonic()
    out, err = Output(marker, on_line), Output(marker, on_error_line)
    stdin = command.stdin() if command.stdin is not None else b""
    line = envelope.wrap(command.argv, timeout=command.timeout, stdin=len(stdin), marker=marker)
    with subprocess.Popen(
        ["sh", "-c", line],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    ) as process:
        mouth = _Mouth(process)
        with running.until_done(mouth.close):
            if stdin:
                threading.Thread(target=mouth.say, args=(stdin,), daemon=True).start()
            in_time = _listen(process, out, err, deadline=start + command.timeout + GRACE)
        mouth.close()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        code = _wait(process)
    seconds = time.monotonic() - start
    said, complained = out.end(), err.end()
    timed_out = not in_time or (code in (124, 137) and seconds >= command.timeout)
    if timed_out:
        code = 124
    elif running.cancelled:
        code, complained = 255, f"{complained}\ncancelled".strip()
    return Answer(node=command.node, code=code, out=said, err=complained, seconds=seconds, timed_out=timed_out)


class _Mouth:
    """The command's standard input: written by one thread, closed by another."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        self._pipe: IO[bytes] = process.stdin
        # Closing a descriptor another thread is writing to is not safe; this one stops the writer first.
        self._open = True
        self._lock = threading.Lock()
        os.set_blocking(self._pipe.fileno(), False)

    def say(self, data: bytes) -> None:
        view = memoryview(data)
        with contextlib.suppress(OSError, ValueError):  # the command may end without reading it all
            for part in (view, memoryview(envelope.TRAILER)):
                at = 0
                while at < len(part):
                    at += self._some(part[at : at + _CHUNK])

    def _some(self, part: memoryview) -> int:
        with self._lock:
            if not self._open:
                raise ValueError("closed")
            written = self._pipe.write(part)
        if written:
            return written
        time.sleep(0.005)  # the pipe is full: the command is slow
        return 0

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._pipe.close()


def _listen(process: subprocess.Popen[bytes], out: Output, err: Output, *, deadline: float) -> bool:
    with selectors.DefaultSelector() as selector:
        for pipe, output in ((process.stdout, out), (process.stderr, err)):
            assert pipe is not None
            selector.register(pipe, selectors.EVENT_READ, output)
        gone_since = math.inf
        while selector.get_map():
            now = time.monotonic()
            if now >= deadline:
                return False
            ready = selector.select(min(deadline - now, 0.5))
            for key, _ in ready:
                data = os.read(key.fd, _CHUNK)
                if data:
                    key.data.feed(data)
                else:
                    selector.unregister(key.fileobj)
            if process.poll() is not None and not ready:
                gone_since = min(gone_since, now)
                if now >= gone_since + _LINGER:
                    return True
    return True


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        code = process.wait(timeout=envelope.KILL_AFTER + 5)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return code if code >= 0 else 128 - code
