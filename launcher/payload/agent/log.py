"""The agent's lines in its container's log. Standard library only."""

from __future__ import annotations

import contextlib
import sys
import traceback


def say(text: str) -> None:
    """Print a line between vLLM's own; parts of it may be a stranger's, in letters that this output
    cannot show.
    """
    shown = "".join(each if each.isprintable() else "?" for each in text)
    encoding = sys.stdout.encoding or "utf-8"
    with contextlib.suppress(OSError):
        print("vlaunch agent: " + shown.encode(encoding, "replace").decode(encoding), flush=True)


def trace(where: str) -> None:
    """Print the exception that is being handled, each line with where it was raised."""
    for line in traceback.format_exc().splitlines():
        say(f"{where}: {line}")
