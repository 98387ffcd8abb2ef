"""Search for the rank that a stuck engine waits for, from two inspections of its nodes. Pure.

`inspection.py` takes the samples. A rank is the culprit if it is the only one that waits neither
for work nor for other ranks; otherwise the rank is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

APART = 9.5  # seconds between two samples that can show that nothing moves
ENGINE = "the engine"  # the process that schedules; it holds no rank unless it is alone
_SWITCHES = 2.0  # voluntary context switches per second of a thread that stands still
# Bytes per second of an interface that carries no work. Measured: 1 kB/s beside a wedged server,
# 1 MB/s over a link throttled to 8 Mbit/s.
_IDLE = 256_000
_BUSY = 0.1  # part of a core from which on a thread computes or spins
# A GPU computes that uses its memory for 5 % of the time, or draws half of its power limit. Kernels
# that spin, as NCCL's do while a rank is missing, use 0 % and 0.19 on an H100, which says it is at
# 100 %.
_MEMORY, _POWER = 5.0, 0.5
_ALWAYS = 99.0  # percent of the time in which a GPU runs a kernel that does not end
_STOPPED = ("T", "t")
_NAMED = 4  # ranks named in one observation
_SHOWN = 16  # frames of a stack in a record

# The loops that a rank's work runs in: v1/executor/multiproc_executor.py, v1/engine/core.py and
# v1/worker/gpu_worker.py of vLLM 0.32.
_LOOPS = {"worker_busy_loop", "async_output_busy_loop", "run_busy_loop", "run_engine_core"}
_WORKS = {*_LOOPS, "execute_model", "execute_dummy_batch", "sample_tokens"}
_DEVICE = {"synchronize", "wait_event", "wait_stream"}
# Calls into C without a frame of their own, visible only in the current line.
_HANDLE = re.compile(r"\.wait\(")
_EVENT = re.compile(r"\.(?:synchronize|item|tolist|cpu)\(")
_QUEUES = ("device_communicators/shm_broadcast.py",)
_COLLECTIVES = ("torch/distributed/", "vllm/distributed/")
_OPERATORS = re.compile(r"torch/|triton/|<eval_with_key>|<string>|.*torchinductor_")
_FRAME = re.compile(r"(?:.*\.)?([^ .]+) \((.*?)(?::\d+)?\)")

# What a rank does, by its stack, from the least to the most suspicious.
WAITS, WITH_OTHERS, FOR_DEVICE, OPERATOR, OWN = range(5)


@dataclass(frozen=True, kw_only=True)
class RankSample:
    """A process at one moment; `frames` has the innermost first, `why` is the reason if there are
    none.

    `line` is the source line of the innermost frame, empty if unreadable. `ticks` (hundredths of a
    second of CPU), `voluntary` context switches, `state` and `wchan` (the kernel function in which
    it sleeps) belong to the thread of the stack. `helpers` is the CPU of its child processes, such
    as compilers.
    """

    pid: int
    rank: str = ""
    engine: bool = False
    frames: tuple[str, ...] = ()
    line: str = ""
    why: str = ""
    thread: int = 0
    ticks: int = 0
    voluntary: int = 0
    state: str = ""
    wchan: str = ""
    helpers: int = 0
    gpus: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class NodeSample:
    """One inspection of a node; `at` is in seconds of its own clock, `bytes` received and sent by
    interface, `notes` the messages of NCCL and vLLM. `gpus` are all of the node's, if the server
    has them all and their ranks are unknown.
    """

    number: int
    at: float
    bytes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    ranks: tuple[RankSample, ...] = ()
    gpus: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StallFinding:
    """Result of two inspections.

    `progress` is None if unknown. `rank`, `node`, `gpu` and `frame` are empty while the culprit is
    unknown.
    """

    progress: bool | None
    rank: str = ""
    node: str = ""
    gpu: str = ""
    frame: str = ""
    observations: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()


class Inspections:
    """The samples of a server's nodes, in the order of their reports."""

    def __init__(self) -> None:
        self._samples: dict[str, list[NodeSample]] = {}

    def add_sample(self, node: str, sample: NodeSample | None) -> None:
        """Add a node's newest sample; None if it has none."""
        samples = self._samples.setdefault(node, [])
        if sample is None:
            samples.clear()
        elif not samples or samples[-1].number != sample.number:
            if samples and sample.at <= samples[-1].at:
                samples.clear()
            del samples[:-2]
            samples.append(sample)

    def compare_newest(
        self, ranks: Mapping[str, Mapping[int, str]], *, replica: int | None = None
    ) -> StallFinding:
        """Compare the newest samples with earlier ones; see `compare_samples`."""
        after = {node: samples[-1] for node, samples in self._samples.items() if samples}
        before = {
            node: next(
                (sample for sample in reversed(samples) if _far_enough_apart(sample, samples[-1])),
                None,
            )
            for node, samples in self._samples.items()
        }
        return compare_samples(before, after, ranks, replica=replica)


