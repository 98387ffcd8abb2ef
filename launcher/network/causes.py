"""Cause of a network below its required level, from NCCL's log lines, its environment and its
container.
"""

import re
from collections.abc import Mapping, Sequence

from launcher import upstream
from launcher.core.domain import Level
from launcher.failures.match import Match, find_failures
from launcher.failures.table import load_failures

# NCCL registers buffers of every channel, some hundreds of MiB a rank; Docker's own default is 64
# KiB or 8 MiB.
ENOUGH_MEMLOCK = 1 << 30
_NO_DEVICES = "the container has no /dev/infiniband"  # vllm PR 42075, nccl 451
_MEMLOCK, _NO_DEVICE, _DISABLED = "memlock", "rdma-unseen", "ib-disabled"
# Environment as NCCL logs it, so that one table reads both: `NCCL_IB_DISABLE set by environment to
# 1.`
_SET = upstream.text("nccl.variable")


def find_cause(
    *,
    warnings: Sequence[str],
    level: Level | None,
    env: Mapping[str, str] | None = None,
    infiniband: Sequence[str] | None = None,
    memlock: int | None = None,
) -> tuple[str, str, str] | None:
    """Return the likeliest cause of a network below its level, the evidence and the fix; `None` if
    no line explains it.

    Args:
        warnings: the relevant lines of the log (`nccl_log`).
        level: what the links reach: for `rdma` only the lack of GPUDirect is to be explained, else
            (`None`: not known) that of RDMA.
        env: NCCL's variables in the container.
        infiniband: files in the container's /dev/infiniband; `None` if unknown.
        memlock: bytes the container may lock, `None` if unlimited or unknown.
    """
    lines = [
        *(f"{name} set by environment to {value}" for name, value in sorted((env or {}).items())),
        *warnings,
    ]
    effects = ("no-gpudirect",) if level == "rdma" else ("any", "tcp")
    matches = {
        match.failure.id: match
        for match in reversed(find_failures(lines, rdma=True))
        if match.failure.explains in effects
    }
    is_tcp = level != "rdma"
    if is_tcp and infiniband is not None and not infiniband and _DISABLED not in matches:
        fix = load_failures()[_NO_DEVICE].choose_fix()
        return _NO_DEVICES, "/dev/infiniband is missing or empty", fix
    # In the table's order: causes of other lines come first.
    for failure in load_failures().values():
        match = matches.get(failure.id)
        if match is None or _is_without_device(match, matches):
            continue
        line = lines[match.line]
        if failure.id == _NO_DEVICE and (hca := _requested_hca(lines)) is not None:
            return (
                f"no RDMA device on this node is named `{hca}`",
                f"NCCL_IB_HCA={hca}; {line}",
                "list devices with `ls /sys/class/infiniband` on the node, then set its own"
                " `network: {hca: […]}` in the inventory",
            )
        return match.cause, line, match.choose_fix()
    if memlock is not None and memlock < ENOUGH_MEMLOCK and is_tcp:
        failure = load_failures()[_MEMLOCK]
        return failure.cause, f"memlock limit: {memlock // 1024} KiB", failure.choose_fix()
    return None


def _is_without_device(match: Match, matches: Mapping[str, Match]) -> bool:
    """True for a plugin without a name that failed because the device is missing."""
    return match.failure.id == "nccl-plugin" and not match.name and _NO_DEVICE in matches


def _requested_hca(lines: Sequence[str]) -> str | None:
    """Return the RDMA devices that the environment requests."""
    for line in lines:
        # `^` excludes names, so that none of them need be there; `=` asks for whole names.
        if match := re.search(rf"NCCL_IB_HCA{_SET}=?(?!\^)(\S+)", line):
            return match[1]
    return None
