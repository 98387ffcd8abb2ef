"""Judges of Ray: the head listens, and exactly the declared nodes are in, each with its GPUs, under
its own address; and the form of what the head's agent and `batch/desk.py` answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.core import decode, untrusted
from launcher.core.check import Finding, failed, passed, skipped, waiting, worst
from launcher.core.decode import Whole
from launcher.core.domain import Answer, Inventory, Node
from launcher.core.errors import UnreadableAnswer
from launcher.tools import docker, docker_read, ray, symptoms

Answers = Mapping[str, Sequence[Answer]]


def judge_head(inventory: Inventory) -> Callable[[Answers], Sequence[Finding]]:
    """Return the judge of the head container's state and of its answer to a connection: to Ray's
    port, or else the agent's.
    """
    who = "the agent" if inventory.ray.off else "Ray"
    ports = inventory.ports
    where = f"{inventory.head.ip}:{ports.group if inventory.ray.off else ports.gcs}"

    def judge(answers: Answers) -> Sequence[Finding]:
        state, port = answers[inventory.head.name]
        died = container_trouble(inventory.head, state)
        if died is not None:
            return [died]
        if port.ok:
            return [passed(inventory.head, f"{who} listens on {where}")]
        return [waiting(inventory.head, f"{who} does not listen on {where} yet")]

    return judge


def judge_cluster(
    inventory: Inventory, before: Mapping[str, int]
) -> Callable[[Answers], Sequence[Finding]]:
    """Return the judge of Ray's node table against the inventory.

    Each node is asked for its container's state; the head, in a second answer, for the table.
    `before` says by node how often containers had restarted when they were looked at first: what
    kept them from joining then may have been put right.
    """

    def judge(answers: Answers) -> Sequence[Finding]:
        said, table = _table(answers[inventory.head.name])
        alive = {each.ip: each for each in table or () if each.alive}
        troubles = [
            trouble
            for node in inventory.nodes
            # Without a table nobody knows who has joined, and a restart count alone is no reason to
            # give up.
            if (
                trouble := container_trouble(
                    node,
                    answers[node.name][0],
                    joined=table is None or node.ip in alive,
                    before=before.get(node.name, 0),
                )
            )
        ]
        if troubles:
            return troubles
        if table is None:
            text, why = "Ray's dashboard does not answer yet", str(said.get("error", ""))
            return [waiting(inventory.head, text, evidence=why)]
        dead = {each.ip: each for each in table if not each.alive}
        findings = [
            _member(inventory, node, alive.get(node.ip), dead.get(node.ip), said)
            for node in inventory.nodes
        ]
        others = sorted(set(alive) - {node.ip for node in inventory.nodes})
        if others:
            fix = (
                "add them to the inventory, or run `vlaunch down` with the inventory that has them"
            )
            text = f"Ray has nodes that are not in the inventory: {', '.join(others)}"
            findings.append(failed("", text, fix=fix))
        # Its own word comes last: nothing is said of a status that cannot be right yet.
        if worst(findings) == "pass":
            findings.append(_status(inventory, said.get("status", "")))
        return findings

    return judge


def _table(answers: Sequence[Answer]) -> tuple[dict[str, Any], tuple[ray.RayNode, ...] | None]:
    """Read the head's second answer: all of it, and the node table, `None` while there is none."""
    try:
        said = read_payload(answers[1])
        return said, ray.parse_nodes(said.get("nodes"))
    except UnreadableAnswer as error:
        return {"error": str(error)}, None


def _status(inventory: Inventory, text: str) -> Finding:
    """Judge `ray status`, which people will read, against the inventory.

    Ray renews it every second or so.
    """
    head, nodes = inventory.head, len(inventory.nodes)
    try:
        said = ray.parse_status(text) if isinstance(text, str) and text else None
    except UnreadableAnswer as error:
        return waiting(head, error.message, evidence=error.evidence)
    if said is None:
        return skipped(head, "`ray status` was not compared: this Ray's dashboard does not give it")
    total = said.gpus_total or 0.0
    if said.active == nodes and total == inventory.gpus:
        return passed(
            head, f"`ray status`: {said.active} nodes, {said.gpus_used or 0.0}/{total} GPU"
        )
    text_ = (
        f"`ray status` shows {said.active} nodes and {total:g} GPUs, not {nodes} and"
        f" {inventory.gpus}"
    )
    return waiting(head, text_, evidence=text)


def _member(
    inventory: Inventory,
    node: Node,
    alive: ray.RayNode | None,
    dead: ray.RayNode | None,
    said: Mapping[str, Any],
) -> Finding:
    """Judge that a node is in Ray with its GPUs, and that the head can open connections to it."""
    head, ports = inventory.head, inventory.ports
    if alive is None:
        fix = f"look at its log: `vlaunch logs {node.name}`"
        if not node.head:
            fix = f"allow TCP from {node.ip} to {head.ip}:{ports.gcs} and back, then {fix}"
        why = f": {dead.message}" if dead is not None else ""
        return waiting(node, f"has not joined Ray under {node.ip}{why}", fix=fix)
    if alive.gpus != node.gpus:
        return failed(
            node,
            f"brought {alive.gpus:g} GPUs to Ray, {node.gpus} declared",
            fix=f"correct `gpus:` of {node.name} in the inventory, then run `vlaunch up` again",
        )
    manager = f"{node.ip}:{ports.node_manager}"
    if manager in said.get("unreachable", ()):
        fix = (
            f"allow TCP from {head.ip} to {node.ip} (all ports: Ray, NCCL and Gloo pick high ones)"
        )
        return waiting(node, f"joined, but the head cannot open {manager} back to it", fix=fix)
    return passed(node, f"in Ray under its address with {alive.gpus:g} GPUs")


