"""What probes of other programs ask about a server on this node: has it answered, does it live.

The same rules as the keeper's, in one look: an answer is the only proof of a start, and only a
server that neither answers nor moves is dead. Standard library only.
"""

from __future__ import annotations

from typing import Any

from . import answer, api
from .api import Where
from .probe import resting


def answered(where: Where) -> dict[str, Any]:
    """Ask for an answer, of each replica; without one there is an `error`."""
    said = answer.complete(where)
    if said.get("error") or said.get("status") != 200:
        return {**said, "error": said.get("error") or "no answer"}
    silent = [str(i) for i, each in enumerate(said.get("replicas", ())) if not each["answered"]]
    if silent:
        return {**said, "error": f"no answer of replica {', '.join(silent)}"}
    return said


def alive(where: Where) -> dict[str, Any]:
    """Ask for a sign of life: an answer, also a refusal, counters that move, or that it rests on
    purpose; without one there is an `error`.

    Where nothing is counted, `/health` has to do: what cannot be known is no death.
    """
    said = answer.complete(where)
    status, why = int(said.get("status") or 0), said.pop("error", "") or "no answer"
    if 0 < status < 500 or status == 501 or said.get("moved"):
        return said
    health, text = api.api(where, "/health", timeout=5)
    if rests := resting(where, health, text):
        return {**said, "rests": rests}
    if said.get("moved", False) is None and health == 200:
        return {**said, "health": 200}
    return {**said, "error": f"it neither answers nor moves: {why}"}
