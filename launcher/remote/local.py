"""Run one command on this machine: the node one sits at, with the same envelope and the same
promises.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
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
_POLL: Final = 0.5  # seconds between looks at whether such a child is all that is left
_CHUNK: Final = 256 * 2**10
_STOP, _SAY = b"x", b"s"


def run(
    command: Command,
    *,
    marker: str,
    running: Running,
    on_line: Callable[[str], None] | None = None,
    on_error_line: Callable[[str], None] | None = None,
    on_talk: Callable[[Callable[[bytes], None]], None] | None = None,
) -> Answer:
    """Run `command` here and return its answer; arguments as for `channel.run`."""
    start = time.monotonic()
    out, err = Output(marker, on_line), Output(marker, on_error_line)
    line, stdin = envelope.of(command, marker=marker)
    process = subprocess.Popen(
        ["sh", "-c", line],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )
    with (
        process,
        _Conversation(process, stdin, out, err) as conversation,
        running.until_done(conversation.stop),
    ):
        if on_talk is not None:
            on_talk(conversation.say)
        in_time = conversation.hold(deadline=start + command.timeout + GRACE)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    seconds = time.monotonic() - start
    said, complained = out.end(), err.end()
    timed_out = not in_time or (code in (124, 137) and seconds >= command.timeout)
    if timed_out:
        code = 124
    elif running.cancelled:
        code, complained = 255, f"{complained}\ncancelled".strip()
    return Answer(
        node=command.node, code=code, out=said, err=complained, seconds=seconds, timed_out=timed_out
    )


class _Conversation:
    """Both directions of a running process, by one thread; leaving the block closes them, which
    ends the process.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], stdin: bytes, out: Output, err: Output
    ) -> None:
        self._process = process
        self._selector = selectors.DefaultSelector()
        self._stopped, self._stop = socket.socketpair()
        self._selector.register(self._stopped, selectors.EVENT_READ)
        for pipe, output in ((process.stdout, out), (process.stderr, err)):
            self._selector.register(_there(pipe), selectors.EVENT_READ, output)
        self._unsent = [memoryview(stdin), memoryview(envelope.TRAILER)] if stdin else []
        os.set_blocking(_there(process.stdin).fileno(), False)
        self._waits_to_say = False
        self._go_on()

    def __enter__(self) -> _Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for end in (
            self._process.stdin,
            self._process.stdout,
            self._process.stderr,
            self._stopped,
            self._stop,
        ):
            if end is not None:
                end.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=envelope.KILL_AFTER + 5)
            return
        self._process.kill()

    def stop(self) -> None:
        """End it, from another thread."""
        with contextlib.suppress(OSError):
            self._stop.send(_STOP)

    def say(self, data: bytes) -> None:
        """Send more to the standard input, from another thread."""
        self._unsent.append(memoryview(data))
        with contextlib.suppress(OSError):  # it is over
            self._stop.send(_SAY)

    def hold(self, *, deadline: float) -> bool:
        """Talk and listen until the process has ended or was stopped; False when the deadline came
        first.
        """
        open_ends = {self._process.stdout, self._process.stderr}
        quiet_since = time.monotonic()
        while open_ends:
            now = time.monotonic()
            if now >= deadline:
                return False
            ready = self._selector.select(min(deadline - now, _POLL))
            for key, _ in ready:
                if key.fileobj is self._stopped:
                    if _STOP in self._stopped.recv(_CHUNK):
                        return True
                    self._go_on()
                    continue
                if key.fileobj is self._process.stdin:
                    self._say()
                elif data := os.read(key.fd, _CHUNK):
                    key.data.feed(data)
                else:
                    self._selector.unregister(key.fileobj)
                    open_ends.discard(key.fileobj)
            if ready or self._process.poll() is None:
                quiet_since = now
            elif now >= quiet_since + _LINGER:
                return True
        return True

    def _go_on(self) -> None:
        """Wait for room in the pipe, where something is to be sent."""
        if self._unsent and not self._waits_to_say:
            self._selector.register(_there(self._process.stdin), selectors.EVENT_WRITE)
            self._waits_to_say = True

    def _say(self) -> None:
        pipe = _there(self._process.stdin)
        try:
            written = os.write(pipe.fileno(), self._unsent[0][:_CHUNK])
        except BrokenPipeError:  # the command has ended without reading it all
            self._unsent.clear()
        else:
            self._unsent[0] = self._unsent[0][written:]
            if not self._unsent[0]:
                del self._unsent[0]
        if not self._unsent:
            self._selector.unregister(pipe)
            self._waits_to_say = False


def _there(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ValueError("the process was started without this pipe")
    return pipe
