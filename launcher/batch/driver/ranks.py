"""Mode `data-parallel`: one engine per rank over the nodes, together for a mixture of experts,
apart for a dense model.

Every row is answered exactly once because this process alone deals rows out: it takes each pending
row from the input once, gives it to one rank or to none (error rows), keeps it until that rank has
answered for exactly the rows it was given, and passes it on once, in input order. A rank that fails
ends the run, so no row is given to a second one; the rest stays pending.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from . import cluster, rows
from .job import DataParallel, Failed, Job, Refused
from .manifest import Manifest
from .progress import Tracker
from .prompts import Prompter
from .rank import Answer, Setting
from .rank_pool import RankPool, RankSlot
from .source import count, shown

# rows of one rank's slice, however few they are: they are held here and travel
SLICE_BYTES = 32 * 2**20
IN_HAND = 2  # slices that a rank of a dense model has: the next one is there when it finishes one
# slices per rank between the first unfinished and the last handed out: what waits for its turn is
# held here
AHEAD = 4
# as vLLM looks for them
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")

Row = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Slice:
    """Neighbouring rows of one rank, and what became of those that were not errors before."""

    rows: list[Row]
    answers: dict[int, Answer] = field(default_factory=dict)
    done: bool = False

    @property
    def asked(self) -> list[tuple[int, bytes]]:
        """Numbers and columns of the rows that need an answer."""
        return [(row["_row"], row["_data"]) for row in self.rows if not row["_error"]]


def run(
    job: Job, manifest: Manifest, pending: Mapping[int, list[tuple[int, int]]], progress: Tracker
) -> Iterator[list[Row]]:
    """Yield answered and failed rows, in blocks and in input order, until every pending row came
    by.

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
            hint="run it as a job of its own (`mode: predict`), and read what that one wrote",
        )
    Prompter(job)  # what is wrong with a template is said before any rank starts
    slots = rank_slots(parallel, job.engine.tp * job.engine.pp)
    moe = experts(configuration(job)) > 0
    if parallel.expert_parallel and not moe:
        progress.warn(
            "expert parallelism was asked for, but the model has no experts: each rank has all"
            " of it"
        )
    together = moe and parallel.size > 1
    size = share(count(pending), parallel)
    cluster.connect(logs=False)
    with RankPool(job, slots, progress, together=together) as pool:
        meet = (slots[0].ip, pool.port(parallel.port)) if together else ("", 0)
        pool.start([setting(job, slot, meet, moe=moe) for slot in slots], told(job, meet, moe=moe))
        rows = read(job, manifest, pending)
        yield from (
            in_step(rows, pool, len(slots), size)
            if together
            else apart(rows, pool, len(slots), size)
        )


