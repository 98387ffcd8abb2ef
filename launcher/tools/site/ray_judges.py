"""Checks of Ray: the head listens, and exactly the declared nodes have joined, with their GPUs and
addresses; and the schema of replies from the head's agent and `batch/desk.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.core import decode, untrusted
from launcher.core.check import Finding, failed, passed, skipped, waiting, worst_status
from launcher.core.decode import Integer
from launcher.core.domain import Answer, Inventory, Node
from launcher.core.errors import UnreadableAnswer
from launcher.core.sizes import format_count
from launcher.failures.explain import explain
from launcher.tools import docker, ray
from launcher.tools.docker import docker_output

Answers = Mapping[str, Sequence[Answer]]


def judge_head(inventory: Inventory) -> Callable[[Answers], Sequence[Finding]]:
    """Return a check of the head's container and of its port: Ray's, or without Ray the agent's."""
    component = "the agent" if inventory.ray.off else "Ray"
    ports = inventory.ports
    address = f"{inventory.head.ip}:{ports.group if inventory.ray.off else ports.gcs}"

    def judge(answers: Answers) -> Sequence[Finding]:
        state, port = answers[inventory.head.name]
        died = judge_container(inventory.head, state)
        if died is not None:
            return [died]
        if port.ok:
            return [passed(inventory.head, f"{component} listens on {address}")]
        return [waiting(inventory.head, f"{component} does not listen on {address} yet")]

    return judge


def judge_cluster(
    inventory: Inventory, initial_restarts: Mapping[str, int]
) -> Callable[[Answers], Sequence[Finding]]:
    """Return a check of Ray's node table against the inventory.

    Each node's first answer is its container's state; the head's second one is the table.
    `initial_restarts`, by node, are ignored: their cause may be fixed.
    """

    def judge(answers: Answers) -> Sequence[Finding]:
        payload, table = _parse_table(answers[inventory.head.name])
        alive = {row.ip: row for row in table or () if row.alive}
        troubles = [
            trouble
            for node in inventory.nodes
            # Without a table the joined nodes are unknown, and restarts alone are no failure.
            if (
                trouble := judge_container(
                    node,
                    answers[node.name][0],
                    joined=table is None or node.ip in alive,
                    initial_restarts=initial_restarts.get(node.name, 0),
                )
            )
        ]
        if troubles:
            return troubles
        if table is None:
            text, reason = "Ray's dashboard does not answer yet", str(payload.get("error", ""))
            return [waiting(inventory.head, text, evidence=reason)]
        dead = {row.ip: row for row in table if not row.alive}
        findings = [
            _judge_member(inventory, node, alive.get(node.ip), dead.get(node.ip), payload)
            for node in inventory.nodes
        ]
        others = sorted(set(alive) - {node.ip for node in inventory.nodes})
        if others:
            fix = (
                "add them to the inventory, or run `vlaunch down` with the inventory that has them"
            )
            text = f"Ray has nodes that are not in the inventory: {', '.join(others)}"
            findings.append(failed("", text, fix=fix))
        # Last, because `ray status` cannot be right before everything else is.
        if worst_status(findings) == "pass":
            findings.append(_judge_status(inventory, payload.get("status", "")))
        return findings

    return judge


def _parse_table(
    answers: Sequence[Answer],
) -> tuple[dict[str, Any], tuple[ray.RayNode, ...] | None]:
    """Parse the head's second answer into its payload and the node table, `None` if missing."""
    try:
        payload = parse_payload(answers[1])
        return payload, ray.parse_nodes(payload.get("nodes"))
    except UnreadableAnswer as error:
        return {"error": str(error)}, None


def _judge_status(inventory: Inventory, text: str) -> Finding:
    """Compare `ray status`, which Ray updates about every second, with the inventory."""
    head, nodes = inventory.head, len(inventory.nodes)
    try:
        status = ray.parse_status(text) if isinstance(text, str) and text else None
    except UnreadableAnswer as error:
        return waiting(head, error.message, evidence=error.evidence)
    if status is None:
        return skipped(head, "`ray status` was not compared: not available in this Ray's dashboard")
    total = status.gpus_total or 0.0
    if status.active == nodes and total == inventory.gpus:
        return passed(
            head,
            f"`ray status`: {format_count(nodes, 'node')}, {status.gpus_used or 0.0}/{total} GPU",
        )
    message = (
        f"`ray status` shows {format_count(status.active, 'node')} and"
        f" {format_count(total, 'GPU')}, not {nodes} and {inventory.gpus}"
    )
    return waiting(head, message, evidence=text)


def _judge_member(
    inventory: Inventory,
    node: Node,
    alive: ray.RayNode | None,
    dead: ray.RayNode | None,
    payload: Mapping[str, Any],
) -> Finding:
    """Check that a node is in Ray with its GPUs, and that the head can connect to it."""
    head, ports = inventory.head, inventory.ports
    if alive is None:
        fix = f"read its log: `vlaunch logs {node.name}`"
        if not node.head:
            fix = f"allow TCP from {node.ip} to {head.ip}:{ports.gcs} and back, then {fix}"
        reason = f": {dead.message}" if dead is not None else ""
        return waiting(node, f"has not joined Ray under {node.ip}{reason}", fix=fix)
    if alive.gpus != node.gpus:
        return failed(
            node,
            f"has {format_count(alive.gpus, 'GPU')} in Ray, but {node.gpus} in the inventory",
            fix=f"correct `gpus:` of {node.name} in the inventory, then run `vlaunch up` again",
        )
    manager = f"{node.ip}:{ports.node_manager}"
    if manager in payload.get("unreachable", ()):
        fix = (
            f"allow TCP from {head.ip} to {node.ip} (all ports: Ray, NCCL and Gloo pick high ones)"
        )
        return waiting(node, f"joined, but the head cannot connect to {manager}", fix=fix)
    return passed(node, f"in Ray under its address with {format_count(alive.gpus, 'GPU')}")


