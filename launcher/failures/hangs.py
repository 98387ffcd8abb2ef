"""Builds of NCCL and NVIDIA drivers that are known to hang."""

import re
from collections.abc import Collection, Iterator

from launcher.failures.table import Hang, load_failures

_Version = tuple[int, ...]


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
    for hang in load_failures()["known-to-hang"].hangs:
        for version in sorted(set(nccl if hang.program == "NCCL" else drivers)):
            has_gpu = not hang.gpu or any(re.search(hang.gpu, gpu) for gpu in gpus)
            if _affects(hang, version) and has_gpu and (ib or not hang.ib):
                yield (
                    f"{hang.program} {version} {hang.circumstances}: {hang.advice} ({hang.source})"
                )


def _affects(hang: Hang, version: str) -> bool:
    number = _parse(version.partition("+")[0])
    return bool(number) and _parse(hang.first) <= number < _parse(hang.below)


def _parse(version: str) -> _Version:
    return tuple(map(int, re.findall(r"\d+", version)))
