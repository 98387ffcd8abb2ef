"""Bundle of a bug report: the queries to each node, and the files from its answers.

Nodes do not choose file names.
"""

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
from launcher.core.secret_patterns import SUSPECT_NAME
from launcher.core.transport import Command
from launcher.tools.diagnosis import (
    ENGINES,
    INSIDE,
    INSPECT,
    KERNEL,
    LOGS,
    RECORD,
    STACKS,
    STATE,
    Log,
    NodeReport,
    parse_report,
    query_diagnosis,
)

_TIMEOUT = 240.0
_LINES = 50_000
# An answer is cut at 8 MiB: it must hold the logs of four containers, of five servers, or of three
# jobs with the rest of their part.
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
# Variables of the network, the GPUs and the engine; of all others only the names are included.
_PUBLIC_VARIABLE = re.compile(
    r"(?:NCCL|GLOO|TP|UCX|VLLM|RAY|CUDA|NVIDIA|OMP|HIP|ROCR|TORCH|PYTORCH)_\w+|HF_H\w+"
    r"|HF_TOKEN_PATH|PATH|LD_LIBRARY_PATH"
)


def bundle_commands(cluster: str, nodes: Sequence[Node], mark: str) -> list[Command]:
    """Return the commands for each node, in order; `mark` must be new."""
    commands = []
    for node in nodes:
        query = partial(
            query_diagnosis,
            node.docker,
            mark=mark,
            cluster=cluster,
            state_dir=node.state_dir or "",
            lines=_LINES,
        )
        queries = (
            query(parts=(STATE, RECORD, KERNEL, INSPECT, STACKS), size=_LOG),
            query(parts=(LOGS,), size=_LOG),
            query(parts=(ENGINES,), size=_JOB),
            query(parts=(INSIDE,), size=_JOB),
            audit.read_argv(node.state_dir or "", cluster, _AUDIT),
        )
        commands += [Command(node=node.name, argv=argv, timeout=_TIMEOUT) for argv in queries]
    return commands


def node_files(answers: Sequence[Answer], mark: str) -> dict[str, str]:
    """Return the files of one node from its answers in the order of `bundle_commands`; gaps are
    listed in `not-collected.txt`.
    """
    *report_answers, audit_answer = answers
    reports = [parse_report(answer.out, mark) for answer in report_answers]
    first = reports[0]
    contents = {
        "state.json": _format_json([asdict(state) for state in first.states]),
        "containers.json": _format_json(_redact_inspect(first.inspect)),
        "servers.json": _format_json(_server_records(first)),
        "audit.ndjson": audit_answer.out if audit_answer.ok else "",
        **_log_files([log for report in reports for log in report.logs]),
        "not-collected.txt": "\n".join(_gap_lines(first, answers)),
    }
    return {name: text for name, text in contents.items() if text.strip()}


def _format_json(value: Any) -> str:
    return json.dumps(value, indent=1) if value else ""


def _server_records(report: NodeReport) -> Any:
    records = {name: files for name, files in report.supervisor_files.items() if files}
    return {"servers": records} if records else None


def _gap_lines(report: NodeReport, answers: Sequence[Answer]) -> list[str]:
    """Describe each gap once."""
    gaps = [f"{what}: {why}" for what, why in report.gaps.items()]
    gaps += [untrusted.excerpt(answer.tail, last=True) for answer in answers if not answer.ok]
    return list(dict.fromkeys(gaps))


def _log_files(logs: Sequence[Log]) -> dict[str, str]:
    """Return logs by file name: a server's log or stacks, or the kind of log and a number."""
    contents, counts = {}, Counter[str]()
    for log in logs:
        kind = _NAMES.get(log.part.partition("-")[0], "other")
        counts[kind] += 1
        of_server = log.part.startswith(("engine-", "stacks-"))
        name = log.title.replace(" ", "-") if of_server else f"{kind}-{counts[kind]}"
        contents[f"{name}.log"] = _format_log(log)
    return contents


def node_folder(number: int, node: Node) -> str:
    """Return the folder of a node in the bundle."""
    return f"nodes/{number:02d}-{re.sub(r'[^A-Za-z0-9_-]', '_', node.name)[:40]}"


def _format_log(log: Log) -> str:
    lines = (
        f"{log.stamps[at]} {line}" if at in log.stamps else line
        for at, line in enumerate(log.lines)
    )
    return "\n".join(lines) + "\n"


def _redact_inspect(text: str) -> Any:
    """Return `docker inspect` without the values of irrelevant and secret variables."""
    try:
        containers: Any = untrusted.loads(text) if text.strip() else []
    except ValueError:
        return None
    for container in containers if isinstance(containers, list) else ():
        config = container.get("Config") if isinstance(container, dict) else None
        if isinstance(config, dict):
            env = config.get("Env")
            pairs = env if isinstance(env, list) else []
            config["Env"] = [_redact_variable(str(pair)) for pair in pairs]
    return containers


def _redact_variable(pair: str) -> str:
    name, _, value = pair.partition("=")
    public = _PUBLIC_VARIABLE.fullmatch(name) and not SUSPECT_NAME.search(name)
    return f"{name}={value if public else MASK}"