def rank_slots(parallel: DataParallel, each: int) -> list[RankSlot]:
    """Hand ranks to nodes in their order, as many to each as have `each` accelerators there.

    Raises:
        Refused: they do not fit.
    """
    places = [node.ip for node in parallel.nodes for _ in range(node.gpus // each)]
    if len(places) < parallel.size:
        room = ", ".join(
            f"{node.ip}: {node.gpus // each} of {node.gpus} accelerators" for node in parallel.nodes
        )
        raise Refused(
            f"{parallel.size} ranks of {each} accelerator{'s' * (each > 1)} do not fit: the nodes"
            f" have room for {len(places)}",
            f"ranks that fit: {room}",
            "lower `data_parallel.size`, or `engine.tp` and `engine.pp`: a rank stays on one node",
        )
    return [RankSlot(rank=rank, ip=ip) for rank, ip in enumerate(places[: parallel.size])]


def configuration(job: Job) -> Mapping[str, Any]:
    """Read the model's configuration, of a folder or of what the hub's cache has.

    Raises:
        Refused: it cannot be read.
    """
    args = job.engine.args
    name = str(args.get("hf_config_path") or job.model)
    try:
        path = os.path.join(name, "config.json")
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                found = dict(json.load(file))
        else:
            from transformers import PretrainedConfig

            found, _ = PretrainedConfig.get_config_dict(name, revision=args.get("revision"))
    except Exception as problem:
        raise Refused(
            f"the configuration of {name} cannot be read: it says whether the ranks must run"
            " together",
            f"{type(problem).__name__}: {problem}",
            "`vlaunch check` tells which nodes have the model",
        ) from problem
    overrides = args.get("hf_overrides")
    return {**found, **overrides} if isinstance(overrides, Mapping) else found


def experts(config: Mapping[str, Any]) -> int:
    """Return how many experts a model's configuration, or that of the language model in it, speaks
    of; 0 for a dense model.
    """
    counts = [config.get(name) for name in EXPERTS] + block_experts(config.get("block_configs"))
    inner = [
        value
        for name, value in config.items()
        if isinstance(value, Mapping) and not name.startswith(("vision", "audio"))
    ]
    return max([0, *map(most, counts), *map(experts, inner)])


def block_experts(blocks: Any) -> list[Any]:
    """Return what the configurations of a model's blocks give as numbers of experts."""
    if not isinstance(blocks, list):
        return []
    return [
        block.get("n_routed_experts")
        for block in blocks
        if isinstance(block, Mapping) and block.get("block_type") == "moe"
    ]


def most(count: Any) -> int:
    """Return a number of experts, or the largest where there is one for each layer; 0 for anything
    else.
    """
    if isinstance(count, list) and count:
        count = max(count)
    return count if isinstance(count, int) else 0


def setting(job: Job, slot: RankSlot, meet: tuple[str, int], *, moe: bool) -> Setting:
    """Return how a rank loads; `meet` is the first one's address and port.

    vLLM refuses its data-parallel variables for dense models, so those are engines of their own.
    The local rank is always 0: Ray shows each rank only the devices that are its own.
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
        return Setting(arguments=arguments)
    environment = {
        "VLLM_DP_RANK": str(slot.rank),
        "VLLM_DP_RANK_LOCAL": "0",
        "VLLM_DP_SIZE": str(parallel.size),
        "VLLM_DP_MASTER_IP": meet[0],
        "VLLM_DP_MASTER_PORT": str(meet[1]),
    }
    return Setting(environment=environment, arguments=arguments)


def told(job: Job, meet: tuple[str, int], *, moe: bool) -> str:
    """Say what the model made of the ranks."""
    parallel = job.data_parallel
    assert parallel is not None  # noqa: S101 - the mode says so
    many = parallel.size
    if not moe or many == 1:
        return (
            f"{'mixture of experts' if moe else 'dense model'}: {many} independent"
            f" engine{'s' * (many > 1)}"
        )
    how = (
        "the experts in each of them" if parallel.expert_parallel is False else "expert parallelism"
    )
    return f"mixture of experts: {many} ranks with {how} over {meet[0]}:{meet[1]}"


def share(rows: int, parallel: DataParallel) -> int:
    """Return the rows of one rank's slice: few rows are spread over all ranks."""
    return max(1, min(parallel.round_rows, -(-rows // parallel.size)))


def read(
    job: Job, manifest: Manifest, pending: Mapping[int, list[tuple[int, int]]]
) -> Iterator[Row]:
    """Yield the pending rows in the order of the input."""
    for split in manifest.splits:
        if pending.get(split.index):
            yield from rows.read_split(job, manifest, split, list(pending[split.index]))


def slices(rows: Iterable[Row], size: int) -> Iterator[Slice]:
    """Cut rows into slices of `size`, shorter ones where rows are large."""
    part: list[Row] = []
    held = 0
    for row in rows:
        part.append(row)
        held += len(row["_data"]) + len(row["_raw"]) + len(row["_keep"])
        if len(part) >= size or held >= SLICE_BYTES:
            yield Slice(rows=part)
            part, held = [], 0
    if part:
        yield Slice(rows=part)


def in_step(rows: Iterable[Row], pool: RankPool, ranks: int, size: int) -> Iterator[list[Row]]:
    """Run rounds: a slice for each rank, and one call of every rank's engine in every round, if
    only with a placeholder.

    The ranks of a mixture of experts exchange tokens in every step of their models. One that sat a
    round out, or did one more, would leave the others waiting: all of them are called in the same
    rounds, in the same order, and no call is repeated.
    """
    cut = slices(rows, size)
    parts = rounds(cut, ranks)
    call(parts, pool, ranks)
    while parts:
        following = rounds(cut, ranks)  # read while the ranks are at work
        while pool.busy:
            settle_finished(pool)
        call(following, pool, ranks)
        for part in parts:
            yield merged(part)
        parts = following


def call(parts: list[Slice], pool: RankPool, ranks: int) -> None:
    """Give every rank its part of a round, an empty one where there is none; no rank at all when no
    row needs an answer.
    """
    if any(part.asked for part in parts):
        for rank in range(ranks):
            part = parts[rank] if rank < len(parts) else Slice(rows=[])
            pool.give(rank, part, part.asked)


def rounds(cut: Iterator[Slice], ranks: int) -> list[Slice]:
    """Take the slices of one round; fewer at the end of the input."""
    return list(islice(cut, ranks))


def apart(rows: Iterable[Row], pool: RankPool, ranks: int, size: int) -> Iterator[list[Row]]:
    """Hand the next slice to whichever rank has least in hand; yield slices in their order.

    A slow rank holds back what others finished after its slice, at most `AHEAD` slices of each, and
    takes fewer of the next.
    """
    cut = slices(rows, size)
    window: deque[Slice] = deque()
    more = True
    while more or window:
        rank = min(range(ranks), key=pool.load)
        if more and pool.load(rank) < IN_HAND and len(window) < AHEAD * ranks:
            part = next(cut, None)
            more = part is not None
            if part is not None:
                window.append(part)
                hand_out(part, pool, rank)
        elif not window[0].done:
            settle_finished(pool)
        while window and window[0].done:
            yield merged(window.popleft())


def hand_out(part: Slice, pool: RankPool, rank: int) -> None:
    """Give a slice to a rank; one without rows that need an answer is done."""
    part.done = not part.asked
    if not part.done:
        pool.give(rank, part, part.asked)


def settle_finished(pool: RankPool) -> None:
    """Wait until a rank has finished a slice, and take the answers of each that has."""
    for rank, part, answers in pool.finished():
        settle(part, answers, rank)


def settle(part: Slice, answers: Sequence[Answer], rank: int) -> None:
    """Take a rank's answers to a slice.

    Raises:
        Failed: they are not for the rows that it was asked for, each once and in order.
    """
    asked = [row for row, _ in part.asked]
    if [answer.row for answer in answers] != asked:
        raise Failed(
            f"rank {rank} was asked for {len(asked)} rows and answered others",
            f"asked: {asked[:5]}…",
        )
    part.answers = {answer.row: answer for answer in answers}
    part.done = True


def merged(part: Slice) -> list[Row]:
    """Return a slice's rows as the sink takes them."""
    return [result(row, part.answers.get(row["_row"])) for row in part.rows]


def result(row: Row, answer: Answer | None) -> Row:
    """Return one row: answered, failed in its rank, or bad from the beginning (no rank was
    asked).
    """
    kept = {"_row": row["_row"], "_keep": row["_keep"]}
    if answer is None:
        return {**kept, "_error": row["_error"], "_stage": row["_stage"], "_raw": row["_raw"]}
    if answer.error:
        return {
            **kept,
            "_error": answer.error,
            "_stage": answer.stage,
            "_raw": row["_raw"] or shown(row["_data"]),
        }
    return {**kept, "_error": "", "_stage": "", "_raw": "", **answer.columns}
