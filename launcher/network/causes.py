"""Table of causes for a network below its required level, matched against NCCL's log lines, its
environment and its container.

Order matters: causes of other lines come first. Sources: NVIDIA/nccl net_ib, net_socket.cc,
plugin, ibvwrap.cc and topo.cc at 2.30, and the threads named beside an entry.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher import upstream
from launcher.core.domain import Level

# NCCL registers buffers of every channel, some hundreds of MiB a rank; Docker's own default is 64
# KiB or 8 MiB.
ENOUGH_MEMLOCK = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A pattern in NCCL's log, the cause and the fix; `{0}` in both is the pattern's group.

    `explains` is its effect: TCP in place of RDMA, RDMA without GPUDirect, or any.
    """

    pattern: str
    cause: str
    fix: str
    explains: Literal["tcp", "no-gpudirect", "any"] = "any"


_FABRIC = "set `network: {fabric: infiniband}` (or `roce`) in the inventory, then run `vlaunch up`"
_NO_DEVICES = "the container has no /dev/infiniband"  # vllm PR 42075, nccl 451
_MEMLOCK = "the container's locked-memory limit is too low for RDMA"  # spark-vllm-docker 389
_MEMLOCK_FIX = (
    f"{_FABRIC}; if it is set already, run `sudo systemctl edit docker` and add `[Service]` with"
    " `LimitMEMLOCK=infinity`"
)
_NO_DEVICE = upstream.text("nccl.no-device")

# Environment as NCCL logs it, so that one table reads both: `NCCL_IB_DISABLE set by environment to
# 1.`
_SET = upstream.text("nccl.variable")

