"""What tensor parallelism across nodes costs, in figures that were measured here, against a
pipeline stage per node.

A layer of a tensor-parallel transformer reduces twice over all its ranks, after attention and after
the MLP (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3); a pipeline hands one activation
on per stage. The rule that follows is that of vLLM's guide "Parallelism and Scaling": TP inside
nodes, PP between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from launcher.checks.network.shape import Verdict, rate
from launcher.checks.network.transport_kinds import over_tcp
from launcher.checks.shape import Finding

_BYTES = 2  # of one value of an activation: bfloat16 or float16
_PROMPT = 1000  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A split whose TP groups cross nodes; `instead` is the TP × PP that keeps them inside;
    `hidden`, `layers`: the model's.
    """

    tp: int
    pp: int
    instead: tuple[int, int]
    layers: int
    hidden: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured: all_reduce over all ranks and one send, latencies in seconds, rates in
    bytes per second.
    """

    reduce_latency: float
    algbw: float
    send_latency: float
    bandwidth: float
    tcp: bool = False


def figures(verdict: Verdict) -> Figures | None:
    """Return the figures of a verdict; `None` where something was not measured."""
    whole, sends = verdict.collective, _sends(verdict)
    if whole is None or whole.latency is None or not whole.algbw or not sends:
        return None
    return Figures(
        reduce_latency=whole.latency,
        algbw=whole.algbw,
        send_latency=median(latency for latency, _ in sends),
        bandwidth=min(bandwidth for _, bandwidth in sends),
        tcp=any(over_tcp(cell.transport) for cell in verdict.cells),
    )


def _sends(verdict: Verdict) -> list[tuple[float, float]]:
    """Return the latency (seconds) and bandwidth (bytes/s) of each direction that was measured."""
    return [
        (cell.latency, cell.bandwidth)
        for cell in verdict.cells
        if cell.latency is not None and cell.bandwidth
    ]


def kept(record: Mapping[str, Any]) -> Figures | None:
    """Read the figures of a kept verdict; `None` where it has none."""
    try:
        return Figures(**record["figures"])
    except (KeyError, TypeError):
        return None


def judge(crossing: Crossing, seen: Figures) -> Finding:
    """Say what the split costs on the network and what the other would: a warning on TCP, else only
    told.
    """
    reduces = 2 * crossing.layers
    tp, pp = crossing.instead
    hops = max(1, pp - 1)
    token = reduces * seen.reduce_latency
    activation = _PROMPT * crossing.hidden * _BYTES
    prompt = reduces * max(seen.reduce_latency, activation / seen.algbw)
    hop, longer = hops * seen.send_latency, hops * (seen.send_latency + activation / seen.bandwidth)
    text = (
        f"TP {crossing.tp} crosses nodes: a token costs {reduces} reductions ×"
        f" {_time(seen.reduce_latency)} = {_time(token)} on the network, {_PROMPT} tokens of prompt"
        f" {_time(prompt)}; TP {tp} × PP {pp} costs {_time(hop)} and {_time(longer)}"
    )
    return Finding(
        node="",
        status="warn" if seen.tcp else "pass",
        text=text,
        evidence=(
            f"measured: all_reduce {rate(seen.algbw)}, {_time(seen.reduce_latency)}; send"
            f" {rate(seen.bandwidth)}, {_time(seen.send_latency)}"
        ),
        fix=(
            f"use `--tp {tp} --pp {pp}` (vLLM's guide: tensor parallel inside nodes, pipeline"
            " parallel between them)"
        ),
    )


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
