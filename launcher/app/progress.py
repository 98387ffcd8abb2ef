"""Display of events: live in a terminal, plain lines in a pipe, JSON lines for machines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeVar

import click

from launcher.app import terminal
from launcher.app.terminal import Line, dump_json
from launcher.core import untrusted
from launcher.core.domain import fold, natural_key
from launcher.core.events import Event, State

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

T = TypeVar("T")

_PER_SECOND = 8  # redraws: one for each event is too often with many nodes
_LINE_INTERVAL = 10.0  # seconds between two lines of progress in a pipe

_SIGNS: dict[State, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "failed": ("✗", "failed", "red"),
    "warn": ("!", "warning", "yellow"),
    "skip": ("-", "skipped", "yellow"),
    "unchanged": ("=", "unchanged", "green"),
    "running": ("…", "…", "cyan"),
    "": ("·", "", "cyan"),
}


class Printer(Protocol):
    """Shows events, one at a time, until it is closed."""

    def show(self, event: Event) -> None:
        """Show one event."""

    def paused(self) -> AbstractContextManager[None]:
        """Leave the terminal alone inside the block, for a prompt."""

    def __enter__(self) -> Printer: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def make_printer(*, as_json: bool = False, silent: bool = False, quiet: bool = False) -> Printer:
    """Choose the display: JSON lines on standard output, else live or plain on standard error;
    `quiet` leaves only warnings and failures, `silent` nothing.
    """
    if as_json:
        return JsonLines()
    if silent:
        return SilentPrinter()
    if quiet:
        return QuietLines()
    return LiveLines() if sys.stderr.isatty() else PlainLines()


class SilentPrinter:
    """Printer that shows nothing; base of the others."""

    def __enter__(self) -> Printer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def show(self, event: Event) -> None:
        """Show nothing."""

    def paused(self) -> AbstractContextManager[None]:
        """Do nothing: there is no display to pause."""
        return nullcontext()


class _Fold:
    """Delay of a step's successes until its last node has finished: one line for all nodes."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], list[str]] = {}
        self._done: dict[tuple[str, str], list[Event]] = {}

    def add(self, event: Event) -> Event | None:
        """Return the event to show now: this one, several merged, or none yet."""
        key = (event.stage, event.text)
        if event.kind != "step" or not event.node:
            return event
        if event.state == "running":
            self._open.setdefault(key, []).append(event.node)
            return event
        waiting = self._open.get(key, [])
        if event.node not in waiting:
            return event
        waiting.remove(event.node)
        if event.state != "ok":
            return event
        self._done.setdefault(key, []).append(event)
        return self._merge_events(key) if not waiting else None

    def flush(self) -> list[Event]:
        """Return the delayed events, at the end."""
        return [event for key in list(self._done) if (event := self._merge_events(key))]

    def _merge_events(self, key: tuple[str, str]) -> Event | None:
        events = self._done.pop(key, [])
        if not events:
            return None
        nodes = fold(sorted((event.node for event in events), key=natural_key))
        return replace(events[0], node=nodes, seconds=max(event.seconds for event in events))


class JsonLines(SilentPrinter):
    """One JSON object a line on standard output."""

    def show(self, event: Event) -> None:
        """Print the event as JSON."""
        click.echo(dump_json(event.as_json()))


