"""Which hosts of a log of NCCL belong to one job."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

# (rank, rank, channel), whether the host received, the host
End = tuple[tuple[int, int, str], bool, str]


def groups(
    ends: Iterable[End], communicators: Mapping[str, Collection[str]]
) -> tuple[tuple[str, ...], ...]:
    """Sort hosts with links into jobs: those that share a communicator, directly or through others,
    belong together.

    Rank numbers alone say nothing, since every communicator counts from 0. Only where exactly one
    host sent and one received on a channel between two ranks, a link joins its ends. Hosts of which
    no communicator is known are no job of their own; when no host's is known, all are taken for one
    job.
    """
    ends = [end for end in ends if end[2]]
    linked = {host for _, _, host in ends}
    known = set[str]().union(*communicators.values())
    if not known:
        return (tuple(sorted(linked)),) if linked else ()
    top = _joined((*communicators.values(), *_pairs(ends)))
    found: dict[str, list[str]] = {}
    for host in linked:
        found.setdefault(_top(top, host), []).append(host)
    return tuple(
        sorted(tuple(sorted(hosts)) for hosts in found.values() if not known.isdisjoint(hosts))
    )


def _joined(jobs: Iterable[Collection[str]]) -> dict[str, str]:
    """Join the hosts of each job: those that have the same `_top` belong together."""
    top: dict[str, str] = {}
    for first, *others in jobs:
        for host in others:
            top[_top(top, host)] = _top(top, first)
    return top


def _pairs(ends: Iterable[End]) -> set[tuple[str, ...]]:
    """Return the two hosts of each link of which it is clear which ones they are."""
    sides: dict[tuple[int, int, str], tuple[set[str], set[str]]] = {}
    for key, received, host in ends:
        sides.setdefault(key, (set(), set()))[received].add(host)
    return {
        (*sent, *received) for sent, received in sides.values() if len(sent) == len(received) == 1
    }


def near(ends: Iterable[tuple[tuple[int, int, str], str, str]]) -> frozenset[tuple[int, int, str]]:
    """Return the (rank, rank, channel) of which one and the same host wrote the `send` and the
    `receive`, and nobody else any.

    Hosts without a name, or with one that somebody put in place of theirs (`<node>`), could be any.
    """
    sides: dict[tuple[int, int, str], dict[str, set[str]]] = {}
    for key, direction, host in ends:
        sides.setdefault(key, {}).setdefault(direction, set()).add(host)
    found = set()
    for key, hosts in sides.items():
        sent, received = hosts.get("send", set()), hosts.get("receive", set())
        if (
            len(sent) == 1
            and sent == received
            and len(hosts) == 2
            and not any(not h or h.startswith("<") for h in sent)
        ):
            found.add(key)
    return frozenset(found)


def _top(top: dict[str, str], host: str) -> str:
    while (up := top.setdefault(host, host)) != host:
        top[host] = top[up]
        host = up
    return host
