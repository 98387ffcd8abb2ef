"""Judges of a server to be (cluster whole, model on every node, GPUs and port free), and of one that was stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.checks.shape import Finding
from launcher.model import Inventory, Node
from launcher.tools import ray
from launcher.tools.host import HostFacts
from launcher.tools.model import ModelSeen

OVER = ("SUCCEEDED", "FAILED", "STOPPED", "ABSENT")


def cluster(
    inventory: Inventory, facts: Mapping[str, HostFacts], said: Mapping[str, Any], names: Mapping[str, str]
) -> list[Finding]:
    """Judge that every node's Ray container runs and that every node is in Ray.

    Args:
        inventory: the nodes.
        facts: what each node was.
        said: what the head container said about Ray, or its `error`.
        names: the name of each node's Ray container.
    """
    findings = []
    for node in inventory.nodes:
        container = facts[node.name].container(names[node.name])
        if container is None:
            findings.append(_fail(node, "has no Ray container", fix="run `vlaunch up` first"))
        elif not container.running:
            findings.append(
                _fail(node, f"its Ray container is {container.status}", fix="run `vlaunch up`, which starts it again")
            )
    if findings:
        return findings
    if "nodes" not in said:
        return [_fail(inventory.head, f"Ray does not answer: {said.get('error', 'no reason given')}", fix="run `vlaunch up`")]
    alive = {each.ip for each in ray.parse_nodes(said["nodes"]) if each.alive}
    return [
        Finding(node=node.name, status="pass", text="")
        if node.ip in alive
        else _fail(node, "is not in Ray", fix="run `vlaunch up`, then look at `vlaunch status`")
        for node in inventory.nodes
    ]  # fmt: skip


def model(nodes: Sequence[Node], name: str, seen: Mapping[str, ModelSeen], offline: Mapping[str, bool]) -> list[Finding]:
    """Judge that the model is the same on every node that will load it; `offline` nodes may not download it."""
    findings = []
    digests = {seen[node.name].digest for node in nodes if node.name in seen} - {""}
    for node in nodes:
        found = seen.get(node.name)
        if found is None or found.where == "unknown":
            findings.append(Finding(node=node.name, status="skip", text="could not be asked whether it has the model"))
        elif found.where == "missing":
            findings.append(
                _fail(
                    node, f"has no {name} in its container",
                    fix=f"copy the model to {name} on every node; it must lie below `hf_home:` or one of `mounts:`",
                )
            )  # fmt: skip
        elif found.where == "not cached" and offline.get(node.name):
            findings.append(
                _fail(
                    node, f"does not have {name} in its cache, and HF_HUB_OFFLINE forbids to download it",
                    fix="copy it to `hf_home:` on every node, or take HF_HUB_OFFLINE out of `env:`",
                )
            )  # fmt: skip
        elif found.where == "not cached":
            findings.append(Finding(node=node.name, status="pass", text="will download the model"))
        elif len(digests) > 1:
            findings.append(
                _fail(
                    node, f"{name} is not the same model on all nodes",
                    evidence=f"its config.json has sha256 {found.digest[:16] or '(none)'}…",
                    fix="copy the model again to every node",
                )
            )  # fmt: skip
        else:
            findings.append(Finding(node=node.name, status="pass", text="has the model"))
    return findings


def free_gpus(inventory: Inventory, tp: int, pp: int, said: Mapping[str, Any]) -> list[Finding]:
    """Judge that Ray has as many free GPUs as there will be ranks; vLLM would wait half an hour for them."""
    busy = busy_gpus(said)
    free = inventory.gpus - busy
    if free >= tp * pp:
        return [Finding(node="", status="pass", text=f"{free:g} of {inventory.gpus} GPUs are free in Ray")]
    return [
        Finding(
            node="", status="fail",
            text=f"{free:g} of {inventory.gpus} GPUs are free in Ray, TP {tp} × PP {pp} needs {tp * pp}",
            fix="see who holds them: `vlaunch exec --head -- ray list placement-groups`",
        )
    ]  # fmt: skip


def busy_gpus(said: Mapping[str, Any]) -> float:
    """Count the GPUs that living placement groups reserve, and those of actors outside of any."""
    groups = [row for row in _rows(said.get("groups")) if row.get("state") not in ("REMOVED", "PENDING", "INFEASIBLE")]
    reserved = sum(
        float((bundle.get("unit_resources") or {}).get("GPU", 0)) for row in groups for bundle in row.get("bundles") or ()
    )
    alone = [row for row in _rows(said.get("actors")) if row.get("state") == "ALIVE" and not row.get("placement_group_id")]
    return reserved + sum(float((row.get("required_resources") or {}).get("GPU", 0)) for row in alone)


def port(node: Node, number: int, use: str, facts: HostFacts) -> Finding:
    """Judge that nobody listens on a port of a node."""
    if facts.listening is None:
        return Finding(node=node.name, status="skip", text="neither `ss` nor `netstat` is installed; ports were not looked at")
    if all(each != number for _, each in facts.listening):
        return Finding(node=node.name, status="pass", text="")
    return _fail(
        node, f"port {number} ({use}) is taken",
        fix=f"see who has it with `sudo ss -ltnp 'sport = :{number}'` on {node.name}, or choose another with `--port`",
    )  # fmt: skip


def stopped(inventory: Inventory, jobs: Sequence[str], said: Mapping[str, Any]) -> list[Finding]:
    """Judge that jobs are over, that no rank is left, that Ray's GPUs are free again and the API port closed."""
    if "error" in said and "jobs" not in said:
        text, fix = f"cannot be asked any more: {said['error']}", "look at `vlaunch status`"
        return [Finding(node=inventory.head.name, status="fail", text=text, fix=fix)]
    states = {job["submission_id"]: job["status"] for job in said["jobs"]}
    left = [f"job {name} is {states[name]}" for name in jobs if states.get(name, "ABSENT") not in OVER]
    # Ranks and GPUs of other work, a batch job say, are not ours to wait for.
    if all(state in OVER for name, state in states.items() if name not in jobs):
        ranks = ray.parse_ranks(said["actors"], ray.parse_nodes(said["nodes"]))
        left += [f"{ip} still holds {', '.join(names)}" for ip, names in ranks.items()]
        if busy := busy_gpus(said):
            left.append(f"{busy:g} GPUs are still reserved in Ray")
    if said.get("listening"):
        left.append("the API port is still open")
    if left:
        fix = "run `vlaunch stop` again; `vlaunch down` ends everything"
        return [Finding(node="", status="wait", text="; ".join(left), fix=fix)]
    return [Finding(node="", status="pass", text="the server is gone, its GPUs are free in Ray and its port is closed")]


def _rows(answer: Any) -> list[dict[str, Any]]:
    try:
        rows = answer["data"]["result"]["result"]
    except (KeyError, TypeError):
        return []
    return [row for row in rows if isinstance(row, dict)]


def _fail(node: Node, text: str, *, evidence: str = "", fix: str = "") -> Finding:
    return Finding(node=node.name, status="fail", text=text, evidence=evidence, fix=fix)
