"""The supervisor's orders for the nodes of a server."""

from __future__ import annotations

from .desired import Desired
from .monitor import Monitor
from .node import KEEP, PREPARE, RUN, Order
from .reservation import Reservation


def build_orders(
    spec: Desired,
    phase: str,
    generation: int,
    monitor: Monitor | None,
    reserved: Reservation | None,
) -> dict[str, Order]:
    """Return the order of each node in a phase: start a process, or only watch ranks."""
    counts = dict.fromkeys(spec.possible_nodes, 1) if spec.backend == "ray" else {}
    counts |= {node: count for node, count in spec.places.items() if count}
    processes = {process.node: process for process in spec.processes}
    ranks = monitor.ranks if monitor is not None else []
    orders = {}
    for node in spec.possible_nodes:
        process = processes.get(node)
        # A process that has run once is never started again: a restarted container must not
        # start it alone.
        launched = phase == RUN and monitor is not None and node in monitor.launched
        is_first_run = process is not None and not launched
        behind = spec.replicas_behind(process) if process else range(0)
        gpus = (reserved and reserved.gpus(node)) or process.gpus if process else None
        has_gpu_list = gpus is not None and bool(spec.visible)
        visible = {spec.visible: ",".join(map(str, gpus or ()))} if has_gpu_list else {}
        orders[node] = Order(
            generation=generation,
            phase=phase if is_first_run or phase == PREPARE else KEEP,
            argv=process.argv if process else (),
            env={**process.env, **visible} if process else {},
            grace=spec.policy.grace if process else Order.grace,
            api=(spec.api_host(node), spec.port) if process in spec.apis else None,
            behind=(behind.start, behind.stop),
            canary=spec.policy.canary,
            pids=tuple(rank.pid for rank in ranks if rank.node == node and rank.pid),
            share=spec.memory_share if node in counts else None,
            count=counts.get(node, 0),
            gpus=gpus,
            inspect=monitor is not None and phase != PREPARE and bool(monitor.stall.verdict),
        )
    return orders
