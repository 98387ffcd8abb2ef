"""What the keeper orders of each node of a server. Pure; standard library only."""

from __future__ import annotations

from dataclasses import replace

from .desired import Desired, Process
from .monitor import Monitor
from .node import KEEP, PREPARE, RUN, Order
from .reservation import Reservation


def for_nodes(
    want: Desired,
    phase: str,
    generation: int,
    monitor: Monitor | None,
    reserved: Reservation | None,
) -> dict[str, Order]:
    """Return what each node is to do in a phase: start processes, or only look after ranks."""
    counts = dict.fromkeys(want.reach, 1) if want.backend == "ray" else {}
    counts |= {node: count for node, count in want.places.items() if count}
    found = {
        node: Order(
            generation=generation,
            phase=PREPARE if phase == PREPARE else KEEP,
            pids=_pids(monitor, node),
            share=want.memory_share if node in counts else None,
            count=counts.get(node, 0),
            inspect=monitor is not None and phase != PREPARE and bool(monitor.stall.verdict),
        )
        for node in want.reach
    }
    # A process that has run once is only kept: an agent whose container started anew must not start
    # it alone.
    launched = monitor.launched if monitor is not None and phase == RUN else {}
    for process in want.processes:
        node = process.node
        gpus, behind = _gpus(process, reserved), want.behind(process)
        found[node] = replace(
            found[node],
            phase=KEEP if node in launched else phase,
            argv=process.argv,
            env=_environment(want, process, gpus),
            grace=want.policy.grace,
            api=(want.api_host, want.port) if process in want.apis else None,
            replicas=len(behind) or 1,
            first=behind.start if behind else None,
            canary=want.policy.canary,
            gpus=gpus,
        )
    return found


def _pids(monitor: Monitor | None, node: str) -> tuple[int, ...]:
    """Return the processes of the ranks that Ray runs on a node."""
    ranks = monitor.ranks if monitor is not None else []
    return tuple(each.pid for each in ranks if each.node == node and each.pid)


def _gpus(process: Process, reserved: Reservation | None) -> tuple[int, ...] | None:
    """Return which GPUs a process gets, those that Ray has set aside first; None for all."""
    chosen = reserved.gpus(process.node) if reserved is not None else None
    return chosen or process.gpus


def _environment(want: Desired, process: Process, gpus: tuple[int, ...] | None) -> dict[str, str]:
    """Return what a process is given, with the GPUs that it may see."""
    env = dict(process.env)
    if gpus is not None and want.visible:
        env[want.visible] = ",".join(map(str, gpus))
    return env
