"""What was slow before anything was measured: the first use of torch and NCCL, names of other
nodes, the meeting itself. None of it fails a network that is well, and each has its own remedy.
"""

from __future__ import annotations

from launcher.checks.shape import Finding, warned
from launcher.model import Node
from launcher.tools.network import Report

# Seconds. torch is imported in 3 to 10 s from a warm disk, its GPUs' first use included; ranks that
# have it meet within a second or two, and a name that somebody knows is found in milliseconds.
_TORCH, _MEETING, _NAME = 30.0, 15.0, 1.0

TORCH_FIX = (
    "look at the disk and the load of {node} (`uptime`, `iostat -x 1`); with NVIDIA GPUs, switch"
    " persistence mode on there: `sudo nvidia-smi -pm 1`"
)
NAMES_FIX = "see whether names of nodes are found in time: `vlaunch check --only names-resolve`"


def start(node: Node, report: Report) -> list[Finding]:
    """Return a warning for each thing that was slow on a node whose ranks met the others."""
    findings = []
    torch = max((rank.torch or 0.0 for rank in report.ranks), default=0.0)
    if torch > _TORCH:
        text = f"its ranks took {torch:.0f} s to load torch and NCCL; all others waited for them"
        findings.append(warned(node, text, fix=TORCH_FIX.format(node=node.name)))
    late = [name for name, seconds in report.names.items() if seconds >= _NAME]
    meeting = max((rank.meeting or 0.0 for rank in report.ranks), default=0.0)
    if late:
        most = max(report.names[name] for name in late)
        text = (
            f"looking up the names of {', '.join(late)} in the container takes {most:.0f} s or"
            " more, and so does each connection of torch's store"
        )
        findings.append(warned(node, text, fix=NAMES_FIX))
    elif meeting > _MEETING:
        text = f"its ranks took {meeting:.0f} s to meet the others, all of which had torch"
        findings.append(warned(node, text, fix=NAMES_FIX))
    return findings
