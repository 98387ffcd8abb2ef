"""NCCL builds and NVIDIA drivers that are known to hang, each with its source."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

NAMED = "known to hang: "  # begins each line of `among`
_Version = tuple[int, ...]


@dataclass(frozen=True)
class _Hang:
    """Versions that hang, on certain GPUs or over certain transports, where that matters."""

    what: str
    holds: Callable[[_Version], bool]
    advice: str
    source: str
    gpu: str = ""
    transport: str = ""


_NCCL = (
    _Hang(
        what="on GB10, in collectives between nodes, as built for pip's nvidia-nccl-cu13",
        holds=lambda version: version == (2, 28, 9),
        advice="DGX OS's own build does not, 2.30.4 ran for days: name one with VLLM_NCCL_SO_PATH",
        source="vllm 41725, 42354, 46097",
        gpu=r"\bGB10\b",
    ),
    _Hang(
        what="on ARM, where it was built with gcc before 10",
        holds=lambda version: version == (2, 29, 2),
        advice="use 2.29.3",
        source="NCCL's release notes, v2.29.3-1",
    ),
    _Hang(
        what="with InfiniBand between nodes",
        holds=lambda version: (2, 29, 7) <= version < (2, 30, 7),
        advice="use 2.30.7, or set NCCL_PXN_DISABLE=1",
        source="NVIDIA's cuEST documentation, known issues",
        transport="NET/IB",
    ),
)
_DRIVERS = (
    _Hang(
        what="in NCCL, with peer access (P2P) between GPUs",
        holds=lambda version: version[0] == 560,
        advice="use 570, or set NCCL_P2P_DISABLE=1",
        source="xgboost 11242",
    ),
    _Hang(
        what="in NCCL, with tensor parallelism",
        holds=lambda version: version == (545, 29, 2),
        advice="use another driver",
        source="vllm 1801",
    ),
)


def among(
    nccl: Collection[str], drivers: Collection[str], gpus: Collection[str], *, ib: bool
) -> Iterator[str]:
    """Yield a line for each version that is known to hang.

    Args:
        nccl: versions such as `2.28.9+cuda13.0`.
        drivers: versions such as `570.133.20`.
        gpus: models, such as `NVIDIA GB10`.
        ib: whether NCCL uses InfiniBand or RoCE.
    """
    for name, versions, table in (("NCCL", nccl, _NCCL), ("driver", drivers, _DRIVERS)):
        for version in sorted(set(versions)):
            parsed = tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))
            for hang in table:
                there = not hang.gpu or any(re.search(hang.gpu, gpu) for gpu in gpus)
                if parsed and hang.holds(parsed) and there and (ib or not hang.transport):
                    yield f"{NAMED}{name} {version} {hang.what}: {hang.advice} ({hang.source})"
