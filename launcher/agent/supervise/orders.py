"""The supervisor's orders for the nodes of a server."""

from __future__ import annotations

from dataclasses import replace

from ..desired import Desired, ProcessSpec
from ..processes.node import KEEP, PREPARE, RUN, Order
from .monitor import Monitor
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
    launched = monitor.launched if monitor is not None and phase == RUN else {}
    orders = {}
    for node in spec.possible_nodes:
        order = Order(
            generation=generation,
            phase=PREPARE if phase == PREPARE else KEEP,
            canary=spec.policy.canary,
            pids=tuple(rank.pid for rank in ranks if rank.node == node and rank.pid),
            share=spec.memory_share if node in counts else None,
            count=counts.get(node, 0),
            inspect=monitor is not None and phase != PREPARE and bool(monitor.stall.verdict),
        )
        if process := processes.get(node):
            order = _with_process(order, spec, process, reserved)
            # A process that has run once is never started again: a restarted container must not
            # start it alone.
            order = order if node in launched else replace(order, phase=phase)
        orders[node] = order
    return orders


def _with_process(
    order: Order, spec: Desired, process: ProcessSpec, reserved: Reservation | None
) -> Order:
    """Return an order for the node of a process, which sees only its GPUs."""
    gpus = (reserved and reserved.gpus(process.node)) or process.gpus
    visible = {} if gpus is None or not spec.visible else {spec.visible: ",".join(map(str, gpus))}
    behind = spec.replicas_behind(process)
    return replace(
        order,
        argv=process.argv,
        env={**process.env, **visible},
        grace=spec.policy.grace,
        api=(spec.api_host(process.node), spec.port) if process in spec.apis else None,
        behind=(behind.start, behind.stop),
        gpus=gpus,
    )
