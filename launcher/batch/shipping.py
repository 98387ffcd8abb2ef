"""Pieces of files on their way to a node, which are no line each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from launcher.core.events import Event

_TELL = 10.0  # seconds between two lines where every line stays


def shown(events: Iterable[Event], pieces: int) -> Iterator[Event]:
    """Yield a plan's events, those of its `pieces` of files as one display that goes on."""
    began = told = time.monotonic()
    sent: list[str] = []
    for event in events:
        if event.stage == "ship" and event.kind == "stage" and event.state == "ok":
            text = _sent(len(set(sent)), pieces)
            yield Event(kind="step", stage="ship", text=text, state="ok", seconds=event.seconds)
        if not _is_piece(event):
            yield event
            continue
        now = time.monotonic()
        if event.state == "ok":
            sent.append(event.text)
        tell = now - told >= _TELL
        if tell:
            told = now
        text = f"{event.text}, {len(sent)} of {pieces} pieces sent"
        yield Event(
            kind="wait",
            stage="ship",
            text=text,
            state="running" if tell else "",
            seconds=now - began,
            data={"pieces": len(sent)},
        )


def _is_piece(event: Event) -> bool:
    """True when a piece of a file is on its way, or has arrived."""
    return event.stage == "ship" and event.kind == "step" and event.state in ("running", "ok")


def _sent(files: int, pieces: int) -> str:
    return (
        f"{files} file{'' if files == 1 else 's'} sent in {pieces}"
        f" piece{'' if pieces == 1 else 's'}"
    )
