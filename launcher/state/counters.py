"""How much a server has to do: its counters, as whoever looked last saw them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from launcher.payload.agent.observed import Load
from launcher.state.endpoints import Heard
from launcher.state.liveness import STILL
from launcher.state.servers import Server


def load(server: Server, heard: Iterable[Heard]) -> Load | None:
    """Return a server's load as all its APIs have just counted it, else as its keeper saw it last;
    tokens per second are the keeper's where the APIs give none.
    """
    seen = server.observed
    kept = seen.load if seen and server.age < STILL else None
    counts = [_read(api.completion.get("load")) or _read(api.about.get("load")) for api in heard]
    live = [count for count in counts if count is not None]
    if not live or len(live) < len(counts):
        return kept
    rate = sum(count.tokens_per_s for count in live)
    return Load(
        running=sum(count.running for count in live),
        waiting=sum(count.waiting for count in live),
        tokens_per_s=rate or (kept.tokens_per_s if kept else 0.0),
    )


def _read(said: Any) -> Load | None:
    counts = said if isinstance(said, Mapping) else {}
    runs, waiting = number(counts.get("running"), int), number(counts.get("waiting"), int)
    if runs is None or waiting is None:
        return None
    return Load(
        running=runs,
        waiting=waiting,
        tokens_per_s=number(counts.get("tokens_per_s"), float) or 0.0,
    )


def number(text: Any, kind: type[Any]) -> Any:
    """Return a number that an API said; `None` where it is none that can be."""
    try:
        return kind(float(text)) if abs(float(text)) < 1e15 else None
    except (TypeError, ValueError, OverflowError):
        return None
