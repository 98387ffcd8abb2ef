"""How an error reads: where and what happened, the evidence, and what to do about it."""

from __future__ import annotations

import click

from launcher.app.terminal import say
from launcher.core import untrusted
from launcher.core.errors import ConnectError, RequestError, VlaunchError

_LINES = 30


def show(error: VlaunchError) -> None:
    """Print an error on standard error; evidence is shortened in the middle, and cleaned of
    terminal codes.
    """
    say(untrusted.brief(error.message), lead=click.style("error", fg="red", bold=True) + ": ")
    lines = [untrusted.brief(line) for line in error.evidence.splitlines() if line.strip()]
    if len(lines) > _LINES:
        lines = [
            *lines[: _LINES // 2],
            f"… {len(lines) - _LINES} lines more …",
            *lines[-_LINES // 2 :],
        ]
    ours = isinstance(error, (RequestError, ConnectError))  # words of our own, and no log's
    for line in lines:
        if ours:
            say(line, lead="  ")
        else:
            click.echo("  " + line, err=True)
    if error.hint:
        click.echo(err=True)
        for hint in error.hint.splitlines():
            say(untrusted.brief(hint), lead=click.style("hint", fg="cyan", bold=True) + ": ")
