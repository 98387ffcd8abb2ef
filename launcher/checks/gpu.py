"""The GPUs: one model everywhere, without hardware trouble, and not held by somebody else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from launcher.checks.consistency import having, usual
from launcher.checks.host import cpu_has_none, not_nvidia
from launcher.checks.shape import (
    UNSURVEYED,
    Check,
    Evidence,
    Finding,
    Host,
    each,
    failed,
    passed,
    skipped,
    warned,
)
from launcher.model import Node
from launcher.tools.survey import Survey

_MIB_PER_GB = 1e9 / 1024**2
# Xids that an application brings about by itself (NVIDIA, Xid catalog); the others are the
# driver's, the GPU's or the slot's.
_OF_APPLICATIONS = {13, 31, 43, 45}


def _model(evidence: Evidence) -> Sequence[Finding]:
    models, findings = _models(evidence)
    kinds = {name: tuple(sorted(set(names))) for name, names in models.items()}
    common, hosts = usual(kinds), {host.name: host for host in evidence.reached}
    for name, names in models.items():
        counted = (f"{count} × {model}" for model, count in Counter(names).items())
        text = "; ".join(counted) or "no GPU is declared"
        if kinds[name] != common and common is not None:
            fix = f"use nodes with one model of GPU, or leave {name} out of the inventory"
            told = f"{text}, while {having(kinds, common)} has {' and '.join(common)}"
            findings.append(failed(name, told, fix=fix))
        elif len(kinds[name]) > 1:
            fix = f"lower `gpus:` of {name} to those of one model"
            findings.append(warned(name, f"{text}: GPUs of several models", fix=fix))
        else:
            findings.append(_small(hosts[name], text) or passed(name, text))
    return findings


def _models(evidence: Evidence) -> tuple[dict[str, tuple[str, ...]], list[Finding]]:
    """Return the models of each node's declared GPUs, and a SKIP for each node that tells none."""
    found, gaps = dict[str, tuple[str, ...]](), list[Finding]()
    nvidia = evidence.inventory.accelerator == "nvidia"
    unknown = "`nvidia-smi` gave no GPU" if nvidia else _UNNAMED
    for host in evidence.reached:
        if host.facts.gpus is None:
            gaps.append(skipped(host, unknown))
        else:
            found[host.name] = tuple(gpu.name for gpu in host.facts.used(host.node))
    return found, gaps


def _small(host: Host, text: str) -> Finding | None:
    """Judge that the first GPU has the memory its model is sold with."""
    gpu, expected = next(iter(host.facts.used(host.node)), None), host.expected_gpu
    if gpu is None or expected is None or expected.memory is None or not gpu.memory_total:
        return None
    if gpu.memory_total >= 0.9 * expected.memory * _MIB_PER_GB:
        return None
    return warned(
        host,
        f"{text} with {gpu.memory_total / _MIB_PER_GB:.0f} GB, {expected.memory:g} GB expected",
        fix=f"see whether it is split: `nvidia-smi -L` on {host.name} lists MIG instances",
    )


_UNNAMED = "the models of AMD GPUs are not asked"


def _errors(host: Host) -> Finding:
    node, survey = host.node, host.survey
    if survey is None:
        return skipped(host, UNSURVEYED)
    if counts := _uncorrected(host, survey):
        return failed(
            node,
            f"uncorrected memory errors ({counts})",
            evidence="\n".join(survey.xid or ()),
            fix=_replace(node),
        )
    if survey.xid is None:
        return skipped(
            node,
            "the kernel's log may not be read, so nothing is known of Xid errors",
            fix=_READ_LOG,
        )
    if survey.xid:
        return _reported(node, survey.xid)
    if not survey.gpus:
        return skipped(node, "no Xid, but `nvidia-smi` told nothing of memory errors")
    if all(gpu.ecc_errors is None for gpu in survey.gpus):
        return passed(node, "no Xid; these GPUs do not count memory errors")
    return passed(node, "no uncorrected memory error and no Xid")


