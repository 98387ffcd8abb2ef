"""NCCL logs of the engine's own ranks after the start, which prove the transport in use."""

from collections.abc import Mapping, Sequence

from launcher.core.domain import Answer, Inventory
from launcher.core.transport import Command
from launcher.network import nccl_log
from launcher.tools.site import Site

_FOLDER = "/tmp/vlaunch-nccl"
_RELEVANT = (
    "Channel|nNodes|NET/|Using |WARN|Bootstrap|set by environment|GPU Direct|commId|NCCL version"
)
_LIMIT = 8_000_000


def variables(inventory: Inventory, name: str) -> dict[str, str]:
    """Return NCCL's variables that make every rank write a log (`%h` host, `%p` process); none on
    CPUs and on one node.

    Only the head needs them: Ray's driver passes its environment to the workers (vLLM's
    ray_executor_v2.py).
    """
    if inventory.accelerator == "cpu" or len(inventory.nodes) == 1:
        return {}
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET",
        "NCCL_DEBUG_FILE": f"{_FOLDER}.{name}.%h.%p.log",
    }


def query_logs(site: Site, nodes: Sequence[str], name: str) -> list[Command]:
    """Query the containers of `nodes` for the relevant lines of their ranks' logs."""
    script = f'grep -ahE "$1" {_FOLDER}."$2".*.log | head -c {_LIMIT}'
    argv = ("sh", "-c", script, "log", _RELEVANT, name)
    return [site.in_container(node, argv) for node in site.nodes if node.name in nodes]


def parse_logs(answers: Mapping[str, Sequence[Answer]]) -> nccl_log.Reading:
    """Parse all ranks' logs as one."""
    outputs = (answer.out.encode() for of_node in answers.values() for answer in of_node)
    return nccl_log.merge_readings([nccl_log.parse_log([output]) for output in outputs])
