"""A server that runs already, held against the same one as it is asked for now: it may be supervised in another way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.model import Answer
from launcher.plan.supervised import Policy
from launcher.tools import untrusted


def read(answer: Answer) -> Mapping[str, Any] | None:
    """Read what `rollback.ask` says is wanted on the head: nothing where it is empty; None when nobody could say."""
    if not answer.ok:
        return None
    _, _, rest = answer.out.partition("\x1e")
    text = rest.partition("\x1e")[0]
    try:
        said = untrusted.loads(text) if text.strip() else {}
    except ValueError:
        return None
    return said if isinstance(said, Mapping) else None


def otherwise(wanted: Mapping[str, Any] | None, id: str, policy: Policy | None) -> str:
    """Say how the server `id`, which runs, is supervised otherwise than by `policy`; empty where it is not, or nobody knows."""
    if wanted is None:
        return ""
    runs = wanted.get("id") == id
    if not runs:
        return "" if policy is None else "nobody supervises it: it stays dead when a rank, a node or the engine dies"
    if policy is None:
        return "it is supervised"
    said = wanted.get("policy")
    kept = said if isinstance(said, Mapping) else {}
    # How long a start may take is no reason to start anew what runs.
    differ = [
        f"{name} {there:g} and not {now:g}"
        for name, now in (("restarts", policy.restarts), ("canary", policy.canary))
        if isinstance(there := kept.get(name), (int, float)) and not isinstance(there, bool) and there != now
    ]
    return f"it was started with {', '.join(differ)}" if differ else ""


def notes(other: str) -> tuple[str, ...]:
    """Say what differs, and what makes it as asked."""
    return (f"{other}; `--replace` starts it anew as asked",) if other else ()
