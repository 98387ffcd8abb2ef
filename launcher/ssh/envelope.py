"""Shell line that a node receives: a constant program around an argv that guarantees cleanup.

The program guarantees four things, whatever happens to the launcher: a deadline, an exact standard
input, no process left behind, and a marked start of the command's own output.

* `timeout` (GNU coreutils) leads the process group and enforces the deadline: TERM, and KILL five
  seconds later.
* A watcher in the same group passes the first N bytes of the channel to the command. It then waits
  for the channel to close, which means that the launcher was cancelled, killed or disconnected, and
  kills the group. If the channel closes before all N bytes and the line break after them have
  arrived, the group is killed before the command can see an end of file, so a truncated input never
  looks complete. With `talk`, later lines are passed on to the command.
* The inner shell waits for the command, so that the KILL reaches a command that ignores TERM.
* A marker line is printed first on both streams; anything before it comes from the login shell's
  start-up files.

Messages are in English (`LC_ALL=C`; with C.UTF-8, `LANGUAGE` may choose another language). Names of
files stay bytes: Python 3.7 reads and prints them as UTF-8 in this locale, too.

The SSH user cannot signal processes of another user (`sudo`); they see their output close instead.
The program contains no single quote, backslash or line break, which fish and csh parse differently.
"""

import math
import shlex
from typing import Final, Literal

from launcher.core.domain import Argv
from launcher.core.transport import Command

KILL_AFTER: Final = 5  # seconds between TERM and KILL

Hold = Literal["close", "hold", "talk"]

TRAILER: Final = b"\n"  # follows the standard input and marks it as complete

_WATCH: Final = (
    'if [ "$n" -gt 0 ]; then head -c "$n" <&3; read -r k <&3 || kill -TERM 0; fi; '
    '[ "$h" = close ] && exec >&-; while read -r k <&3; do [ "$h" = talk ] && echo "$k"; done; '
    'kill -0 "$$" && kill -TERM 0; '
)
_PROGRAM: Final = (
    'm=$1 n=$2 h=$3; shift 3; export LC_ALL=C; echo "$m"; echo "$m" >&2; exec 3<&0; trap k=1 TERM; '
    f'{{ {{ {_WATCH}}} 2>/dev/null & }} | exec "$@" 3<&- & p=$!; exec 2>/dev/null; '
    'while k=; wait "$p"; c=$?; [ "$k" ]; do :; done; exit "$c"'
)


def shell_line(argv: Argv) -> str:
    """Quote an argv as a shell line; the only place that does so."""
    return shlex.join(argv)


def wrap_command(command: Command, *, marker: str) -> tuple[str, bytes]:
    """Return the shell line to send for a command, and its standard input."""
    stdin = command.stdin() if command.stdin is not None else b""
    sent = wrap(
        command.full_argv,
        timeout=command.timeout,
        stdin=len(stdin),
        marker=marker,
        hold="talk" if command.interactive else "hold" if command.hold_stdin else "close",
    )
    return sent, stdin


def encode_line(line: str) -> bytes:
    """Encode a line for a command with `talk`.

    Raises ValueError for text that `read` and `echo` of some shells would change: backslashes,
    blanks at the ends, leading dashes.
    """
    if line.strip() != line or not line or line[0] == "-" or set(line) & {"\\", "\n", "\0"}:
        raise ValueError(f"cannot be sent to a command: {line[:100]!r}")
    return line.encode() + b"\n"


def wrap(argv: Argv, *, timeout: float, stdin: int, marker: str, hold: Hold = "close") -> str:
    """Return the shell line to send.

    Args:
        argv: the command.
        timeout: seconds until the node kills it; infinity for none.
        stdin: size of the standard input in bytes; `TRAILER` must follow unless 0.
        hold: the command's input after those bytes: closed, open until the command exits, or open
            for further lines.
        marker: line, unique to this launcher, that precedes the output on both streams.
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
    return f"exec {shell_line((*head, *argv))}"
