"""How an error reads: where and what happened, the evidence, and what to do about it."""

from __future__ import annotations

import os

import click

from launcher.errors import VlaunchError
from launcher.tools import untrusted

_LINES = 30


def show(error: VlaunchError) -> None:
    """Print an error on standard error; evidence is shortened in the middle, and cleaned of
    terminal codes.
    """
    colour = False if os.environ.get("NO_COLOR") else None  # None: as the terminal can
    click.echo(
        click.style("error", fg="red", bold=True) + ": " + untrusted.brief(error.message),
        err=True,
        color=colour,
    )
    lines = [untrusted.brief(line) for line in error.evidence.splitlines() if line.strip()]
    if len(lines) > _LINES:
        lines = [
            *lines[: _LINES // 2],
            f"… {len(lines) - _LINES} lines more …",
            *lines[-_LINES // 2 :],
        ]
    for line in lines:
        click.echo("  " + line, err=True, color=colour)
    if error.hint:
        click.echo(err=True, color=colour)
        for hint in error.hint.splitlines():
            click.echo(
                click.style("hint", fg="cyan", bold=True) + ": " + untrusted.brief(hint),
                err=True,
                color=colour,
            )
