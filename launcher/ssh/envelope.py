"""The line a node receives: one constant shell program around an argv, so that every command ends
on the node itself.

The program answers for four things, whatever happens to the launcher: a deadline, an exact standard
input, no process left behind, and output that starts where the command's own output starts.

* `timeout` (GNU coreutils) leads the process group and enforces the deadline: TERM, and KILL five
  seconds later.
* A watcher, in the same group, hands the first N bytes of the channel to the command. After them it
  waits for the channel to close: that is how a cancelled, killed or disconnected launcher looks
  from the node. It then ends the whole group. If the channel closes before all N bytes (and the
  line break that follows them) have come, the group ends before the command can see an end of file,
  so half an input is never taken for a whole one. Lines that come later go to a command that is
  talked to.
* The inner shell stays until the command is gone, so that the KILL still finds it when it ignores
  TERM.
* A marker line goes out first on both streams; what a login shell's start-up files printed before
  it is not the command's.

A process of another user (`sudo`) cannot be signalled by the login's user; it sees its output close
instead. The program contains no single quote, backslash or line break, which is what fish and csh
read differently.
"""

from __future__ import annotations

import math
import shlex
from typing import Final, Literal

from launcher.core.domain import Argv
from launcher.core.transport import Command

KILL_AFTER: Final = 5  # seconds between TERM and KILL

Hold = Literal["close", "hold", "talk"]

TRAILER: Final = b"\n"  # follows the standard input, to say that all of it has come

_WATCH: Final = (
    'if [ "$n" -gt 0 ]; then head -c "$n" <&3; read -r k <&3 || kill -TERM 0; fi; '
    '[ "$h" = close ] && exec >&-; while read -r k <&3; do [ "$h" = talk ] && echo "$k"; done; '
    'kill -0 "$$" && kill -TERM 0; '
)
_PROGRAM: Final = (
    'm=$1 n=$2 h=$3; shift 3; echo "$m"; echo "$m" >&2; exec 3<&0; trap k=1 TERM; '
    f'{{ {{ {_WATCH}}} 2>/dev/null & }} | exec "$@" 3<&- & p=$!; exec 2>/dev/null; '
    'while k=; wait "$p"; c=$?; [ "$k" ]; do :; done; exit "$c"'
)


def line(argv: Argv) -> str:
    """Return the argv as one shell line: the only place where words become a line."""
    return shlex.join(argv)


def of(command: Command, *, marker: str) -> tuple[str, bytes]:
    """Return the line to send for a command, and its standard input."""
    stdin = command.stdin() if command.stdin is not None else b""
    sent = wrap(
        command.words,
        timeout=command.timeout,
        stdin=len(stdin),
        marker=marker,
        hold="talk" if command.talk else "hold" if command.hold_stdin else "close",
    )
    return sent, stdin


def spoken(line: str) -> bytes:
    """Return the bytes of a line for a command that is talked to.

    Raises ValueError for what the program would change: `read` and `echo` of the many shells agree
    on words without backslashes, blanks at the ends and leading dashes.
    """
    if line.strip() != line or not line or line[0] == "-" or set(line) & {"\\", "\n", "\0"}:
        raise ValueError(f"cannot be said to a command: {line[:100]!r}")
    return line.encode() + b"\n"


def wrap(argv: Argv, *, timeout: float, stdin: int, marker: str, hold: Hold = "close") -> str:
    """Return the line to send.

    Args:
        argv: the command.
        timeout: seconds until the node ends it; infinity for none.
        stdin: bytes that the command reads; `TRAILER` must follow them when there are any.
        hold: what becomes of the command's input after those bytes: closed, held open until the
            command ends, or is ended, or open for lines that are said to it.
        marker: the line, unique to this launcher, that precedes the output on both streams.
    """
    seconds = "0" if math.isinf(timeout) else f"{max(timeout, 0.001):.3f}".rstrip("0").rstrip(".")
    head = (
        "timeout",
        "-k",
        str(KILL_AFTER),
        seconds,
        "sh",
        "-c",
        _PROGRAM,
        "vlaunch",
        marker,
        str(stdin),
        hold,
    )
    return f"exec {line((*head, *argv))}"
