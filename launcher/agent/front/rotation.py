"""Decisions of the head's agent about the fronts: which servers get requests, and when a server
that is to stop has none left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .. import state
from ..link.leader import Leader
from ..observed import Drain, Observed
from .haproxy import DRAIN, MAINT, READY


def front_states(servers: Mapping[str, Observed]) -> dict[str, str]:
    """Return the states of servers in the fronts. One without an entry stays as it is: it may have
    outlived the head's agent.

    A server that hangs, or has a stopped rank, drains while another replica is ready; an overloaded
    one stays ready.
    """
    states = {
        name: DRAIN if status.draining else READY if status.state == "ready" else MAINT
        for name, status in servers.items()
        if status.draining or not status.resumes
    }
    hanging = {name for name, target in states.items() if target == READY and servers[name].hangs}
    ready = {
        state.group_of(name)
        for name, target in states.items()
        if target == READY and name not in hanging
    }
    drained = {name for name in hanging if state.group_of(name) in ready}
    return states | dict.fromkeys(drained, DRAIN)


def lasting_pauses(
    pauses: Mapping[str, float], states: Mapping[str, str], now: float
) -> dict[str, float]:
    """Return the servers that stay without requests because their containers will be replaced, and
    until when: one that has stopped since gets requests as soon as it is ready.
    """
    return {
        name: until for name, until in pauses.items() if now < until and states.get(name) == READY
    }


def begin_drain(name: str, lead: Leader, limit: float, now: float) -> Drain | None:
    """Return a new drain of a server; None if no connected front has it."""
    fronts = sorted(node for node, servers in lead.fronts().items() if name in servers)
    return Drain(since=now, limit=limit, fronts=fronts) if fronts and limit > 0 else None


def update_drain(drain: Drain, name: str, lead: Leader, now: float) -> Drain | None:
    """Return a drain with its requests now; None once no front has one, or it took too long.

    `now` is the time since the host's boot, which no clock changes; a drain may be from before it.
    """
    drain = replace(drain, since=min(drain.since, now))
    if now - drain.since >= drain.limit:
        return None
    fronts = lead.fronts()
    servers = [servers[name] for servers in fronts.values() if name in servers]
    requests = sum(server.requests for server in servers)
    # a front that has just lost its connection, or not yet connected to this agent
    away = [node for node in drain.fronts if node not in fronts and not lead.gone_reason(node)]
    if not away and not requests and all(server.state != READY for server in servers):
        return None
    return replace(drain, requests=requests)