def container_trouble(
    node: Node, answer: Answer, *, joined: bool = False, before: int = 0
) -> Finding | None:
    """Judge `docker inspect` of a container that should run: gone, ended or in a restart loop is a
    failure.

    A container that has restarted is well when its node has joined: that is what restarting is for.
    The first `before` restarts do not count.
    """
    if answer.code == 255 or answer.timed_out:
        return failed(
            node,
            "does not answer any more",
            evidence=answer.tail,
            fix="run `vlaunch up` when it is back",
        )
    container = _inspected(answer)
    if container is None:
        return _gone(node.name, answer)
    restarts = container.restarts - before
    if container.running and (joined or restarts < 3):
        return None
    # A worker loses its head when that restarts, and does so itself until it finds it: it may have
    # done so for months.
    if container.status == "restarting" and (joined or restarts < 2):
        return waiting(node, "its container restarts")
    return failed(
        node,
        f"its container ended with exit code {container.exit_code} ({container.restarts} restarts)",
        evidence=container.error,
        fix=f"look at its log: `vlaunch logs {node.name}`",
    )


def _inspected(answer: Answer) -> docker.Container | None:
    """Read `docker inspect` of one container; `None` where there is none, or what came cannot be
    read.
    """
    try:
        found = docker_read.parse_containers(answer.out) if answer.ok else ()
    except UnreadableAnswer:
        return None
    return found[0] if found else None


def explain_logs(findings: Sequence[Finding], logs: Mapping[str, Answer]) -> Sequence[Finding]:
    """Add to failures what the containers' logs say, with the cause where a line is known."""
    explained = []
    for each in findings:
        answer = logs.get(each.node)
        if answer is None or each.status not in ("fail", "wait"):
            explained.append(each)
            continue
        if not answer.ok and "No such container" in answer.out + answer.err:
            # Somebody removed it between the question and this one: that it had ended was only a
            # step on the way.
            explained.append(_gone(each.node, answer))
            continue
        known = symptoms.first(answer.out + answer.err)
        tail = "\n".join((answer.out + answer.err).strip().splitlines()[-5:])
        explained.append(
            failed(
                each.node,
                each.text + (f": {known.cause}" if known else ""),
                evidence=known.line if known else (tail or each.evidence),
                fix=known.fix if known else each.fix,
            )
        )
    return explained


def _gone(node: str, answer: Answer) -> Finding:
    return failed(node, "its container is gone", evidence=answer.tail, fix="run `vlaunch up` again")


def read_payload(answer: Answer) -> dict[str, Any]:
    """Read the one JSON object that an agent answers; raises UnreadableAnswer (also for its own
    `error`).
    """
    try:
        payload = untrusted.loads(answer.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        payload = None
    if not isinstance(payload, dict) and answer.out.startswith(("404: ", "405: ")):  # aiohttp's
        raise UnreadableAnswer(
            f"{answer.node}: its agent is of another version of vlaunch",
            evidence=answer.tail,
            hint="when its servers may stop, run `vlaunch down` and `vlaunch up`",
        )
    if not isinstance(payload, dict):
        raise UnreadableAnswer(
            f"{answer.node}: the head container gave no answer", evidence=answer.tail
        )
    check_fields(payload, f"{answer.node}: the head container's answer")
    if "error" in payload and not answer.ok:
        raise UnreadableAnswer(f"{answer.node}: {payload['error']}", evidence=str(payload["error"]))
    return payload


def try_payload(answer: Answer) -> dict[str, Any]:
    """Read the same; what cannot be read is an `error` like any other."""
    try:
        return read_payload(answer)
    except UnreadableAnswer as error:
        return {"error": error.message}


@dataclass(frozen=True, kw_only=True)
class _Job:
    submission_id: str | None = None
    job_id: str | None = None
    status: str | None = None
    message: str | None = None
    metadata: Mapping[str, str] | None = None
    driver_exit_code: Whole | None = None


@dataclass(frozen=True, kw_only=True)
class _ListedJob(_Job):
    submission_id: str = field()  # else it would have the default of the class before it
    status: str = field()


@dataclass(frozen=True, kw_only=True)
class _Counters:
    status: Whole
    text: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class _Said:
    error: str = ""
    status: Whole | str | None = None
    unreachable: tuple[str, ...] = ()
    listening: bool = False
    log: str = ""
    offset: Whole = 0
    submission_id: str = ""
    killed: Whole = 0
    left: tuple[Whole, ...] = ()
    job: _Job = _Job()
    jobs: tuple[_ListedJob, ...] = ()
    nodes: tuple[Mapping[str, Any], ...] = ()
    actors: tuple[Mapping[str, Any], ...] = ()
    groups: tuple[Mapping[str, Any], ...] = ()
    apis: Mapping[str, _Counters] = field(default_factory=dict)


def check_fields(said: Mapping[str, Any], whose: str) -> None:
    """Raise UnreadableAnswer for a field that is not what it should be.

    The rows of Ray's own tables are read by `tools/ray.py` and `tools/serving_judges.py`, and what
    the supervisor wrote by `tools/servers.py`.
    """
    decode.fit(_Said, said, whose)