def _far_enough_apart(before: NodeSample, after: NodeSample) -> bool:
    return after.at - before.at >= APART


def is_work_stack(frames: Sequence[str]) -> bool:
    """True for the stack of a thread that does a rank's or an engine's work."""
    return any(function in _WORKS for function, _ in map(_parse_frame, frames))


def inner_frames(frames: Sequence[str]) -> list[str]:
    """Return a stack without the callers of its work loop, which never change."""
    loops = [number for number, frame in enumerate(frames) if _parse_frame(frame)[0] in _LOOPS]
    return list(frames[: loops[0] + 1] if loops else frames)


def classify_stack(frames: Sequence[str], line: str = "") -> int:
    """Classify a stack and its innermost line: WAITS, WITH_OTHERS, FOR_DEVICE, OPERATOR or OWN."""
    parsed = list(map(_parse_frame, inner_frames(frames)))
    functions = {function for function, _ in parsed}
    if any(file.endswith(_QUEUES) for _, file in parsed):
        return WAITS
    if not functions & (_WORKS - _LOOPS) and ("get", "queue.py") in parsed:
        return WAITS
    if any(file.startswith(_COLLECTIVES) for _, file in parsed) or _HANDLE.search(line):
        return WITH_OTHERS
    if functions & _DEVICE or _EVENT.search(line):
        return FOR_DEVICE
    return OPERATOR if parsed and _OPERATORS.match(parsed[0][1]) else OWN


def _parse_frame(frame: str) -> tuple[str, str]:
    """Return the function and file of a frame such as `Worker.run (vllm/worker.py:7)`."""
    match = _FRAME.fullmatch(frame)
    return (match[1], match[2]) if match else (frame, "")


@dataclass(frozen=True)
class _RankPair:
    """A rank in both samples."""

    name: str
    node: str
    before: RankSample
    after: RankSample
    seconds: float

    @property
    def core(self) -> float:
        """Share of a core that its thread used."""
        return max(0.0, (self.after.ticks - self.before.ticks) / 100 / self.seconds)

    @property
    def kind(self) -> int:
        """Kind of its work.

        An operator without CPU use waits inside, for other ranks or for a GPU. One that uses a core
        also waits while a kernel spins: a launch blocks when the queue is full. A stopped process
        (SIGSTOP) waits for nothing, wherever its stack is.
        """
        if self.after.state in _STOPPED:
            return OWN
        stack = classify_stack(self.after.frames, self.after.line)
        if stack in (OPERATOR, OWN) and self.core >= _BUSY and self.gpu_spins:
            return FOR_DEVICE
        return WITH_OTHERS if stack == OPERATOR and self.core < _BUSY else stack

    @property
    def gpu_computes(self) -> bool:
        """True if its GPU computes in both samples."""
        return all(any(map(_computes, rank.gpus)) for rank in (self.before, self.after))

    @property
    def gpu_spins(self) -> bool:
        """True if its GPU runs kernels in both samples without computing."""
        return all(rank.gpus and all(map(_spins, rank.gpus)) for rank in (self.before, self.after))

    @property
    def movement(self) -> str:
        """Sign of movement; empty if it did not move."""
        before, after = self.before, self.after
        if before.thread != after.thread or _stack_position(before.frames) != _stack_position(
            after.frames
        ):
            return "its stack changed"
        switches = (after.voluntary - before.voluntary) / self.seconds
        if self.kind in (OPERATOR, OWN) and switches > _SWITCHES:
            return f"{switches:.0f} voluntary context switches per second"
        # A new shape of requests may compile kernels for minutes (nvcc, ptxas, gcc).
        helpers = (after.helpers - before.helpers) / 100 / self.seconds
        if helpers > _BUSY:
            return f"its child processes use {helpers:.0%} of a core"
        return ""


