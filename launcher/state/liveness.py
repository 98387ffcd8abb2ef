"""How a server is, judged by what just came back from it, and else by what its keeper says; and why
nobody can tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from launcher.payload.agent.observed import Observed
from launcher.payload.agent.task import COMPLETION, named
from launcher.site import Site
from launcher.state import servers
from launcher.state.servers import Server

ServerState = Literal[
    "answering",
    "busy",
    "silent",
    "starting",
    "waiting",
    "stopping",
    "recovering",
    "failed",
    "gave-up",
    "unknown",
]
BAD = ("silent", "recovering", "failed", "gave-up", "unknown")
STILL = 10.0  # seconds without any movement after which a server is silent
_OVER: Mapping[str, ServerState] = {"failed": "failed", "gave-up": "gave-up"}
_NOT_READY: Mapping[str, ServerState] = {"starting": "starting", "stopping": "stopping"}


def judge(
    server: Server, seen: Observed | None, agent: float, completion: Mapping[str, Any]
) -> tuple[ServerState, str]:
    """Return how a server is, and why.

    Args:
        server: the server.
        seen: what its keeper saw, with nodes' names in the place of addresses.
        agent: seconds since the head's agent, of which the keeper is a part, was heard.
        completion: what came back from its API; empty where nobody asked.
    """
    if server.state in _OVER:
        return _OVER[server.state], seen.doing if seen else ""
    mute = _mute(completion)
    if completion.get("status") == 200 and not completion.get("error") and not mute:
        return "answering", ""
    if completion.get("moved") is True:
        return "busy", ""
    if agent > servers.SILENT:
        return "unknown", unheard(agent)
    return _by_keeper(server, seen, completion, mute)


def _by_keeper(
    server: Server, seen: Observed | None, completion: Mapping[str, Any], mute: list[str]
) -> tuple[ServerState, str]:
    if server.desired is None:
        return "stopping", seen.doing if seen else ""
    if seen is None:
        return "waiting", "its keeper has not begun with it"
    if server.state != "ready":
        before = _NOT_READY.get(server.state, "waiting")
        return "recovering" if seen.fault_count else before, seen.doing
    if not completion:
        return "unknown", "the node that has its API was not asked"
    if server.age < STILL and _moves(seen):
        return "busy", "; ".join(mute)
    return "silent", _silence(seen, completion, mute)


def _moves(seen: Observed) -> bool:
    """True while its own canary is on its way too, or refused while other requests are answered;
    CPU and GPU time count as movement.
    """
    return seen.still < STILL and (seen.asking > 0 or bool(seen.warning))


def _silence(seen: Observed, completion: Mapping[str, Any], mute: list[str]) -> str:
    why = "; ".join(mute)
    if not why:
        word = (named(completion.get("task", "")) or named(seen.task) or COMPLETION).word
        why = f"no {word}: {str(completion.get('error') or 'no reason given')[:200]}"
    if seen.still >= STILL:
        why += f"; nothing has moved for {seen.still:.0f} s"
    return f"{why}; its keeper: {seen.doing}" if seen.doing else why


def unheard(agent: float) -> str:
    """Say for how long the head's agent has not been heard."""
    return (
        f"the head's agent has said nothing for {agent:.0f} s"
        if math.isfinite(agent)
        else "the head's agent says nothing"
    )


def _mute(completion: Mapping[str, Any]) -> list[str]:
    """Say which replicas of a data-parallel server gave no answer, where each was asked: half of
    the requests hang then.
    """
    asked = completion.get("replicas") or ()
    return [
        f"replica {number} of {len(asked)} gave no"
        f" completion{': ' + str(each['error'])[:200] if each.get('error') else ''}"
        for number, each in enumerate(asked)
        if not each.get("answered")
    ]


def unknown(site: Site, said: Mapping[str, Any]) -> str:
    """Return why nobody knows which servers there are; empty when somebody does, or when there can
    be none.
    """
    if site.facts_of(site.head) is None:
        return "the head cannot be reached"
    there = site.container(site.head)
    if there is None:
        return ""
    if not there.running:
        return f"the head's container is {there.status}: `vlaunch up` starts it"
    if "servers" in said:
        return ""
    return str(said.get("error") or "the head does not tell of servers")[:200]
