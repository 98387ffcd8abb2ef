"""Judges of a server or a batch job to be (cluster whole, model on every node, room for it), and of one that was stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.checks.shape import Finding
from launcher.model import Inventory, Node
from launcher.tools import desk, ray
from launcher.tools.host import HostFacts
from launcher.tools.model import ModelSeen

OVER = ("SUCCEEDED", "FAILED", "STOPPED", "ABSENT")
_SPARE = 64 * 2**20  # bytes that stay free beside a batch job's files


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Something that runs and may hold accelerators, of which Ray knows or not; `end` is the command that ends it."""

    what: str
    gpus: float
    end: str
    in_ray: bool = True


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
        why = str(said.get("error", "no reason given"))
        fix = "it may be busy: run the same command again" if "timed out" in why else "run `vlaunch up`"
        return [_fail(inventory.head, f"Ray does not answer: {why}", fix=fix)]
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


def free_gpus(inventory: Inventory, needs: int, split: str, said: Mapping[str, Any], freed: float = 0.0) -> list[Finding]:
    """Judge that Ray has as many free GPUs as a split, told in words, needs; vLLM would wait half an hour for them.

    `freed` are those of servers that make room for it.
    """
    holders = batch_holders(said)
    # A batch job that has just begun holds nothing yet, but soon will.
    free = max(0.0, inventory.gpus - max(busy_gpus(said) - freed, sum(each.gpus for each in holders)))
    if free >= needs:
        return [Finding(node="", status="pass", text=f"{free:g} of {inventory.gpus} GPUs are free in Ray")]
    return [
        Finding(
            node="", status="fail",
            text=f"{free:g} of {inventory.gpus} GPUs are free in Ray, {split} needs {needs}{_held(holders)}",
            fix="\n".join(f"wait for it, or end it: `{each.end}`" for each in holders)
            or "see who holds them: `vlaunch exec --head -- ray list placement-groups`",
        )
    ]  # fmt: skip


def claimed(job: Mapping[str, Any]) -> float:
    """Return how many accelerators a batch's Ray job needs at least, as its metadata says."""
    try:
        return _positive(float((job.get("metadata") or {}).get(desk.GPUS, 0)))
    except ValueError:
        return 0.0


def batch_holders(said: Mapping[str, Any]) -> list[Holder]:
    """Return the batch jobs that run and need accelerators."""
    return [
        Holder(what=f"batch job `{name}`", gpus=claimed(job), end=f"vlaunch stop {name}")
        for job in said.get("jobs", ())
        if job["status"] not in OVER and (name := desk.named(job.get("metadata") or {})) and claimed(job)
    ]


def batch_room(
    inventory: Inventory, least: float, most: float, said: Mapping[str, Any], holders: Sequence[Holder], *, queue: bool
) -> list[Finding]:
    """Judge that a batch job can begin now; with `queue` it may wait for what others hold."""
    outside = [each for each in holders if not each.in_ray]
    if outside and inventory.accelerator != "cpu":
        text = f"{outside[0].what} runs outside of Ray, which would give its GPUs to the job"
        fix = f"end it: `{outside[0].end}`; a server beside batch jobs needs `--backend ray`"
        return [Finding(node="", status="fail", text=text, fix=fix)]
    # Who has just begun holds nothing yet, but soon will.
    free = max(0.0, inventory.gpus - max(busy_gpus(said), sum(each.gpus for each in holders)))
    unit = "slots" if inventory.accelerator == "cpu" else "GPUs"
    text = f"{free:g} of {inventory.gpus} {unit} are free in Ray"
    if free >= least:
        room = f"; of {most:g} that the job would use" if free < most else ""
        return [Finding(node="", status="pass", text=text + room)]
    text += f", the job needs {least:g}{_held(holders)}"
    if queue:
        return [Finding(node="", status="warn", text=f"{text}; it waits for them")]
    ends = ", ".join(f"`{each.end}`" for each in holders)
    who = f"end what holds them: {ends}" if ends else "see who holds them: `vlaunch exec --head -- ray list placement-groups`"
    return [Finding(node="", status="fail", text=text, fix=f"{who}\nor submit it, to wait for them: `--queue`")]


