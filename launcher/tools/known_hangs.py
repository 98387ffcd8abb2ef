"""NCCL builds and NVIDIA drivers that are known to hang, with sources."""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

PREFIX = "known to hang: "  # starts all lines of `describe_hangs`
_Version = tuple[int, ...]


@dataclass(frozen=True)
class _KnownHang:
    """Hang of certain versions, optionally limited to GPUs (a pattern) or a transport."""

    circumstances: str
    affects: Callable[[_Version], bool]
    advice: str
    source: str
    gpu: str = ""
    transport: str = ""


_NCCL = (
    _KnownHang(
        circumstances="on GB10, in collectives between nodes, as built for pip's nvidia-nccl-cu13",
        affects=lambda version: version == (2, 28, 9),
        advice="set VLLM_NCCL_SO_PATH to DGX OS's own build, or to 2.30.4, which ran for days",
        source="vllm 41725, 42354, 46097",
        gpu=r"\bGB10\b",
    ),
    _KnownHang(
        circumstances="on ARM, where it was built with gcc before 10",
        affects=lambda version: version == (2, 29, 2),
        advice="use 2.29.3",
        source="NCCL's release notes, v2.29.3-1",
    ),
    _KnownHang(
        circumstances="with InfiniBand between nodes",
        affects=lambda version: (2, 29, 7) <= version < (2, 30, 7),
        advice="use 2.30.7, or set NCCL_PXN_DISABLE=1",
        source="NVIDIA's cuEST documentation, known issues",
        transport="NET/IB",
    ),
)
_DRIVERS = (
    _KnownHang(
        circumstances="in NCCL, with peer access (P2P) between GPUs",
        affects=lambda version: version[0] == 560,
        advice="use 570, or set NCCL_P2P_DISABLE=1",
        source="xgboost 11242",
    ),
    _KnownHang(
        circumstances="in NCCL, with tensor parallelism",
        affects=lambda version: version == (545, 29, 2),
        advice="use another driver",
        source="vllm 1801",
    ),
)


def describe_hangs(
    nccl: Collection[str], drivers: Collection[str], gpus: Collection[str], *, ib: bool
) -> Iterator[str]:
    """Yield one line per version that is known to hang.

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
                has_gpu = not hang.gpu or any(re.search(hang.gpu, gpu) for gpu in gpus)
                has_transport = ib or not hang.transport
                if parsed and hang.affects(parsed) and has_gpu and has_transport:
                    yield (
                        f"{PREFIX}{name} {version} {hang.circumstances}: {hang.advice}"
                        f" ({hang.source})"
                    )