class PlainLines(SilentPrinter):
    """One line per event on standard error, except the starts of steps. A wait is a line when its
    text is new; progress, whose text is always new, every ten seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._fold = _Fold()
        self._clock = clock
        self._wait_text = ""
        self._progress_at: dict[str, float] = {}  # time of the last line, by stage

    def show(self, event: Event) -> None:
        """Print the event, unless it is redundant."""
        event = strip_codes(event)
        folded = self._fold.add(event)
        if folded is not None and (event.kind != "wait" or self._is_due(event)):
            self._print(folded)

    def _is_due(self, wait: Event) -> bool:
        if not wait.data:
            before, self._wait_text = self._wait_text, wait.text
            return wait.text != before
        now = self._clock()
        due = now - self._progress_at.setdefault(wait.stage, now) >= _LINE_INTERVAL
        if due:
            self._progress_at[wait.stage] = now
        return due

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for event in self._fold.flush():
            self._print(event)

    def _print(self, event: Event) -> None:
        line = format_plain(event)
        if line:
            click.echo(line, err=True)


class QuietLines(PlainLines):
    """Lines of warnings and failures only."""

    def show(self, event: Event) -> None:
        """Print the event if it is one."""
        if event.state in ("warn", "failed"):
            super().show(event)


def strip_codes(event: Event) -> Event:
    """Return the event without terminal codes: parts of it come from nodes."""
    return replace(
        event, text=untrusted.single_line(event.text), node=untrusted.single_line(event.node)
    )


def format_plain(event: Event) -> str:
    """Return an event as one line of text without colour; empty if it is not worth a line."""
    prefix = f"{event.node}: " if event.node else ""
    duration = f" ({event.seconds:.1f}s)" if event.seconds >= 0.05 else ""
    text = event.text
    if event.kind == "stage":
        return f"== {text}" if event.state == "running" else ""
    if event.kind == "wait":
        return f"  {text}" if event.data else f"  waiting: {text}"
    if event.kind == "step" and event.state == "running":
        return f"  {prefix}{text} …" if event.data.get("slow") else ""
    label = _SIGNS[event.state][1]
    return f"  {label + ' ' if label else ''}{prefix}{text}{duration}"


class LiveLines(SilentPrinter):
    """Finished lines scroll by; running steps are redrawn below them, with their time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        self._clock = clock
        self._wait_at = 0.0
        self._drawn = -1.0
        self._console = Console(stderr=True, highlight=False)
        self._fold = _Fold()
        self._running: dict[tuple[str, str], Event] = {}
        self._wait: Event | None = None
        self._live = self._display()

    def __enter__(self) -> Printer:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for event in self._fold.flush():
            self._print(event)
        self._running.clear()
        self._wait = None
        self._live.stop()

    def show(self, event: Event) -> None:
        """Draw the event."""
        event = strip_codes(event)
        if event.kind == "wait":
            self._wait, self._wait_at = event, self._clock()
        elif event.state == "running" and event.kind == "step":
            self._running[event.stage, event.node] = event
        else:
            self._wait = None
            self._running.pop((event.stage, event.node), None)
        folded = self._fold.add(event)
        if (
            folded is not None
            and event.kind != "wait"
            and (event.kind, event.state) != ("step", "running")
        ):
            self._print(folded)
        if (now := self._clock()) - self._drawn >= 1 / _PER_SECOND:
            self._drawn = now
            self._live.refresh()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the display inside the block: its repaints would erase prompt and input."""
        self._live.stop()
        try:
            yield
        finally:
            # A new one: the old one would move up by its rows and erase the prompt.
            self._live = self._display()
            self._live.start()

    def _display(self) -> Live:
        from rich.live import Live

        return Live(
            console=self._console,
            refresh_per_second=_PER_SECOND,
            transient=True,
            get_renderable=self._draw,
        )

    def _print(self, event: Event) -> None:
        line = self._line(event)
        if line is not None:
            terminal.show(line, self._console)

    def _line(self, event: Event) -> Line | None:
        from rich.text import Text

        if event.kind == "stage":
            return Line(Text(event.text, style="bold")) if event.state == "running" else None
        sign, _, colour = _SIGNS[event.state]
        line = Text("  ").append(sign + " ", style=colour)
        if event.node:
            line.append(event.node + " ", style="bold")
        lead = len(line)
        line.append(event.text)
        if event.seconds >= 0.05:
            line.append(f"  {event.seconds:.1f}s", style="dim")
        return Line(line, lead)

    def _draw(self) -> Text:
        from rich.text import Text

        by_text: dict[str, list[str]] = {}
        for event in self._running.values():
            by_text.setdefault(event.text, []).append(event.node)
        lines = [f"  … {fold(nodes)} {text}" for text, nodes in by_text.items()]
        if self._wait is not None:
            limit = f" of {self._wait.deadline:.0f}s" if self._wait.deadline else ""
            # A gate may query for minutes without an event; its time goes on.
            seconds = self._wait.seconds + self._clock() - self._wait_at
            lines.append(f"  … {self._wait.text}  {seconds:.0f}s{limit}")
        # One row each: a display that wraps cannot be redrawn in place.
        rows = [Text(line) for line in lines]
        for row in rows:
            row.truncate(max(20, self._console.width - 1), overflow="ellipsis")
        return Text("\n", style="cyan").join(rows)


def show_all(events: Iterable[Event], printer: Printer) -> None:
    """Show every event of a stream."""
    for event in events:
        printer.show(event)


def show_through(events: Generator[Event, None, T], printer: Printer) -> T:
    """Show every event of a stream, and return its result."""
    while True:
        try:
            printer.show(next(events))
        except StopIteration as stop:
            result: T = stop.value
            return result
