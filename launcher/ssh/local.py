"""Commands on this machine, with the same envelope and guarantees as on a node."""

import contextlib
import math
import os
import queue
import selectors
import subprocess
import threading
import time
from typing import IO, Final

from launcher.core.domain import Answer
from launcher.core.transport import Command
from launcher.ssh import envelope
from launcher.ssh.background import OnStart, RunningCommands
from launcher.ssh.channel import GRACE
from launcher.ssh.output import OnLine, Output

_LINGER: Final = 1.0  # seconds to wait for output that a child in the background still holds open
_POLL: Final = 0.5  # seconds between checks for such a child
_CHUNK: Final = 256 * 2**10


def run(
    command: Command,
    *,
    marker: str,
    running: RunningCommands,
    on_line: OnLine | None = None,
    on_talk: OnStart | None = None,
) -> Answer:
    """Run `command` on this machine and return its answer; arguments as for `channel.run`."""
    start = time.monotonic()
    out, err = Output.make_pair(marker, on_line)
    line, stdin = envelope.wrap_command(command, marker=marker)
    process = subprocess.Popen(
        ["sh", "-c", line],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )
    unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    unsent.put(stdin + envelope.TRAILER if stdin else b"")
    threading.Thread(target=_feed, args=(process.stdin, unsent), name="stdin", daemon=True).start()
    # `timeout`, which leads the group, forwards the signal to all of it
    with process, running.until_done(process.terminate):
        if on_talk is not None:
            on_talk(unsent.put)
        in_time = _listen(process, out, err, running, deadline=start + command.timeout + GRACE)
        unsent.put(None)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=envelope.KILL_AFTER + 5)
        process.kill()
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    seconds = time.monotonic() - start
    printed, errors = out.end(), err.end()
    timed_out = not in_time or (code in (124, 137) and seconds >= command.timeout)
    if timed_out:
        code = 124
    elif running.cancelled:
        code, errors = 255, f"{errors}\ncancelled".strip()
    return Answer(
        node=command.node, code=code, out=printed, err=errors, seconds=seconds, timed_out=timed_out
    )


def _listen(
    process: subprocess.Popen[bytes],
    out: Output,
    err: Output,
    running: RunningCommands,
    *,
    deadline: float,
) -> bool:
    """Read until the process exits or is cancelled; False when the deadline comes first."""
    with selectors.DefaultSelector() as selector:
        for pipe, output in ((process.stdout, out), (process.stderr, err)):
            selector.register(pipe, selectors.EVENT_READ, output)  # type: ignore[arg-type]
        quiet_since = time.monotonic()
        while selector.get_map() and not running.cancelled:
            now = time.monotonic()
            if now >= deadline:
                return False
            ready = selector.select(min(deadline - now, _POLL))
            for key, _ in ready:
                if data := os.read(key.fd, _CHUNK):
                    key.data.feed(data)
                else:
                    selector.unregister(key.fileobj)
            if ready or process.poll() is None:
                quiet_since = now
            elif now >= quiet_since + _LINGER:
                break
    try:
        process.wait(None if math.isinf(deadline) else max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _feed(pipe: IO[bytes], unsent: queue.SimpleQueue[bytes | None]) -> None:
    # the command may exit without reading all of it
    with contextlib.suppress(OSError, ValueError):
        while (data := unsent.get()) is not None:
            view = memoryview(data)
            while view:
                view = view[pipe.write(view[:_CHUNK]) :]
