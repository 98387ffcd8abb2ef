"""Judges of a server or a batch job to be (cluster whole, model on every node, room for it), and of
one that was stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.checks.shape import Finding, failed, passed, skipped
from launcher.model import Inventory, Node
from launcher.site import Site
from launcher.tools import job_store, ray
from launcher.tools.host import HostFacts
from launcher.tools.model import ModelSeen

OVER = ("SUCCEEDED", "FAILED", "STOPPED", "ABSENT")
_SPARE = 64 * 2**20  # bytes that stay free beside a batch job's files
_LIST_GROUPS = "vlaunch exec --head -- ray list placement-groups"
_HEARD = 60.0  # seconds for which the word of an agent counts
_LONG = 10 * 365 * 86400.0  # seconds; more is no age


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Something that runs and may hold accelerators; `end` is the command that ends it."""

    what: str
    gpus: float
    end: str


def cluster(site: Site, said: Mapping[str, Any]) -> list[Finding]:
    """Judge that every node's container runs and that every node is in Ray; `said` is what the head
    container said about Ray, or its `error`.
    """
    if findings := [each for node in site.nodes if (each := _container(site, node))]:
        return findings
    if "nodes" not in said:
        why = str(said.get("error", "no reason given"))
        fix = (
            "it may be busy: run the same command again"
            if "timed out" in why
            else "run `vlaunch up`"
        )
        return [failed(site.head, f"Ray does not answer: {why}", fix=fix)]
    alive = {each.ip for each in ray.parse_nodes(said["nodes"]) if each.alive}
    return [
        (
            passed(node)
            if node.ip in alive
            else failed(
                node, "is not in Ray", fix="run `vlaunch up`, then look at `vlaunch status`"
            )
        )
        for node in site.nodes
    ]


def agents(site: Site, nodes: Sequence[Node], heard: Mapping[str, float]) -> list[Finding]:
    """Judge that the agents in the nodes' containers are of this vlaunch and connected; `heard` is
    how many seconds ago.
    """
    return [_container(site, node) or _agent(site, node, heard.get(node.name)) for node in nodes]


def _container(site: Site, node: Node) -> Finding | None:
    """Return what is wrong with a node's container, if anything is."""
    container = site.container(node)
    if container is None:
        return failed(node, "has no container of this cluster", fix="run `vlaunch up` first")
    if not container.running:
        return failed(
            node,
            f"its container is {container.status}",
            fix="run `vlaunch up`, which starts it again",
        )
    return None


def _agent(site: Site, node: Node, heard: float | None) -> Finding:
    container = site.container(node)
    if container is not None and container.argv[1:2] != ("agent",):
        return failed(
            node,
            "its container was started by an older vlaunch",
            fix="run `vlaunch up`, which renews it",
        )
    if heard is not None and heard < _HEARD:
        return passed(node)
    when = (
        f"was last heard {heard:.0f}s ago"
        if heard is not None and heard < _LONG
        else "was never heard"
    )
    fix = (
        f"look at its log: `vlaunch logs {node.name}`; `vlaunch check` says whether the nodes reach"
        " each other"
    )
    return failed(node, f"its agent {when}, so that nothing can be started there", fix=fix)


def model(
    nodes: Sequence[Node], name: str, seen: Mapping[str, ModelSeen], offline: Mapping[str, bool]
) -> list[Finding]:
    """Judge that the model is the same on every node that will load it; `offline` nodes may not
    download it.
    """
    digests = {seen[node.name].digest for node in nodes if node.name in seen} - {""}
    return [
        _model_on(
            node,
            name,
            seen.get(node.name),
            offline=offline.get(node.name, False),
            alike=len(digests) <= 1,
        )
        for node in nodes
    ]


def _model_on(
    node: Node, name: str, found: ModelSeen | None, *, offline: bool, alike: bool
) -> Finding:
    if found is None or found.where == "unknown":
        return skipped(node, "could not be asked whether it has the model")
    if found.where == "missing":
        return failed(
            node,
            f"has no {name} in its container",
            fix=(
                f"copy the model to {name} on every node; it must lie below `hf_home:` or one of"
                " `mounts:`"
            ),
        )
    if found.where == "not cached" and offline:
        return failed(
            node,
            f"does not have {name} in its cache, and HF_HUB_OFFLINE forbids to download it",
            fix="copy it to `hf_home:` on every node, or take HF_HUB_OFFLINE out of `env:`",
        )
    if found.where == "not cached":
        return passed(node, "will download the model")
    if not alike:
        return failed(
            node,
            f"{name} is not the same model on all nodes",
            evidence=f"its config.json has sha256 {found.digest[:16] or '(none)'}…",
            fix="copy the model again to every node",
        )
    return passed(node, "has the model")