def batch_disk(node: Node, need: int, facts: HostFacts) -> list[Finding]:
    """Judge that the head has room for what is shipped, and for as much output again."""
    if facts.disk_free is None:
        return [Finding(node=node.name, status="skip", text=f"nobody could say how much room {node.hf_home} has")]
    wanted = 2 * need + _SPARE
    if facts.disk_free >= wanted:
        return [Finding(node=node.name, status="pass", text=f"{_size(facts.disk_free)} free under {node.hf_home}")]
    return [
        _fail(
            node, f"{_size(facts.disk_free)} free under {node.hf_home}, the job's files need about {_size(wanted)}",
            fix="free some space there, remove jobs that are done (`vlaunch jobs --remove NAME`),\n"
            "or read from and write to a path of the nodes (`nodes:/…`) or an object store",
        )
    ]  # fmt: skip


def batch_stopped(jobs: Sequence[str], said: Mapping[str, Any], alive: Sequence[str]) -> list[Finding]:
    """Judge that batch jobs are over, their drivers gone, and nothing of theirs left in Ray.

    Args:
        jobs: their Ray jobs.
        said: what the head said about Ray, or its `error`.
        alive: the names of those whose driver still holds its lock.
    """
    if "jobs" not in said:
        text, fix = f"Ray cannot be asked any more: {said.get('error', 'no answer')}", "look at `vlaunch status`"
        return [Finding(node="", status="fail", text=text, fix=fix)]
    states = {job["submission_id"]: job["status"] for job in said["jobs"]}
    left = [f"job {name} is {states[name]}" for name in jobs if states.get(name, "ABSENT") not in OVER]
    left += [f"the driver of `{name}` still lives" for name in alive]
    # Ray's own numbers of the jobs: what others hold is not ours to wait for.
    own = [job["job_id"] for job in said["jobs"] if job["submission_id"] in jobs and job.get("job_id")]
    groups = [row for row in _rows(said.get("groups")) if row.get("creator_job_id") in own and row.get("state") != "REMOVED"]
    actors = [row for row in _rows(said.get("actors")) if row.get("job_id") in own and row.get("state") == "ALIVE"]
    left += [f"{len(found)} {what} still there" for found, what in ((actors, "actors"), (groups, "placement groups")) if found]
    if left:
        fix = "run the same command again; `vlaunch down` ends everything"
        return [Finding(node="", status="wait", text="; ".join(left), fix=fix)]
    return [Finding(node="", status="pass", text="the job is gone; what was done stays")]


def busy_gpus(said: Mapping[str, Any]) -> float:
    """Count the GPUs that living placement groups reserve, and those of actors outside of any."""
    groups = [row for row in _rows(said.get("groups")) if row.get("state") not in ("REMOVED", "PENDING", "INFEASIBLE")]
    bundles = [each for row in groups if isinstance(found := row.get("bundles"), list) for each in found]
    reserved = sum(_gpus(bundle.get("unit_resources")) for bundle in bundles if isinstance(bundle, dict))
    alone = [row for row in _rows(said.get("actors")) if row.get("state") == "ALIVE" and not row.get("placement_group_id")]
    return reserved + sum(_gpus(row.get("required_resources")) for row in alone)


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
    if "jobs" not in said:
        text, fix = f"cannot be asked any more: {said.get('error', 'no answer')}", "look at `vlaunch status`"
        return [Finding(node=inventory.head.name, status="fail", text=text, fix=fix)]
    states = {job["submission_id"]: job["status"] for job in said["jobs"]}
    left = [f"job {name} is {states[name]}" for name in jobs if states.get(name, "ABSENT") not in OVER]
    # Ranks and GPUs of other work, a batch job say, are not ours to wait for.
    if all(state in OVER for name, state in states.items() if name not in jobs):
        ranks = ray.parse_ranks(said.get("actors"), ray.parse_nodes(said.get("nodes")))
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
    except (KeyError, TypeError, IndexError):
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _gpus(resources: object) -> float:
    count = resources.get("GPU", 0) if isinstance(resources, dict) else 0
    return _positive(count) if isinstance(count, (int, float)) else 0.0


def _positive(count: float) -> float:
    return float(count) if 0 <= count < 1e9 else 0.0


def _held(holders: Sequence[Holder]) -> str:
    named = [f"{each.what} holds {each.gpus:g}" if each.gpus else each.what for each in holders]
    return f": {', '.join(named)}" if named else ""


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _fail(node: Node, text: str, *, evidence: str = "", fix: str = "") -> Finding:
    return Finding(node=node.name, status="fail", text=text, evidence=evidence, fix=fix)