TABLE = (
    Cause(
        pattern=rf"NCCL_IB_DISABLE{_SET}(?!0\b)(\S+?)\.?$",
        cause="RDMA is disabled by `NCCL_IB_DISABLE={0}`",
        fix=(
            "remove `NCCL_IB_DISABLE` from `env:` in the inventory and from the image, then run"
            " `vlaunch up`"
        ),
        explains="tcp",
    ),
    Cause(
        pattern=rf"NCCL_NET{_SET}((?i:Socket))\b",  # NCCL compares names without regard to case
        cause="NCCL is forced to use TCP by `NCCL_NET={0}`",
        fix=(
            "remove `NCCL_NET` from `env:` in the inventory and from the image, then run"
            " `vlaunch up`"
        ),
        explains="tcp",
    ),
    Cause(
        pattern=upstream.text("nccl.verbs-not-opened"),
        cause="the image has no {0}",
        fix=(
            "add it to the image (`apt-get install -y libibverbs1 ibverbs-providers`), set that"
            " image as `image:` in the inventory, then run `vlaunch up`"
        ),
        explains="tcp",
    ),
    # a missing libnccl-net.so, with no name in it, is no fault: no plugin is installed, and none is
    # asked for
    Cause(
        pattern=upstream.text("nccl.plugin-named")
        + r"|(lib[nr]ccl-net[\w.-]*?): (?:undefined symbol|.*GLIBC)|(lib[nr]ccl-net-[\w-]+\.so)\S*:"
        r" cannot open|"
        # `NET plugin IB` and `Socket` are NCCL's own since 2.26, and another line reports
        # a missing device.
        + upstream.text("nccl.plugin-failed")
        + r"(?! (?:IB|Socket)\b)|"
        + upstream.text("nccl.plugin-symbol"),
        cause="the network plugin {0} failed to load",
        fix=(
            "install the plugin in the image, or remove `NCCL_NET_PLUGIN` from `env:` in the"
            " inventory, then run `vlaunch up`"
        ),
        explains="tcp",
    ),
    Cause(
        pattern=upstream.text("nccl.device-not-opened"),
        cause="the container is not allowed to open the RDMA device {0}",
        fix=_FABRIC,
    ),
    Cause(
        pattern=_NO_DEVICE,
        cause="NCCL found no RDMA device in the container",
        fix=_FABRIC,
        explains="tcp",
    ),
    Cause(pattern=upstream.text("nccl.memory-not-registered"), cause=_MEMLOCK, fix=_MEMLOCK_FIX),
    Cause(
        pattern=upstream.any_of("nccl.queue-pair-failed", "nccl.gid"),
        cause="the two nodes use different GIDs",
        fix=(
            "for RoCE v2 find the index with `show_gids` and set `env: {NCCL_IB_GID_INDEX: 3}` in"
            " the inventory, the same on all nodes; or remove it, so that NCCL chooses"
        ),
    ),
    Cause(
        pattern=upstream.any_of("nccl.no-interface", "nccl.no-listening-interface"),
        cause="the interface configured for NCCL does not exist on this node",
        fix=(
            "list interfaces with `ip -br link` on the node, then set its own `network:"
            " {interface: …}` in the inventory"
        ),
    ),
    Cause(
        pattern=upstream.text("nccl.connection-failed"),
        cause="a connection between the nodes failed: {0}",
        fix=(
            "allow TCP between the nodes on all ports and compare their `network: {interface: …}`: "
            "`vlaunch check --only ports-reachable`"
        ),
    ),
    Cause(  # without DMA-BUF, GPUDirect needs the module nvidia_peermem
        pattern=rf"(NCCL_NET_GDR_LEVEL){_SET}(?:LOC|0)\b|(NCCL_DMABUF_ENABLE){_SET}0\b",
        cause="GPUDirect is disabled by `{0}`",
        fix="remove `{0}` from `env:` in the inventory, then run `vlaunch up`",
        explains="no-gpudirect",
    ),
    Cause(
        pattern=(
            rf"{upstream.text('nccl.gpudirect-disabled')} .*?{upstream.text('nccl.gpudirect-hca')}"
            rf"|(?<!NCCL_)DMA-?BUF(?! is available)|{upstream.text('nccl.peermem')}"
        ),
        cause="GPUDirect RDMA is off {0}",
        fix=(
            "load the driver's module on the node: `sudo modprobe nvidia_peermem` (or use a driver"
            " and kernel with DMA-BUF); if it is loaded, check with `nvidia-smi topo -m`"
            " that GPU and NIC are close enough for NCCL_NET_GDR_LEVEL"
        ),
        explains="no-gpudirect",
    ),
)


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
    explained_levels = ("no-gpudirect",) if level == "rdma" else ("any", "tcp")
    evidence = {
        entry: shown
        for entry in TABLE
        if entry.explains in explained_levels
        and (shown := _match_evidence(entry, lines)) is not None
    }
    switched_off = any("NCCL_IB_DISABLE" in entry.pattern for entry in evidence)
    if level != "rdma" and infiniband is not None and not infiniband and not switched_off:
        return _NO_DEVICES, "/dev/infiniband is missing or empty", _FABRIC
    no_device = any(entry.pattern == _NO_DEVICE for entry in evidence)
    for entry, (line, name) in evidence.items():
        if no_device and not name and "plugin" in entry.cause:
            continue  # a plugin fails without a device: the device is missing
        if entry.pattern == _NO_DEVICE and (hca := _requested_hca(lines)) is not None:
            return (
                f"no RDMA device on this node is named `{hca}`",
                f"NCCL_IB_HCA={hca}; {line}",
                "list devices with `ls /sys/class/infiniband` on the node, then set its own"
                " `network: {hca: […]}` in the inventory",
            )
        return " ".join(entry.cause.format(name).split()), line, entry.fix.replace("{0}", name)
    if memlock is not None and memlock < ENOUGH_MEMLOCK and level != "rdma":
        return _MEMLOCK, f"memlock limit: {memlock // 1024} KiB", _MEMLOCK_FIX
    return None


def _requested_hca(lines: Sequence[str]) -> str | None:
    """Return the RDMA devices that the environment requests."""
    for line in lines:
        # `^` excludes names, so that none of them need be there; `=` asks for whole names.
        if match := re.search(rf"NCCL_IB_HCA{_SET}=?(?!\^)(\S+)", line):
            return match[1]
    return None


def _match_evidence(entry: Cause, lines: Sequence[str]) -> tuple[str, str] | None:
    """Return the first line that matches a cause, and the name in it."""
    for line in lines:
        if match := re.search(entry.pattern, line):
            name = next((group for group in match.groups() if group), "")
            return line, f"for {name}" if name.startswith("HCA") else name
    return None
