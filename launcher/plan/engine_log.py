"""What the engine's own ranks wrote about their links after the start: the last word on what they really use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.model import Answer, Argv, Backend, Inventory
from launcher.plan import containers
from launcher.tools import docker, nccl
from launcher.transport import Command

_FOLDER = "/tmp/vlaunch-nccl"
_TELLING = "Channel|nNodes|NET/|Using |WARN|Bootstrap|set by environment|GPU Direct|commId|NCCL version"
_LIMIT = 8_000_000


def environment(inventory: Inventory, job: str, more: Mapping[str, str] | None = None) -> Argv:
    """Return what to put before the engine's command so that every rank of a Ray job writes a log of its own, and `more`.

    Ray's driver hands its environment to the workers (vLLM's ray_executor_v2.py), so that the head need only be told.
    """
    settings = variables(inventory, job) | dict(more or {})
    return ("env", *(f"{name}={value}" for name, value in sorted(settings.items()))) if settings else ()


def variables(inventory: Inventory, name: str = "rank") -> dict[str, str]:
    """Return NCCL's own variables for such a log (`%h` host, `%p` process); none on a CPU, which has no NCCL."""
    if inventory.accelerator == "cpu" or len(inventory.nodes) == 1:
        return {}
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET",
        "NCCL_DEBUG_FILE": f"{_FOLDER}.{name}.%h.%p.log",
    }


def ask(inventory: Inventory, backend: Backend, nodes: Sequence[str], name: str = "rank") -> list[Command]:
    """Ask the containers of `nodes` for the telling lines of their ranks' logs."""
    commands = []
    for node in inventory.nodes:
        if node.name not in nodes:
            continue
        inside = containers.name(inventory, node) if backend == "ray" else containers.rank_name(inventory, node)
        script = f'grep -ahE "$1" {_FOLDER}."$2".*.log | head -c {_LIMIT}'
        argv = docker.exec_(node.docker, inside, "sh", "-c", script, "log", _TELLING, name)
        commands.append(Command(node=node.name, argv=argv, timeout=60))
    return commands


def read(answers: Mapping[str, Sequence[Answer]]) -> nccl.Reading:
    """Read all ranks' logs as one."""
    return nccl.merge([nccl.read([answer.out.encode()]) for said in answers.values() for answer in said])
