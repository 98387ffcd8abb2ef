"""What a bug report's bundle asks of each node, and the files that its answers become.

File names are ours, never a node's.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from launcher.app import audit
from launcher.core import untrusted
from launcher.core.domain import Answer, Node
from launcher.core.redaction import MASK
from launcher.core.secret_patterns import DOUBTFUL_NAME
from launcher.core.transport import Command
from launcher.tools.diagnosis import (
    ENGINES,
    INSIDE,
    INSPECT,
    KERNEL,
    LOGS,
    RECORD,
    STATE,
    Log,
    Told,
    ask_diagnosis,
    read,
)

_TIMEOUT = 240.0
_LINES = 50_000
# An answer is kept up to 8 MiB: four containers' logs must fit into one, and so must five servers',
# and three jobs' and what stands with them.
_LOG, _JOB = 1_800_000, 1_500_000
_AUDIT = 2000  # lines
_NAMES = {
    "log": "container",
    "driver": "job-driver",
    "worker": "ray-worker",
    "ray": "ray",
    "nccl": "nccl",
    "kernel": "kernel",
}
# Variables whose values tell of the network, the GPUs and the engine; of all others only the names
# are kept.
_TELLING = re.compile(
    r"(?:NCCL|GLOO|TP|UCX|VLLM|RAY|CUDA|NVIDIA|OMP|HIP|ROCR|TORCH|PYTORCH)_\w+|HF_H\w+"
    r"|HF_TOKEN_PATH|PATH|LD_LIBRARY_PATH"
)


def commands(cluster: str, nodes: Sequence[Node], mark: str) -> list[Command]:
    """Return what is asked of each node, in order; `mark` must be new."""
    asked = []
    for node in nodes:
        ask = partial(
            ask_diagnosis,
            node.docker,
            mark=mark,
            cluster=cluster,
            state_dir=node.state_dir or "",
            lines=_LINES,
        )
        questions = (
            ask(parts=(STATE, RECORD, KERNEL, INSPECT), size=_LOG),
            ask(parts=(LOGS,), size=_LOG),
            ask(parts=(ENGINES,), size=_JOB),
            ask(parts=(INSIDE,), size=_JOB),
            audit.read(node.state_dir or "", cluster, _AUDIT),
        )
        asked += [Command(node=node.name, argv=argv, timeout=_TIMEOUT) for argv in questions]
    return asked


def files(answers: Sequence[Answer], mark: str) -> dict[str, str]:
    """Return the files of one node from its answers, in the order asked; what could not be had is
    in `not-seen.txt`.
    """
    *asked, trail = answers
    told = [read(answer.out, mark) for answer in asked]
    first = told[0]
    found = {
        "state.json": _json([asdict(each) for each in first.states]),
        "containers.json": _json(_inspected(first.inspect)),
        "servers.json": _json(_servers(first)),
        "audit.ndjson": trail.out if trail.ok else "",
        **_logs([log for each in told for log in each.logs]),
        "not-seen.txt": "\n".join(_not_seen(first, answers)),
    }
    return {name: text for name, text in found.items() if text.strip()}


def _json(said: Any) -> str:
    return json.dumps(said, indent=1) if said else ""


def _servers(told: Told) -> Any:
    kept = {name: each for name, each in told.kept.items() if each}
    return {"servers": kept} if kept else None


def _not_seen(told: Told, answers: Sequence[Answer]) -> list[str]:
    """Say what could not be had, each thing once."""
    gaps = [f"{what}: {why}" for what, why in told.gaps.items()]
    gaps += [untrusted.shown(answer.tail, last=True) for answer in answers if not answer.ok]
    return list(dict.fromkeys(gaps))


def _logs(logs: Sequence[Log]) -> dict[str, str]:
    """Return logs under their files' names: an engine's under its own, the others numbered by their
    kind.
    """
    found, count = {}, Counter[str]()
    for log in logs:
        kind = _NAMES.get(log.part.partition("-")[0], "other")
        count[kind] += 1
        engine = log.part.startswith("engine-")
        name = log.what.replace(" ", "-") if engine else f"{kind}-{count[kind]}"
        found[f"{name}.log"] = _written(log)
    return found


def folder(number: int, node: Node) -> str:
    """Return the folder of a node in the bundle."""
    return f"nodes/{number:02d}-{re.sub(r'[^A-Za-z0-9_-]', '_', node.name)[:40]}"


def _written(log: Log) -> str:
    lines = (
        f"{log.stamps[at]} {line}" if at in log.stamps else line
        for at, line in enumerate(log.lines)
    )
    return "\n".join(lines) + "\n"


def _inspected(text: str) -> Any:
    """Return what Docker knows of containers, without the values of variables that tell nothing, or
    too much.
    """
    try:
        found: Any = untrusted.loads(text) if text.strip() else []
    except ValueError:
        return None
    for each in found if isinstance(found, list) else ():
        config = each.get("Config") if isinstance(each, dict) else None
        if isinstance(config, dict):
            env = config.get("Env")
            config["Env"] = [_variable(str(pair)) for pair in env] if isinstance(env, list) else []
    return found


def _variable(pair: str) -> str:
    name, _, value = pair.partition("=")
    return (
        f"{name}={value if _TELLING.fullmatch(name) and not DOUBTFUL_NAME.search(name) else MASK}"
    )