def _uncorrected(host: Host, survey: Survey) -> str:
    """Return the uncorrected memory errors of the GPUs that are used, in words; nothing where none
    was counted.
    """
    others = {gpu.index for gpu in host.facts.gpus or ()} - _indexes(host)
    return ", ".join(
        f"GPU {gpu.index}: {gpu.ecc_errors}"
        for gpu in survey.gpus
        if gpu.ecc_errors and gpu.index not in others
    )


def _indexes(host: Host) -> set[int]:
    return {gpu.index for gpu in host.facts.used(host.node)}


def _reported(node: Node, lines: Sequence[str]) -> Finding:
    """Judge the Xids in a kernel's log: a failure, unless applications brought them all about."""
    serious = [line for line in lines if _xid(line) not in _OF_APPLICATIONS]
    if serious:
        return failed(
            node,
            f"the driver reported Xid {_codes(serious)} since the node booted",
            evidence=_last(serious),
            fix=_replace(node),
        )
    return warned(
        node,
        f"the driver reported Xid {_codes(lines)} since the node booted, which applications bring"
        " about",
        evidence=_last(lines),
        fix=f"look for what crashed then: `sudo journalctl -k -b | grep Xid` on {node.name}",
    )


def _codes(lines: Sequence[str]) -> str:
    return ", ".join(sorted({str(_xid(line) or "?") for line in lines}))


_READ_LOG = (
    "allow it: `sudo sysctl kernel.dmesg_restrict=0`, or log in as a member of the group adm"
)


def _replace(node: Node) -> str:
    return (
        f"reset the GPU (`sudo nvidia-smi --gpu-reset`) or reboot {node.name}; when it comes back,"
        " have the GPU replaced (https://docs.nvidia.com/deploy/xid-errors/)"
    )


def _xid(line: str) -> int | None:
    found = re.search(r"Xid \([^)]*\): (\d+)", line)
    return int(found[1]) if found else None


def _last(lines: Sequence[str]) -> str:
    return "\n".join(lines[-5:])


def _fabric(host: Host) -> Finding:
    nvlink = host.survey.nvlink if host.survey else None
    if nvlink is None:
        return skipped(host, UNSURVEYED)
    unready = sorted({state for state in nvlink.states if state != "Completed"})
    if not nvlink.states and not nvlink.switches:
        return passed(host, "no NVSwitch")
    # GPUs before Hopper have no state; then the service's is all there is.
    stopped = not nvlink.states and nvlink.service not in ("active", "")
    if not unready and not stopped:
        return passed(host, "Fabric Manager has set the NVLink fabric up")
    return failed(
        host,
        f"Fabric Manager is {nvlink.service}"
        if stopped
        else f"the NVLink fabric between the GPUs is not ready: {', '.join(unready)}",
        fix=f"`sudo systemctl enable --now nvidia-fabricmanager` on {host.name}; its version must"
        " be the driver's",
    )


CHECKS = (
    Check(
        id="gpu-model",
        what="all nodes have the same GPUs",
        why=(
            "the slowest and smallest GPU sets the pace and the memory for all, and kernels differ"
            " between models"
        ),
        judge=_model,
        group="accelerator",
        skip_reason=cpu_has_none,
        needs=("accelerator",),
    ),
    Check(
        id="fabric-manager",
        what="the fabric between GPUs is set up where there is one",
        why=(
            "behind NVSwitches CUDA does not start without Fabric Manager (error 802), although"
            " `nvidia-smi` lists the GPUs"
        ),
        judge=each(_fabric),
        group="accelerator",
        skip_reason=not_nvidia,
        needs=("accelerator",),
    ),
    Check(
        id="gpu-errors",
        what="no GPU reported trouble since the node booted",
        why=(
            "a GPU with memory errors or on a bad slot gives wrong numbers or ends a rank hours"
            " later"
        ),
        judge=each(_errors),
        group="accelerator",
        skip_reason=not_nvidia,
        needs=("accelerator",),
    ),
)