def _stack_position(frames: Sequence[str]) -> tuple[object, ...]:
    """Return the part of a stack that stays equal while a thread is stuck.

    A polling thread alternates between the frames inside its wait, and a spinning one between the
    lines of one function.
    """
    stack = classify_stack(frames)
    parsed = list(map(_parse_frame, frames))
    if stack in (WAITS, WITH_OTHERS):
        innocent = [
            number
            for number, (function, file) in enumerate(parsed)
            if file.endswith(_QUEUES) or file.startswith(_COLLECTIVES) or function == "get"
        ]
        cut = max(innocent, default=-1) + 1
        return (stack, *frames[cut:])
    return (stack, *parsed[:1], *frames[1:])


def compare_samples(
    before: Mapping[str, NodeSample | None],
    after: Mapping[str, NodeSample | None],
    ranks: Mapping[str, Mapping[int, str]],
    *,
    replica: int | None = None,
) -> StallFinding:
    """Compare two samples of the nodes that run ranks.

    Args:
        ranks: the nodes, with the ranks that Ray runs there by their processes; a node without
            any has the ranks that name themselves.
        replica: judge the ranks of this replica only, and neither bytes nor GPUs of a node: others
            use them, too.
    """
    pairs, unknown, busy_gpus = _all_pairs(before, after, ranks, replica)
    moved = [
        f"{pair.name} on {pair.node}: {movement}" for pair in pairs if (movement := pair.movement)
    ]
    flows = [] if replica is not None else list(_traffic(before, after, ranks))
    moved += [f"{node}: {rate / 1e6:.1f} MB/s" for node, rate in flows if rate > _IDLE]
    notes = [note for node in ranks for note in _format_notes(node, after.get(node))]
    idle = [f"{node}: {rate / 1e3:.0f} kB/s" for node, rate in flows if rate <= _IDLE]
    if not moved and not unknown:
        unknown = _long_step_signs(pairs, busy_gpus)
    finding = StallFinding(
        progress=True if moved else None if unknown or not pairs else False,
        observations=(*moved, *unknown, *_describe_ranks(pairs), *idle, *notes),
        stacks=tuple(_format_stacks(pairs)),
    )
    culprit = None if moved or unknown else _find_culprit(pairs)
    if culprit is None:
        return finding
    return replace(
        finding,
        rank=culprit.name,
        node=culprit.node,
        gpu=_rank_gpu(culprit.after),
        frame=culprit.after.frames[0],
    )


def _all_pairs(
    before: Mapping[str, NodeSample | None],
    after: Mapping[str, NodeSample | None],
    ranks: Mapping[str, Mapping[int, str]],
    replica: int | None,
) -> tuple[list[_RankPair], list[str], list[str]]:
    """Return the ranks of all nodes with a stack in both samples, the gaps, and the busy GPUs."""
    pairs: list[_RankPair] = []
    gaps: list[str] = []
    busy_gpus: list[str] = []
    for node, names in ranks.items():
        first, second = before.get(node), after.get(node)
        if first is None or second is None or not _far_enough_apart(first, second):
            gaps.append(f"{node}: fewer than two inspections")
            continue
        node_pairs, node_gaps = _pairs(node, first, second, names, replica)
        pairs += node_pairs
        gaps += node_gaps
        busy_gpus += _busy_gpus(node, first, second) if replica is None else []
    return pairs, gaps, busy_gpus


