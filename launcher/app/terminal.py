"""Output of all commands: lines, tables, JSON and errors.

A line that is wider than the terminal continues below its own beginning, broken between words. In a
pipe a line stays one line, for `grep`. Text in backticks, such as a command to copy, counts as one
word; a word that is wider than the terminal is not broken.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from launcher.core import untrusted
from launcher.core.errors import ConnectError, RequestError, VlaunchError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

_CHUNK = re.compile(r"(?:`[^`]*`|[^ \t\n])+")  # a space that does not break is part of it
_PIPE = 10_000  # columns where there is no terminal: no line of ours is longer
_EVIDENCE_LINES = 30


def wrap_rows(line: str, lead: int, width: int) -> Iterator[tuple[int, int, int]]:
    """Yield the rows of a line whose text begins after `lead` characters: start, end, and the
    number of spaces before it.

    `width` and the spaces are cells, of which a Chinese letter takes two. Rows begin at the text's
    column, but never beyond half of the width, and further left for a wide word.
    """
    from rich.cells import cell_len

    indent = min(cell_len(line[:lead]), width // 2)
    begin = margin = 0
    end = len(line[:lead].rstrip())
    for chunk in _CHUNK.finditer(line, lead):
        cells = cell_len(chunk[0])
        column = margin + cell_len(line[begin : chunk.start()])
        below = indent if cells > width else min(indent, width - cells)
        if column + cells > width and below < column:
            if begin < end:
                yield begin, end, margin
            begin, margin = chunk.start(), below
        end = chunk.end()
    yield begin, len(line), margin


@dataclass(frozen=True, slots=True)
class Line:
    """A line whose text begins after `lead` characters; None for an unchanged line of a log."""

    text: Text
    lead: int | None = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        keep_lines = options.overflow == "ignore"
        for row in self._rows(options.max_width):
            row.no_wrap, row.overflow = keep_lines, "ignore" if keep_lines else "fold"
            yield row

    def _rows(self, width: int) -> Iterator[Text]:
        from rich.text import Text

        if self.lead is None:
            yield self.text.copy()
            return
        for begin, end, margin in wrap_rows(self.text.plain, self.lead, width):
            yield Text(" " * margin).append_text(self.text[begin:end])


def console() -> Console:
    """Return standard output for rich: as wide as the terminal; in a pipe, as any line."""
    from rich.console import Console

    wide = Console(highlight=False)
    return wide if wide.is_terminal else Console(highlight=False, width=_PIPE)


def show(renderable: RenderableType, target: Console | None = None) -> None:
    """Print on a console, by default standard output; the terminal wraps wider lines."""
    (target or console()).print(renderable, crop=False, overflow="ignore")


def show_live(frames: Iterable[RenderableType]) -> None:
    """Draw frame after frame in the same position, until the end or Ctrl-C."""
    from rich.live import Live

    with Live(console=console(), auto_refresh=False) as live:
        for frame in frames:
            live.update(frame, refresh=True)


def say(text: str, *, lead: str = "", err: bool = True) -> None:
    """Print a line on standard error, or standard output, after a `lead` that may have colours."""
    before = click.unstyle(lead)
    line = before + text
    for number, (begin, end, margin) in enumerate(wrap_rows(line, len(before), _columns(err=err))):
        row = " " * margin + line[begin:end]
        click.echo(row if number else lead + row[len(before) :], err=err, color=_colour())


def confirm(question: str, *, hint: str = "") -> None:
    """Ask for confirmation; raise Exit(1) for a no, and RequestError without a terminal."""
    if not sys.stdin.isatty():
        hint = f"add `--yes`; {hint}" if hint else "add `--yes`"
        raise RequestError(f"no terminal to confirm: {question}", hint=hint)
    if not click.confirm(question, err=True):
        click.echo("canceled: nothing was changed", err=True)
        raise click.exceptions.Exit(1)


def print_field(row: str) -> None:
    """Print a row on standard output: a name, two spaces or more, and an aligned value."""
    name = row[: len(row) - len(re.split(r"\s{2,}", row, maxsplit=1)[-1])]
    say(row[len(name) :], lead=name, err=False)


def dump_json(value: object) -> str:
    """Return a value as a line of ASCII JSON for terminals; NaN and Infinity become null."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text = json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None))
    return text.replace("\x7f", "\\u007f")  # the one control character that JSON lets pass


def plain_text(text: str, style: str = "") -> Text:
    """Return text on one line, without rich's markup and terminal codes."""
    from rich.text import Text

    return Text(untrusted.single_line(text), style=style)


def text_line(text: str, style: str = "", *, lead: Text | str = "") -> Line:
    """Return text as a line that continues below its beginning, after a `lead`."""
    before = plain_text(lead) if isinstance(lead, str) else lead
    return Line(
        plain_text("").append_text(before).append_text(plain_text(text, style)), len(before)
    )


def evidence_line(text: str, style: str = "dim", *, margin: int) -> Line:
    """Return an unwrapped line of evidence behind `margin` spaces."""
    return Line(plain_text(" " * margin + text, style), None)


def make_table(*names: str) -> Table:
    """Return an empty table; columns with these names fold long words."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def show_error(error: VlaunchError) -> None:
    """Print an error on standard error; evidence is shortened, without terminal codes."""
    say(untrusted.single_line(error.message), lead=click.style("error", fg="red", bold=True) + ": ")
    lines = [untrusted.single_line(line) for line in error.evidence.splitlines() if line.strip()]
    if len(lines) > _EVIDENCE_LINES:
        lines = [
            *lines[: _EVIDENCE_LINES // 2],
            f"… {len(lines) - _EVIDENCE_LINES} lines more …",
            *lines[-_EVIDENCE_LINES // 2 :],
        ]
    is_own_text = isinstance(error, (RequestError, ConnectError))  # words of our own, and no log's
    for line in lines:
        if is_own_text:
            say(line, lead="  ")
        else:
            click.echo("  " + line, err=True)
    if error.hint:
        click.echo(err=True)
        for hint in error.hint.splitlines():
            say(untrusted.single_line(hint), lead=click.style("hint", fg="cyan", bold=True) + ": ")


def _columns(*, err: bool) -> int:
    """Return the width of a stream's terminal."""
    if not (sys.stderr if err else sys.stdout).isatty():
        return _PIPE
    from rich.console import Console

    return Console(stderr=err).width


def _colour() -> bool | None:
    """Return whether colours are allowed; None if the stream decides."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None