def judge_container(
    node: Node, answer: Answer, *, joined: bool = False, initial_restarts: int = 0
) -> Finding | None:
    """Check `docker inspect` of a container: missing, exited, or in a restart loop is a failure.

    Restarts are ignored once the node has joined, as are the first `initial_restarts`.
    """
    if answer.code == 255 or answer.timed_out:
        return failed(
            node,
            "no longer responds",
            evidence=answer.tail,
            fix="run `vlaunch up` when it is back",
        )
    container = _parse_container(answer)
    if container is None:
        return _container_gone(node.name, answer)
    restarts = container.restarts - initial_restarts
    if container.running and (joined or restarts < 3):
        return None
    # Workers restart whenever the head does, possibly for months.
    if container.status == "restarting" and (joined or restarts < 2):
        return waiting(node, "its container is restarting")
    return failed(
        node,
        f"its container exited with code {container.exit_code}"
        f" ({format_count(container.restarts, 'restart')})",
        evidence=container.error,
        fix=f"read its log: `vlaunch logs {node.name}`",
    )


def _parse_container(answer: Answer) -> docker.Container | None:
    """Parse `docker inspect` of a container; `None` if it is missing or unreadable."""
    try:
        containers = docker_output.parse_containers(answer.out) if answer.ok else ()
    except UnreadableAnswer:
        return None
    return containers[0] if containers else None


def explain_logs(findings: Sequence[Finding], logs: Mapping[str, Answer]) -> Sequence[Finding]:
    """Add evidence from the containers' logs to failures, and the cause of known lines."""
    explained = []
    for finding in findings:
        answer = logs.get(finding.node)
        if answer is None or finding.status not in ("fail", "wait"):
            explained.append(finding)
            continue
        if not answer.ok and "No such container" in answer.out + answer.err:
            # The container was removed after the check saw it exit.
            explained.append(_container_gone(finding.node, answer))
            continue
        failure = explain(answer.out + answer.err)
        tail = "\n".join((answer.out + answer.err).strip().splitlines()[-5:])
        explained.append(
            failed(
                finding.node,
                finding.text + (f": {failure.cause}" if failure else ""),
                evidence=failure.line if failure else (tail or finding.evidence),
                fix=failure.fix if failure else finding.fix,
            )
        )
    return explained


def _container_gone(node: str, answer: Answer) -> Finding:
    return failed(node, "its container is gone", evidence=answer.tail, fix="run `vlaunch up` again")


def parse_payload(answer: Answer) -> dict[str, Any]:
    """Parse the JSON object in an agent's reply; raises UnreadableAnswer, also for its `error`."""
    try:
        payload = untrusted.loads(answer.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        payload = None
    if not isinstance(payload, dict) and answer.out.startswith(("404: ", "405: ")):  # aiohttp's
        raise UnreadableAnswer(
            f"{answer.node}: its agent runs another version of vlaunch",
            evidence=answer.tail,
            hint="run `vlaunch down`, then `vlaunch up`: this stops all servers",
        )
    if not isinstance(payload, dict):
        raise UnreadableAnswer(
            f"{answer.node}: the head container did not respond", evidence=answer.tail
        )
    check_fields(payload, f"{answer.node}: the head container's answer")
    if "error" in payload and not answer.ok:
        raise UnreadableAnswer(f"{answer.node}: {payload['error']}", evidence=str(payload["error"]))
    return payload


def try_payload(answer: Answer) -> dict[str, Any]:
    """Parse an agent's reply; an unreadable one becomes an `error`."""
    try:
        return parse_payload(answer)
    except UnreadableAnswer as error:
        return {"error": error.message}


@dataclass(frozen=True, kw_only=True)
class _Job:
    submission_id: str | None = None
    job_id: str | None = None
    status: str | None = None
    message: str | None = None
    metadata: Mapping[str, str] | None = None
    driver_exit_code: Integer | None = None


@dataclass(frozen=True, kw_only=True)
class _ListedJob(_Job):
    submission_id: str = field()  # drops the inherited default
    status: str = field()


@dataclass(frozen=True, kw_only=True)
class _Counters:
    status: Integer
    text: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class _AgentReply:
    error: str = ""
    status: Integer | str | None = None
    unreachable: tuple[str, ...] = ()
    listening: bool = False
    log: str = ""
    offset: Integer = 0
    submission_id: str = ""
    killed: Integer = 0
    left: tuple[Integer, ...] = ()
    job: _Job = _Job()
    jobs: tuple[_ListedJob, ...] = ()
    nodes: tuple[Mapping[str, Any], ...] = ()
    actors: tuple[Mapping[str, Any], ...] = ()
    groups: tuple[Mapping[str, Any], ...] = ()
    apis: Mapping[str, _Counters] = field(default_factory=dict)


def check_fields(payload: Mapping[str, Any], description: str) -> None:
    """Raise UnreadableAnswer for an invalid field.

    `tools/ray.py` and `tools/site/serving_judges.py` parse the rows of Ray's tables, and
    `tools/site/servers.py` the supervisor's records.
    """
    decode.validate(_AgentReply, payload, description)