def free_gpus(
    inventory: Inventory,
    needs: int,
    split: str,
    said: Mapping[str, Any],
    holders: Sequence[Holder],
    freed: float = 0.0,
) -> list[Finding]:
    """Judge that Ray has as many free GPUs as a split, told in words, needs; vLLM would wait half
    an hour for them.

    `holders` are the others that hold some; `freed` are those of the server that makes room for it.
    """
    # What has just begun holds nothing yet, but soon will.
    free = max(
        0.0, inventory.gpus - max(busy_gpus(said) - freed, sum(each.gpus for each in holders))
    )
    if free >= needs:
        return [passed("", f"{free:g} of {inventory.gpus} GPUs are free in Ray")]
    text = (
        f"{free:g} of {inventory.gpus} GPUs are free in Ray, {split} needs {needs}{_held(holders)}"
    )
    return [failed("", text, fix=_ends(holders))]


def node_gpus(node: Node, needs: int, holders: Sequence[Holder], in_ray: float) -> Finding:
    """Judge that a node has as many free GPUs as a server takes there; `holders` hold so many of
    this node's.

    `in_ray` are those that Ray has given away there, which may be the same.
    """
    known = sum(each.gpus for each in holders)
    free = max(0.0, node.gpus - max(known, in_ray))
    if free >= needs:
        return passed(node)
    other = (
        [Holder(what="work in Ray", gpus=in_ray - known, end=_LIST_GROUPS)]
        if in_ray > known
        else []
    )
    text = (
        f"{free:g} of {node.gpus} GPUs are free, the server needs"
        f" {needs}{_held([*holders, *other])}"
    )
    return failed(
        node, text, fix=_ends([*holders, *other]) + "\nor let it take other nodes: `--nodes`"
    )


def claimed(job: Mapping[str, Any]) -> float:
    """Return how many accelerators a batch's Ray job needs at least, as its metadata says."""
    try:
        return _positive(float((job.get("metadata") or {}).get(job_store.GPUS, 0)))
    except ValueError:
        return 0.0


def batch_holders(said: Mapping[str, Any]) -> list[Holder]:
    """Return the batch jobs that run and need accelerators."""
    return [
        Holder(what=f"batch job `{name}`", gpus=claimed(job), end=f"vlaunch stop {name}")
        for job in said.get("jobs", ())
        if job["status"] not in OVER
        and (name := job_store.named(job.get("metadata") or {}))
        and claimed(job)
    ]


def batch_room(
    inventory: Inventory,
    least: float,
    most: float,
    said: Mapping[str, Any],
    holders: Sequence[Holder],
    *,
    queue: bool,
) -> list[Finding]:
    """Judge that a batch job can begin now; with `queue` it may wait for what others hold."""
    # Who has just begun holds nothing yet, but soon will.
    free = max(0.0, inventory.gpus - max(busy_gpus(said), sum(each.gpus for each in holders)))
    unit = "slots" if inventory.accelerator == "cpu" else "GPUs"
    text = f"{free:g} of {inventory.gpus} {unit} are free in Ray"
    if free >= least:
        room = f"; of {most:g} that the job would use" if free < most else ""
        return [passed("", text + room)]
    text += f", the job needs {least:g}{_held(holders)}"
    if queue:
        return [Finding(node="", status="warn", text=f"{text}; it waits for them")]
    ends = ", ".join(f"`{each.end}`" for each in holders)
    who = f"end what holds them: {ends}" if ends else f"see who holds them: `{_LIST_GROUPS}`"
    return [failed("", text, fix=f"{who}\nor submit it, to wait for them: `--queue`")]


def batch_disk(node: Node, need: int, facts: HostFacts) -> list[Finding]:
    """Judge that the head has room for what is shipped, and for as much output again."""
    if facts.disk_free is None:
        return [skipped(node, f"nobody could say how much room {node.hf_home} has")]
    wanted = 2 * need + _SPARE
    if facts.disk_free >= wanted:
        return [passed(node, f"{_size(facts.disk_free)} free under {node.hf_home}")]
    return [
        failed(
            node,
            f"{_size(facts.disk_free)} free under {node.hf_home}, the job's files need about"
            f" {_size(wanted)}",
            fix=(
                "free some space there, remove jobs that are done (`vlaunch jobs --remove NAME`),\n"
                "or read from and write to a path of the nodes (`nodes:/…`) or an object store"
            ),
        )
    ]


def batch_stopped(
    jobs: Sequence[str], said: Mapping[str, Any], alive: Sequence[str]
) -> list[Finding]:
    """Judge that batch jobs are over, their drivers gone, and nothing of theirs left in Ray.

    Args:
        jobs: their Ray jobs.
        said: what the head said about Ray, or its `error`.
        alive: the names of those whose driver still holds its lock.
    """
    if "jobs" not in said:
        text = f"Ray cannot be asked any more: {said.get('error', 'no answer')}"
        return [failed("", text, fix="look at `vlaunch status`")]
    states = {job["submission_id"]: job["status"] for job in said["jobs"]}
    left = [
        f"job {name} is {states[name]}" for name in jobs if states.get(name, "ABSENT") not in OVER
    ]
    left += [f"the driver of `{name}` still lives" for name in alive]
    left += _left_in_ray(_numbers(jobs, said), said)
    return [_gone(left, "the job is gone; what was done stays")]