def _pairs(
    node: str, first: NodeSample, second: NodeSample, names: Mapping[int, str], replica: int | None
) -> tuple[list[_RankPair], list[str]]:
    """Return the ranks of a node with a stack in both samples, and the gaps."""
    earlier = {rank.pid: rank for rank in first.ranks}
    seconds = second.at - first.at
    pairs, gaps = [], []
    present = {rank.pid for rank in second.ranks}
    gaps += [f"{name} on {node}: no process" for pid, name in names.items() if pid not in present]
    for rank in second.ranks:
        name = names.get(rank.pid) or rank.rank or f"process {rank.pid}"
        dp = re.search(r"\bDP(\d+)", name)
        if replica is not None and dp and int(dp[1]) != replica:
            continue
        pair = _RankPair(name, node, earlier.get(rank.pid, RankSample(pid=rank.pid)), rank, seconds)
        if not rank.frames or not pair.before.frames:
            if not rank.engine:
                why = rank.why or pair.before.why or "fewer than two samples"
                gaps.append(f"{name} on {node}: no stack: {why}")
            continue
        pairs.append(pair)
    if not any(not rank.engine for rank in second.ranks):
        gaps.append(f"{node}: no rank found")
    return pairs, gaps


def _find_culprit(pairs: Sequence[_RankPair]) -> _RankPair | None:
    """Return the only rank that waits for nothing; the engine if all ranks wait for work."""
    ranks = [pair for pair in pairs if not pair.after.engine]
    suspects = [pair for pair in ranks if pair.kind == OWN]
    suspects = suspects or [pair for pair in ranks if pair.kind == OPERATOR]
    if not suspects and all(pair.kind == WAITS for pair in ranks):
        suspects = [pair for pair in pairs if pair.after.engine and pair.kind >= OPERATOR]
    return suspects[0] if len(suspects) == 1 else None


def _busy_gpus(node: str, first: NodeSample, second: NodeSample) -> list[str]:
    """Return the GPUs of a node that compute in both samples and belong to no known rank."""
    before = {gpu.get("index") for gpu in first.gpus if _computes(gpu)}
    after = [gpu.get("index") for gpu in second.gpus if _computes(gpu)]
    return [f"{node}'s GPU {index}" for index in after if index in before]


def _long_step_signs(pairs: Sequence[_RankPair], busy: Sequence[str]) -> list[str]:
    """Return the signs of one long step: GPUs that compute, or several ranks of which none waits
    for another or a GPU.

    A prompt that prefills for minutes in one step looks like this; a hung rank leaves the others
    waiting, and their GPUs spinning.
    """
    ranks = [pair for pair in pairs if not pair.after.engine]
    rank_gpus = (
        f"{pair.node}'s GPU {_rank_gpu(pair.after)}" for pair in ranks if pair.gpu_computes
    )
    if busy := [*busy, *rank_gpus]:
        verb = f" and {len(busy) - 1} more compute" if len(busy) > 1 else " computes"
        return [f"{busy[0]}{verb}, as in one long step"]
    all_compute = len(ranks) > 1 and all(
        pair.kind in (OPERATOR, OWN) and pair.core >= _BUSY for pair in ranks
    )
    return ["all ranks compute, as in one long step"] if all_compute else []


def _traffic(
    before: Mapping[str, NodeSample | None],
    after: Mapping[str, NodeSample | None],
    nodes: Iterable[str],
) -> Iterable[tuple[str, float]]:
    """Yield the bytes per second of every node's busiest interface, without the loopback."""
    for node in nodes:
        first, second = before.get(node), after.get(node)
        if first is None or second is None or second.at <= first.at:
            continue
        rates = [
            (sum(counts) - sum(first.bytes[name])) / (second.at - first.at)
            for name, counts in second.bytes.items()
            if name != "lo" and name in first.bytes
        ]
        yield node, max(rates, default=0.0)


