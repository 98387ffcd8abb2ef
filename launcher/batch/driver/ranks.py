"""Mode `data-parallel`: one engine per rank; in step for a mixture of experts, independent for a
dense model.

Every row is answered exactly once because only this process assigns rows: it takes a pending row
once, gives it to one rank or none (error rows), holds it until that rank has answered exactly its
rows, and yields it once, in input order. A failed rank ends the run, so no row goes to a second
rank; the rest stays pending.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from typing import Any

from ..job import DataParallel, PlacedJob
from . import cluster, rows
from .budget import CurrentMonitor
from .job_file import Failed, Refused
from .manifest import Manifest
from .progress import Tracker
from .prompts import Prompter
from .rank import RankSettings
from .rank_pool import RankPool, RankSlot
from .results import Converter, Part, Row
from .source import count_rows

# byte limit of a rank's slice, which this process holds and sends
SLICE_BYTES = 32 * 2**20
QUEUED_SLICES = 2  # slices queued on a rank of a dense model, so that it never waits
# slices per rank between the first unfinished and the last submitted, held here
MAX_AHEAD = 4
# the keys that vLLM checks
EXPERT_KEYS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


@dataclass(slots=True, kw_only=True)
class Slice:
    """Consecutive rows for one rank, and their answers."""

    rows: list[Row]
    answers: list[Part] = field(default_factory=list)
    done: bool = False

    @property
    def pending(self) -> list[Row]:
        """Rows without an error."""
        return [row for row in self.rows if not row["_error"]]


def run(
    job: PlacedJob,
    manifest: Manifest,
    pending: Mapping[int, bytes],
    progress: Tracker,
    _: CurrentMonitor,  # ranks are not restarted
) -> Iterator[list[Part]]:
    """Yield answered and failed rows, in blocks and in input order.

    Raises:
        Refused: the ranks do not fit on the nodes, a template is wrong, the model's configuration
            cannot be read, or rows are to be preprocessed.
        Failed: a rank failed or was too slow; all ranks have been ended.
    """
    parallel = job.data_parallel
    assert parallel is not None  # noqa: S101 - the mode says so
    if job.preprocess is not None:
        raise Refused(
            "mode `data-parallel` has no `preprocess` stage",
            hint="run it as a separate job (`mode: predict`), and read its output",
        )
    Prompter(job)  # reject an invalid template before any rank starts
    slots = rank_slots(job, parallel.size)
    moe = count_experts(read_configuration(job)) > 0
    if parallel.expert_parallel and not moe:
        progress.warn(
            "expert parallelism was requested, but the model has no experts: each rank has"
            " the full model"
        )
    together = moe and parallel.size > 1
    size = slice_rows(count_rows(pending), parallel)
    cluster.connect(logs=False)
    converter = Converter(job, manifest.types)
    with RankPool(converter, slots, progress, together=together) as pool:
        master = (slots[0].ip, pool.port(job.rank_port)) if together else ("", 0)
        pool.start(
            [rank_settings(job, slot, master, moe=moe) for slot in slots],
            describe_ranks(job, master, moe=moe),
        )
        rows = read_pending(job, manifest, pending)
        run_slices = run_in_step if together else run_apart
        for part in run_slices(rows, pool, len(slots), size):
            yield merge_answers(converter, part)


def rank_slots(job: PlacedJob, count: int) -> list[RankSlot]:
    """Assign `count` ranks to nodes in order, as many as fit with their GPUs.

    Raises:
        Refused: they do not fit.
    """
    gpus, hosts = job.engine.tp * job.engine.pp, job.rank_hosts
    addresses = [node.ip for node in hosts for _ in range(node.gpus // gpus)]
    if len(addresses) < count:
        room = ", ".join(
            f"{node.ip}: {node.gpus // gpus} of {node.gpus} accelerators" for node in hosts
        )
        raise Refused(
            f"{count} ranks of {gpus} accelerator{'s' * (gpus > 1)} do not fit: the nodes"
            f" have room for {len(addresses)}",
            f"ranks that fit: {room}",
            "lower `data_parallel.size`, or `engine.tp` and `engine.pp`: a rank stays on one node",
        )
    return [RankSlot(rank=rank, ip=ip) for rank, ip in enumerate(addresses[:count])]


def read_configuration(job: PlacedJob) -> Mapping[str, Any]:
    """Read the model's configuration, from a folder or the hub's cache.

    Raises:
        Refused: it cannot be read.
    """
    args = job.engine.args
    name = str(args.get("hf_config_path") or job.model)
    try:
        path = os.path.join(name, "config.json")
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                config = dict(json.load(file))
        else:
            from transformers import PretrainedConfig

            config, _ = PretrainedConfig.get_config_dict(name, revision=args.get("revision"))
    except Exception as problem:
        raise Refused(
            f"cannot read the configuration of {name}, which determines whether ranks"
            " must run together",
            f"{type(problem).__name__}: {problem}",
            "`vlaunch check` shows which nodes have the model",
        ) from problem
    overrides = args.get("hf_overrides")
    return {**config, **overrides} if isinstance(overrides, Mapping) else config


def count_experts(config: Mapping[str, Any]) -> int:
    """Return the experts in a model's configuration, nested ones included; 0 for a dense model."""
    counts = [config.get(name) for name in EXPERT_KEYS] + block_experts(config.get("block_configs"))
    inner = [
        value
        for name, value in config.items()
        if isinstance(value, Mapping) and not name.startswith(("vision", "audio"))
    ]
    return max([0, *map(largest_count, counts), *map(count_experts, inner)])


