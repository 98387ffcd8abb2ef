"""Commands on an open SSH connection: one channel, one thread, both streams.

Fabric's own `run` starts three threads per command and polls, which is slow with a hundred nodes
(benchmarks/RESULTS.md).
"""

import contextlib
import math
import threading
import time
from functools import partial
from typing import Final

import paramiko

from launcher.core.domain import Answer
from launcher.core.transport import Command
from launcher.ssh import envelope
from launcher.ssh.background import OnStart, RunningCommands
from launcher.ssh.output import OnLine, Output

GRACE: Final = 10.0  # seconds after the node's own deadline before this side stops reading
OPEN_TIMEOUT: Final = 30.0
_LINGER: Final = 1.0  # seconds to wait for output that a child in the background still holds open
_CHUNK: Final = 256 * 2**10
_NO_STATUS: Final = 254  # replaces an exit status that no process can have
_PACKET: Final = 32 * 2**10 - 64  # bytes that paramiko sends at once

CONNECTION_LOST = "the connection was lost"
# A shell started by sshd reads ~/.bashrc, where an `exit` succeeds without running the command.
_NOT_STARTED: Final = (
    "the command did not start: the login shell exited or hangs in its start-up files (~/.bashrc)"
)


class _Wake(threading.Event):
    """Event set by paramiko for any activity on a channel; only the reader clears it."""

    def clear(self) -> None:
        """Ignore paramiko's call, made when only one of the two streams is empty."""

    def reset(self) -> None:
        super().clear()


class _Reply(threading.Event):
    """Reply to a request on a channel; adds the timeout that paramiko lacks."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait; raises SSHException when the server does not reply."""
        if not super().wait(OPEN_TIMEOUT if timeout is None else timeout):
            raise paramiko.SSHException("sshd does not respond")
        return True


def run(
    transport: paramiko.Transport,
    command: Command,
    *,
    marker: str,
    running: RunningCommands,
    on_line: OnLine | None = None,
    on_talk: OnStart | None = None,
) -> Answer:
    """Run `command` and return its answer; a broken connection is code 255, never an exception.

    Args:
        transport: the node's open connection.
        command: what to run.
        marker: see `envelope.wrap`.
        running: registry through which the command can be cancelled.
        on_line: called with each line, which is then not buffered.
        on_talk: called once the command has started, with a function that sends more input.
    """
    start = time.monotonic()
    out, err = Output.make_pair(marker, on_line)
    line, stdin = envelope.wrap_command(command, marker=marker)
    wake = _Wake()
    deadline_passed = False
    try:
        channel = transport.open_session(timeout=OPEN_TIMEOUT)
    except (paramiko.SSHException, EOFError, OSError) as error:
        reason = str(error) or type(error).__name__
        seconds = time.monotonic() - start
        return Answer(
            node=command.node, code=255, err=f"{CONNECTION_LOST}: {reason}", seconds=seconds
        )
    with contextlib.closing(channel), running.until_done(channel.close):
        try:
            channel.in_buffer.set_event(wake)
            channel.in_stderr_buffer.set_event(wake)
            channel.status_event = wake
            channel.event = _Reply()
            # A window that never opens fails the write, at the latest when the command times out.
            channel.settimeout(None if math.isinf(command.timeout) else command.timeout + GRACE)
            channel.exec_command(line)
            sent = threading.Event()
            if len(stdin) > _CHUNK:  # exceeds the window: output must be read meanwhile
                threading.Thread(target=_send, args=(channel, stdin, sent), daemon=True).start()
            else:
                _send(channel, stdin, sent)
            if on_talk is not None:
                on_talk(partial(_send_after_stdin, channel, sent))
            deadline_passed = not _listen(
                channel, wake, out, err, deadline=start + command.timeout + GRACE
            )
        except (paramiko.SSHException, EOFError, OSError):
            _drain_rest(channel, out, err)  # the output before the connection broke is the evidence
        # The protocol allows statuses that POSIX does not; 256 would look like success.
        code = channel.exit_status if channel.exit_status <= 255 else _NO_STATUS
    seconds = time.monotonic() - start
    printed, errors = out.end(), err.end()
    timed_out = deadline_passed or (code in (124, -1) and seconds >= command.timeout)
    if timed_out:
        code = 124
    elif code == -1 and running.cancelled:
        code, errors = 255, f"{errors}\ncancelled".strip()
    elif code == -1 and channel.eof_received:
        code = 137  # the node reported a signal: `timeout` itself was killed
    elif code == -1:
        code, errors = 255, f"{errors}\n{CONNECTION_LOST}".strip()
    if not out.started and code in (0, 124):
        code, errors = code or _NO_STATUS, f"{errors}\n{_NOT_STARTED}".strip()
    return Answer(
        node=command.node, code=code, out=printed, err=errors, seconds=seconds, timed_out=timed_out
    )


def _listen(
    channel: paramiko.Channel, wake: _Wake, out: Output, err: Output, *, deadline: float
) -> bool:
    """Read until the command exits; False when the deadline comes first."""
    idle_since = 0.0
    while True:
        wake.reset()
        received = _drain(channel, out, err)
        status = channel.exit_status != -1
        if channel.closed or (channel.eof_received and status):
            _drain_rest(channel, out, err)
            return True
        now = time.monotonic()
        if received or not idle_since:
            idle_since = now
        if now >= deadline:
            return False
        if status and now >= idle_since + _LINGER:
            return True
        if received:
            continue  # more may have arrived
        until = min(deadline, idle_since + _LINGER) if status else deadline
        wake.wait(min(max(0.0, until - now), threading.TIMEOUT_MAX))


def _drain(channel: paramiko.Channel, out: Output, err: Output) -> bool:
    """Read each stream once, so that endless output cannot delay the deadline."""
    received = False
    if channel.recv_ready():
        out.feed(channel.recv(_CHUNK))
        received = True
    if channel.recv_stderr_ready():
        err.feed(channel.recv_stderr(_CHUNK))
        received = True
    return received


def _drain_rest(channel: paramiko.Channel, out: Output, err: Output) -> None:
    """Read the remaining output of a finished command, at most one window."""
    deadline = time.monotonic() + _LINGER
    while _drain(channel, out, err) and time.monotonic() < deadline:
        pass


def _send(channel: paramiko.Channel, data: bytes, sent: threading.Event) -> None:
    view = memoryview(data)
    # the command may exit without reading all of it
    with contextlib.suppress(OSError, paramiko.SSHException, EOFError):
        offset = 0
        while offset < len(view):
            offset += channel.send(bytes(view[offset : offset + _PACKET]))
        if data:
            channel.sendall(envelope.TRAILER)
    sent.set()


def _send_after_stdin(channel: paramiko.Channel, sent: threading.Event, data: bytes) -> None:
    """Send a line after the standard input; ignored when the connection is gone."""
    with contextlib.suppress(OSError, paramiko.SSHException, EOFError):
        if sent.wait(OPEN_TIMEOUT):
            channel.sendall(data)