def _describe_ranks(pairs: Sequence[_RankPair]) -> Iterable[str]:
    """Describe the activity of the ranks, grouped by equal activity."""
    groups: dict[str, list[_RankPair]] = {}
    for pair in pairs:
        groups.setdefault(_describe_activity(pair), []).append(pair)
    for activity, group in groups.items():
        names = [f"{pair.name} on {pair.node}{_format_load(pair)}" for pair in group[:_NAMED]]
        omitted = f" and {len(group) - _NAMED} more" if len(group) > _NAMED else ""
        yield f"{', '.join(names)}{omitted}: {activity}"


def _describe_activity(pair: _RankPair) -> str:
    after = pair.after
    asleep = ["uninterruptible"] if after.state == "D" else []
    asleep += ["stopped by a signal"] if after.state in _STOPPED else []
    asleep += [after.wchan] if after.wchan.strip("0") else []
    kernel = f" ({', '.join(asleep)})" if asleep else ""
    frame = f"{after.frames[0]}: {after.line}" if after.line else after.frames[0]
    return {
        WAITS: "waiting for work" if not after.engine else "waiting for ranks or requests",
        WITH_OTHERS: f"waiting for other ranks in {frame}",
        FOR_DEVICE: f"waiting for its GPU in {frame}",
        OPERATOR: f"running an operator in {frame}",
        OWN: f"running {frame}" if pair.core >= _BUSY else f"sleeping in {frame}{kernel}",
    }[pair.kind]


def _format_load(pair: _RankPair) -> str:
    """Format a rank's CPU and GPU use, in brackets; empty if there is none."""
    parts = [f"{pair.core:.0%} of a core"] if pair.core >= _BUSY else []
    parts += [f"GPU {gpu.get('index')}{_format_gpu(gpu)}" for gpu in pair.after.gpus]
    return f" ({', '.join(parts)})" if parts else ""


def _format_gpu(gpu: Mapping[str, Any]) -> str:
    load, memory, power = (_gpu_figure(gpu, name) for name in ("utilization", "memory", "power_w"))
    parts = [f" at {load:g} %"] if load is not None else []
    parts += [f"memory {memory:g} %"] if memory is not None else []
    parts += [f"{power:g} W"] if power is not None else []
    return ", ".join(parts)


def _computes(gpu: Mapping[str, Any]) -> bool:
    memory, power, limit = (_gpu_figure(gpu, name) for name in ("memory", "power_w", "limit_w"))
    draws = power is not None and limit is not None and power >= _POWER * limit
    return draws or (memory is not None and memory >= _MEMORY)


def _spins(gpu: Mapping[str, Any]) -> bool:
    complete = all(_gpu_figure(gpu, name) is not None for name in ("memory", "power_w", "limit_w"))
    return complete and (_gpu_figure(gpu, "utilization") or 0.0) >= _ALWAYS and not _computes(gpu)


def _gpu_figure(gpu: Mapping[str, Any], name: str) -> float | None:
    value = gpu.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _rank_gpu(rank: RankSample) -> str:
    return ", ".join(str(gpu.get("index")) for gpu in rank.gpus)


def _format_notes(node: str, sample: NodeSample | None) -> list[str]:
    if sample is None:
        return []
    gpus = ", ".join(f"GPU {gpu.get('index')}{_format_gpu(gpu)}" for gpu in sample.gpus)
    return [f"{node}: {note}" for note in (*([gpus] if gpus else []), *sample.notes)]


def _format_stacks(pairs: Sequence[_RankPair]) -> Iterable[str]:
    """Yield the last stack of every rank; ranks with equal stacks share one."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for pair in pairs:
        groups.setdefault(pair.after.frames, []).append(f"{pair.name} on {pair.node}")
    for frames, names in groups.items():
        omitted = [f"  … {len(frames) - _SHOWN} more"] if len(frames) > _SHOWN else []
        lines = [f"  {frame[:120]}" for frame in frames[:_SHOWN]]
        yield "\n".join((f"{', '.join(names)}:", *lines, *omitted))