def block_experts(blocks: Any) -> list[Any]:
    """Return the expert counts in the configurations of a model's blocks."""
    if not isinstance(blocks, list):
        return []
    return [
        block.get("n_routed_experts")
        for block in blocks
        if isinstance(block, Mapping) and block.get("block_type") == "moe"
    ]


def largest_count(count: Any) -> int:
    """Return a count, or the largest of a list per layer; 0 for anything else."""
    if isinstance(count, list) and count:
        count = max(count)
    return count if isinstance(count, int) else 0


def rank_settings(
    job: PlacedJob, slot: RankSlot, master: tuple[str, int], *, moe: bool
) -> RankSettings:
    """Return a rank's settings; `master` is the address and port of the first rank.

    vLLM rejects its data-parallel variables for dense models, so those are independent engines. The
    local rank is always 0: Ray shows each rank only its own devices.
    """
    parallel, tp, pp = job.data_parallel, job.engine.tp, job.engine.pp
    assert parallel is not None  # noqa: S101 - the mode says so
    together = moe and parallel.size > 1
    arguments = {
        **job.engine.args,
        "model": job.model,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "distributed_executor_backend": "mp" if together or tp * pp > 1 else "uni",
    }
    if moe:
        arguments["enable_expert_parallel"] = parallel.expert_parallel is not False
    if not together:
        return RankSettings(arguments=arguments)
    environment = {
        "VLLM_DP_RANK": str(slot.rank),
        "VLLM_DP_RANK_LOCAL": "0",
        "VLLM_DP_SIZE": str(parallel.size),
        "VLLM_DP_MASTER_IP": master[0],
        "VLLM_DP_MASTER_PORT": str(master[1]),
    }
    return RankSettings(environment=environment, arguments=arguments)


def describe_ranks(job: PlacedJob, master: tuple[str, int], *, moe: bool) -> str:
    """Describe the layout of the ranks."""
    parallel = job.data_parallel
    assert parallel is not None  # noqa: S101 - the mode says so
    rank_count = parallel.size
    if not moe or rank_count == 1:
        return (
            f"{'mixture of experts' if moe else 'dense model'}: {rank_count} independent"
            f" engine{'s' * (rank_count > 1)}"
        )
    sharing = (
        "the experts in each of them" if parallel.expert_parallel is False else "expert parallelism"
    )
    return f"mixture of experts: {rank_count} ranks with {sharing} over {master[0]}:{master[1]}"


