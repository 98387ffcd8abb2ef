"""Reports of probes on three nodes, for tests to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

from launcher.core.domain import Inventory
from launcher.inventory.load import loads
from launcher.network.probe_command import Collective, RankReport, Report, Transfer

NAMES = ("n1", "n2", "n3")
_NODES = (
    "nodes: [{host: n1, ip: 10.0.0.1, gpus: 1}, {host: n2, ip: 10.0.0.2, gpus: 1}, {host: n3, ip:"
    " 10.0.0.3, gpus: 1}]"
)
GDR = "NET/IB/0/GDRDMA"


def three(extra: str = "accelerator: cpu") -> Inventory:
    """Return three nodes."""
    return loads(f"cluster: c\nimage: x:1\n{extra}\n{_NODES}\n", Path("inventory.yaml"))


def healthy(*, via: str = "", **changed: Any) -> dict[str, Report]:
    """Return reports of three healthy nodes: Gloo, or NCCL with the links `via`."""
    return {
        name: replace(
            Report(
                node=name,
                backend="nccl" if via else "gloo",
                ranks=(RankReport(rank=rank, local_rank=0, phase="done", ended=True, exit=0),),
                transfers=tuple(
                    Transfer(
                        source=peer,
                        target=name,
                        local_rank=0,
                        latency=1e-4,
                        bandwidth=1e9,
                        size=1 << 26,
                    )
                    for peer in NAMES
                    if peer != name
                ),
                collective=Collective(ranks=3, latency=2e-4, size=1 << 26, algbw=5e8, busbw=6e8),
                versions={"torch": "2.13.0"},
                gpu="NVIDIA H100 80GB HBM3" if via else "",
                pair_logs=(
                    {peer: line(name, peer, via) for peer in NAMES if peer != name} if via else {}
                ),
            ),
            **changed,
        )
        for rank, name in enumerate(NAMES)
    }


def line(name: str, peer: str, via: str) -> str:
    """Return NCCL's line on `name` for a connection of the two; their ranks are 0 and 1."""
    direction = "0[0] -> 1[0] [send]" if name < peer else "0[0] -> 1[0] [receive]"
    return f"{name}:7:9 [0] NCCL INFO Channel 00/0 : {direction} via {via}\n"


def between(reports: Mapping[str, Report], a: str, b: str, **changed: Any) -> dict[str, Report]:
    """Change the results of two nodes for a pair, in both directions."""
    result = dict(reports)
    for source, target in permutations((a, b)):
        report = result[target]
        transfers = [
            replace(transfer, **changed) if transfer.source == source else transfer
            for transfer in report.transfers
        ]
        result[target] = replace(report, transfers=tuple(transfers))
    return result


def linked(reports: Mapping[str, Report], a: str, b: str, via: str) -> dict[str, Report]:
    """Give two nodes another link."""
    result = dict(reports)
    for first, other in permutations((a, b)):
        result[first] = replace(
            result[first], pair_logs={**result[first].pair_logs, other: line(first, other, via)}
        )
    return result