def _numbers(jobs: Sequence[str], said: Mapping[str, Any]) -> list[str]:
    """Return Ray's own numbers of jobs, by which it says what belongs to them."""
    return [
        job["job_id"] for job in said["jobs"] if job["submission_id"] in jobs and job.get("job_id")
    ]


def _left_in_ray(own: Sequence[str], said: Mapping[str, Any]) -> list[str]:
    """Return in words what jobs, by Ray's numbers of them, still have there: what others hold is
    not ours to wait for.
    """
    groups = [
        row
        for row in _rows(said.get("groups"))
        if row.get("creator_job_id") in own and row.get("state") != "REMOVED"
    ]
    # Ray Data's own actors (statistics and others) are detached: the first job makes them, and all
    # that follow use them.
    actors = [
        row
        for row in _rows(said.get("actors"))
        if row.get("job_id") in own and row.get("state") == "ALIVE" and not row.get("is_detached")
    ]
    return [
        f"{len(found)} {what} still there"
        for found, what in ((actors, "actors"), (groups, "placement groups"))
        if found
    ]


def _gone(left: Sequence[str], text: str) -> Finding:
    """Judge that nothing is left of what was stopped; `text` says so."""
    if left:
        fix = "run the same command again; `vlaunch down` ends everything"
        return Finding(node="", status="wait", text="; ".join(left), fix=fix)
    return passed("", text)


def busy_gpus(said: Mapping[str, Any]) -> float:
    """Count the GPUs that living placement groups reserve, and those of actors outside of any."""
    return sum(count for _, count in _reserved(said))


def busy_by_node(said: Mapping[str, Any]) -> dict[str, float]:
    """Count them by the node's address."""
    where = {each.id: each.ip for each in ray.parse_nodes(said["nodes"])} if "nodes" in said else {}
    busy: dict[str, float] = {}
    for node, count in _reserved(said):
        ip = where.get(node, "")
        busy[ip] = busy.get(ip, 0.0) + count
    return busy


def _reserved(said: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return what Ray has given away: a node's id (empty where it is not said) and GPUs."""
    alone = [
        row
        for row in _rows(said.get("actors"))
        if row.get("state") == "ALIVE" and not row.get("placement_group_id")
    ]
    rows = [(each, each.get("unit_resources")) for each in _bundles(said)]
    rows += [(row, row.get("required_resources")) for row in alone]
    return [(str(row.get("node_id") or ""), _gpus(resources)) for row, resources in rows]


def _bundles(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the bundles of the placement groups that have what they asked for."""
    found: list[dict[str, Any]] = []
    for row in _rows(said.get("groups")):
        bundles = row.get("bundles")
        if row.get("state") in ("REMOVED", "PENDING", "INFEASIBLE"):
            continue
        if isinstance(bundles, list):
            found += [each for each in bundles if isinstance(each, dict)]
    return found


def port(node: Node, number: int, use: str, facts: HostFacts) -> Finding:
    """Judge that nobody listens on a port of a node."""
    if facts.listening is None:
        return skipped(node, "neither `ss` nor `netstat` is installed; ports were not looked at")
    if all(each != number for _, each in facts.listening):
        return passed(node)
    return failed(
        node,
        f"port {number} ({use}) is taken",
        fix=(
            f"see who has it with `sudo ss -ltnp 'sport = :{number}'` on {node.name}, or choose"
            " another with `--port`"
        ),
    )


def stopped(
    alive: Sequence[str], ports: Sequence[str], said: Mapping[str, Any] | None, others: float
) -> list[Finding]:
    """Judge that servers are over, their ports closed, and their GPUs free in Ray.

    Args:
        alive: the states of those that are not over yet, in words.
        ports: the ports that are still open, in words.
        said: what the head said about Ray, or its `error`; None where they took nothing from Ray.
        others: the GPUs of servers that go on.
    """
    left = [*alive, *(f"{each} is still open" for each in ports)]
    if said is not None and "jobs" not in said:
        left.append(f"Ray cannot be asked: {said.get('error', 'no answer')}")
    # What other work holds, a batch job say, is not ours to wait for.
    elif (
        said is not None
        and all(job["status"] in OVER for job in said["jobs"])
        and (busy := busy_gpus(said) - others) > 0
    ):
        left.append(f"{busy:g} GPUs are still reserved in Ray")
    return [_gone(left, "the server is gone, what it held is free, and its port is closed")]


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


def _ends(holders: Sequence[Holder]) -> str:
    if ends := [each.end for each in holders if each.end != _LIST_GROUPS]:
        return "\n".join(f"wait for it, or end it: `{end}`" for end in ends)
    return f"see who holds them: `{_LIST_GROUPS}`"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