def slice_rows(rows: int, parallel: DataParallel) -> int:
    """Return the rows per slice: few rows are spread over all ranks."""
    return max(1, min(parallel.round_rows, -(-rows // parallel.size)))


def read_pending(job: PlacedJob, manifest: Manifest, pending: Mapping[int, bytes]) -> Iterator[Row]:
    """Yield the pending rows in the order of the input."""
    for split in manifest.splits:
        if pending.get(split.index):
            yield from rows.read_split(job, manifest, split, pending[split.index])


def cut_slices(rows: Iterable[Row], size: int) -> Iterator[Slice]:
    """Cut rows into slices of `size`, or fewer large rows."""
    part: list[Row] = []
    size_bytes = 0
    for row in rows:
        part.append(row)
        size_bytes += len(row["_data"]) + len(row["_raw"]) + len(row["_keep"])
        if len(part) >= size or size_bytes >= SLICE_BYTES:
            yield Slice(rows=part)
            part, size_bytes = [], 0
    if part:
        yield Slice(rows=part)


def run_in_step(rows: Iterable[Row], pool: RankPool, ranks: int, size: int) -> Iterator[Slice]:
    """Run rounds: one slice per rank, one call of every engine per round, if only with a
    placeholder.

    The ranks of a mixture of experts exchange tokens in every step. One that skipped a round, or
    did one more, would block the others: all are called in the same rounds, in the same order, and
    no call is repeated.
    """
    cut = cut_slices(rows, size)
    parts = take_round(cut, ranks)
    start_round(parts, pool, ranks)
    while parts:
        following = take_round(cut, ranks)  # read while the ranks are at work
        while pool.busy:
            settle_finished(pool)
        start_round(following, pool, ranks)
        yield from parts
        parts = following


def start_round(parts: list[Slice], pool: RankPool, ranks: int) -> None:
    """Submit a round to every rank, empty slices included; to none when no row needs an answer."""
    if any(part.pending for part in parts):
        for rank in range(ranks):
            part = parts[rank] if rank < len(parts) else Slice(rows=[])
            pool.submit(rank, part, part.pending)


def take_round(cut: Iterator[Slice], ranks: int) -> list[Slice]:
    """Return the slices of one round; fewer at the end of the input."""
    return list(islice(cut, ranks))


def run_apart(rows: Iterable[Row], pool: RankPool, ranks: int, size: int) -> Iterator[Slice]:
    """Submit the next slice to the least loaded rank; yield slices in order.

    A slow rank delays the others by at most `MAX_AHEAD` slices each, and takes fewer of the next.
    """
    cut = cut_slices(rows, size)
    window: deque[Slice] = deque()
    has_input = True
    while has_input or window:
        rank = min(range(ranks), key=pool.load)
        if has_input and pool.load(rank) < QUEUED_SLICES and len(window) < MAX_AHEAD * ranks:
            part = next(cut, None)
            has_input = part is not None
            if part is not None:
                window.append(part)
                hand_out(part, pool, rank)
        elif not window[0].done:
            settle_finished(pool)
        while window and window[0].done:
            yield window.popleft()


def hand_out(part: Slice, pool: RankPool, rank: int) -> None:
    """Submit a slice to a rank; a slice of error rows is already done."""
    part.done = not part.pending
    if not part.done:
        pool.submit(rank, part, part.pending)


def settle_finished(pool: RankPool) -> None:
    """Wait until a rank finishes a slice, and store the answers of all finished ones."""
    for rank, part, answers in pool.finished():
        settle(part, answers, rank)


def settle(part: Slice, answers: list[Part], rank: int) -> None:
    """Store a rank's answers to a slice.

    Raises:
        Failed: they are not for its rows, each once and in order.
    """
    numbers = [row["_row"] for row in part.pending]
    if list(merge(*(part.table["row"].to_pylist() for part in answers))) != numbers:
        raise Failed(
            f"rank {rank} was given {len(numbers)} rows and answered others",
            f"expected: {numbers[:5]}…",
        )
    part.answers, part.done = answers, True


def merge_answers(converter: Converter, part: Slice) -> list[Part]:
    """Return a slice's answers, and its rows that were invalid from the start."""
    return [*part.answers, *converter.convert([row for row in part.rows if row["_error"]])]
