"""How much a server has to do: its counters, as whoever looked last saw them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.payload.agent.observed import Load
from launcher.state.liveness import STILL
from launcher.state.servers import Server


def load(server: Server, about: Mapping[str, Any], completion: Mapping[str, Any]) -> Load | None:
    """Return a server's load: as it was while the completion was on its way, else as its keeper
    saw it, else as its API said before.
    """
    seen = server.observed
    counted = seen.load if seen and server.age < STILL else None
    return _read(completion.get("load")) or counted or _read(about.get("load"))


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
