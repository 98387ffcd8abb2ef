"""The driver's connection to Ray, and Ray Data's settings: quiet, without its own timeout."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from .ray_internals import HEAD_RESOURCES, WORKER_LOGGER

# seconds: replicas of one model on equal nodes load within a minute, or share rows unevenly
PATIENCE = 60.0
# Ray cancels no request to a node that died: without these, a task that was to start there starts
# elsewhere after 420 s, Ray's defaults together (`grpc_client.h`). Ray's servers accept a ping per
# minute (`grpc_server.cc`); a silent node counts as dead after about a minute, too.
KEEPALIVE = {
    "RAY_grpc_client_keepalive_time_ms": "70000",
    "RAY_grpc_client_keepalive_timeout_ms": "60000",
}


def connect(*, logs: bool) -> None:
    """Join the cluster of RAY_ADDRESS; `logs` forwards the replicas' output to this job's log.

    Raises:
        ConnectionError: no cluster runs there. Ray is never started from here.
    """
    os.environ.update(KEEPALIVE)  # Ray reads them when it is imported
    import ray

    if ray.is_initialized():
        return
    os.environ["RAY_SCHEDULER_EVENTS"] = "0"  # `budget` describes shortages
    # Ray warns about the driver's SIGTERM handler
    logging.getLogger(WORKER_LOGGER).setLevel(logging.ERROR)
    ray.init(
        address=os.environ.get("RAY_ADDRESS") or "auto",
        log_to_driver=logs,
        logging_level=logging.WARNING,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
    )


def configure_data() -> Any:
    """Configure Ray Data for a batch job and return its context."""
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.enable_operator_progress_bars = False
    context.print_on_execution_start = False
    # loading a large model takes longer; `budget` watches instead
    context.execution_no_progress_timeout_s = -1
    for name in ("ray.data", "ray.llm"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return context


def node_address() -> str:
    """Return the address of this process's node."""
    import ray

    return str(ray.util.get_node_ip_address())


def label_log(job: str) -> None:
    """Write the batch job's name into this process's log, for `vlaunch logs`."""
    os.write(1, f"vlaunch: an engine of batch job {job}\n".encode())


def create_gate(count: int) -> Any:
    """Return a gate at which `count` replicas wait until all are loaded, or None for one.

    Else the first replica would take every row while the others load. Ray Data's own wait
    (`wait_for_min_actors_s`) also stops reading.
    """
    import ray

    if count < 2:
        return None
    # On the head: a gate on a dying node would take all waiting replicas with it.
    return ray.remote(num_cpus=0, max_concurrency=1000, resources=HEAD_RESOURCES)(StartGate).remote(
        count
    )


class StartGate:
    """Gate that opens after `count` arrivals, or `patience` seconds without one: a node may have
    died.

    It stays open for replicas that restart or arrive late.
    """

    def __init__(self, count: int, patience: float = PATIENCE) -> None:
        import asyncio

        self.remaining, self.patience, self.arrived, self.open = count, patience, 0, asyncio.Event()

    async def arrive(self) -> None:
        import asyncio

        self.remaining -= 1
        self.arrived += 1
        arrival = self.arrived
        if self.remaining <= 0:
            self.open.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.open.wait(), self.patience)
        if arrival == self.arrived:
            self.open.set()
        await self.open.wait()


def wait_at_gate(gate: Any) -> None:
    """Wait at a gate for the other replicas."""
    if gate is not None:
        import ray

        # without a gate rows are only shared less evenly
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(gate.arrive.remote())


def iter_tables(dataset: Any) -> Any:
    """Yield the dataset's blocks as Arrow tables, in order of completion."""
    yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
