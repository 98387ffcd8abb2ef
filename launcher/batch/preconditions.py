"""Preconditions of a job on a cluster, before any query: mounted paths and enough GPUs."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from launcher.batch.checked_job import CheckedJob, JobError
from launcher.batch.job import Predict
from launcher.core.domain import Inventory
from launcher.core.errors import PlacementError


def check_fit(job: CheckedJob, inventory: Inventory) -> None:
    """Raise JobError for paths outside the containers' mounts, PlacementError for replicas that
    never fit.
    """
    unmounted = list(_unmounted_paths(job, inventory))
    if unmounted:
        hint = (
            f"put it under {inventory.head.hf_home}, or add a mount to {inventory.path.name} and"
            " run `vlaunch up` again"
        )
        raise JobError(
            f"`{job.name}` uses paths that are not mounted into the containers",
            unmounted,
            hint=hint,
        )
    misfit = next(_misfits(job, inventory), None)
    if misfit is not None:
        raise PlacementError(
            f"`{job.name}` does not fit `{inventory.cluster}`: {misfit[0]}", hint=misfit[1]
        )


def _unmounted_paths(job: CheckedJob, inventory: Inventory) -> Iterator[str]:
    shared = [
        (inventory.head.hf_home, False),
        *((mount.target, mount.read_only) for mount in inventory.mounts),
    ]
    for source in (*job.sources, job.to):
        if source.where != "nodes":
            continue
        enclosing = [
            (root, only) for root, only in shared if PurePosixPath(source.text).is_relative_to(root)
        ]
        if not enclosing:
            roots = ", ".join(root for root, _ in shared)
            yield f"{source.shown}: is outside every path mounted into the containers: {roots}"
        elif source is job.to and _innermost_is_read_only(enclosing):
            yield f"{source.shown}: is mounted read-only"


def _innermost_is_read_only(mounts: Sequence[tuple[str, bool]]) -> bool:
    """Return True if the innermost of several mounts around a path is read-only."""
    _, read_only = max(mounts, key=lambda mount: len(mount[0]))
    return read_only


def _misfits(job: CheckedJob, inventory: Inventory) -> Iterator[tuple[str, str]]:
    """Yield the reasons against placing the job, with hints."""
    if job.mode == "predict":
        assert job.predict is not None  # noqa: S101 - the mode says so
        yield from _class_misfits(job.predict, inventory)
    else:
        yield from _engine_misfits(job, inventory)
    minimum = job.gpus[0]
    if minimum > inventory.gpus:
        yield (
            f"it needs at least {minimum:g} GPUs, but the nodes have {inventory.gpus}",
            "lower `replicas`, `tp` or `pp`",
        )
    yield from _fragmentation(job, inventory)


def _class_misfits(predict: Predict, inventory: Inventory) -> Iterator[tuple[str, str]]:
    largest = _largest_node(inventory)
    if predict.num_gpus > largest:
        yield (
            f"its class needs {predict.num_gpus:g} GPUs, but no node has more than {largest}",
            "lower `num_gpus`",
        )


def _engine_misfits(job: CheckedJob, inventory: Inventory) -> Iterator[tuple[str, str]]:
    engine, largest = job.engine, _largest_node(inventory)
    gpus, nodes = engine.tp * engine.pp, len(inventory.nodes)
    product = f"tp {engine.tp} x pp {engine.pp}"
    if engine.placement == "strict-pack" and gpus > largest:
        yield (
            f"{product} needs {gpus} GPUs on one node, but no node has more than {largest}",
            "write `placement: pack`",
        )
    if engine.placement == "strict-spread" and gpus > nodes:
        yield (
            f"{product} needs {gpus} nodes with one GPU each, but there are {nodes}",
            "lower `tp`",
        )
    if job.mode == "data-parallel" and gpus > largest:
        hint = "lower `engine.tp`" if engine.pp == 1 else "lower `engine.tp` or `engine.pp`"
        yield f"a rank needs {gpus} GPUs on one node, but no node has more than {largest}", hint


def _largest_node(inventory: Inventory) -> int:
    return max(node.gpus for node in inventory.nodes)


def _fragmentation(job: CheckedJob, inventory: Inventory) -> Iterator[tuple[str, str]]:
    """Yield a reason if the GPUs suffice in total but not per node."""
    unit, gpus, count = "", float(job.engine.tp * job.engine.pp), job.engine.replicas[0]
    if job.predict is not None and job.mode == "predict":
        unit, gpus, count = "replicas of its class", job.predict.num_gpus, job.predict.replicas[0]
    elif job.data_parallel is not None:
        unit, count = "ranks", job.data_parallel.size
    elif job.engine.placement == "strict-pack":
        unit = "replicas"
    room = sum(int(node.gpus // gpus) for node in inventory.nodes) if gpus >= 1 else count
    if unit and room < count:
        text = (
            f"it needs {count} {unit} with {gpus:g} GPUs on one node each, but the nodes"
            f" have room for {room}"
        )
        yield text, f"lower their number to {room}, or the GPUs of each"
