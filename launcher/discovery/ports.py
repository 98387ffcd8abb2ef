"""Ports for a cluster on hosts that other clusters use too."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import asdict, replace

from launcher.errors import RequestError
from launcher.model import Ports

# For each cluster beside the first: the ports of Ray's workers. Each range keeps clear of the
# rendezvous ports of all of them, above 29,500, and of Linux's ephemeral ports, above 32,768.
_WORKERS = ((20002, 29399), (30002, 32767))
_STEP = 100  # from a port to that of the next cluster


def beside(others: Sequence[Ports]) -> Ports:
    """Return ports that no other cluster has; Ray's own where there is no other.

    Raises RequestError when there are more clusters than there is room for.
    """
    usual = Ports()
    if not others:
        return usual
    taken = set[int]().union(*map(_all, others))
    for number, (low, high) in enumerate(_WORKERS, start=1):
        moved = {
            name: port + number * _STEP for name, port in asdict(usual).items() if name not in _OWN
        }
        found = replace(usual, **moved, worker_min=low, worker_max=high, client=low - 1)
        if not _all(found) & taken:
            return found
    raise RequestError(
        f"no ports are left beside {len(others)} other clusters",
        hint="write `ports:` by hand, each free on all hosts (inventory/example.yaml lists them)",
    )


_OWN = ("worker_min", "worker_max", "client")


def _all(ports: Ports) -> Set[int]:
    singles = {port for name, port in asdict(ports).items() if not name.startswith("worker_")}
    return singles | set(range(ports.worker_min, ports.worker_max + 1))
