"""Servers and batch jobs: what they hold, and room for one that is to start."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from launcher.core import sizes
from launcher.core.check import Finding, failed, passed, skipped, warned
from launcher.core.domain import Inventory, Node, fold
from launcher.core.plan import Gate, observed
from launcher.core.transport import Command
from launcher.tools import agent_queries, ray, servers
from launcher.tools.host import HostFacts
from launcher.tools.model import ModelSeen
from launcher.tools.site import Site
from launcher.tools.snapshot import ClusterSnapshot

LIST_GROUPS = "vlaunch exec --head -- ray list placement-groups"
# What the metadata of a batch's Ray job tells a later run.
NAME, GPUS = "vlaunch.batch", "vlaunch.gpus"
BATCH_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,38}[a-z0-9])?", re.ASCII)
OVER = ("SUCCEEDED", "FAILED", "STOPPED", "ABSENT")
_SPARE = 64 * 2**20  # bytes that stay free beside a batch job's files
SILENT = 60.0  # seconds without a report after which a node's agent counts as lost
_LONG = 10 * 365 * 86400.0  # seconds; more is no age


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch job that waits or runs: its Ray job, and how many accelerators it needs at least."""

    name: str
    id: str
    gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Something that runs and may hold accelerators; `end` is the command that ends it."""

    what: str
    gpus: float
    end: str


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
    free = _free(inventory, busy_gpus(said) - freed, holders)
    text = f"{free:g} of {inventory.gpus} GPUs are free in Ray"
    if free >= needs:
        return [passed("", text)]
    return [failed("", f"{text}, {split} needs {needs}{_held(holders)}", fix=_ends(holders))]


def _free(inventory: Inventory, busy: float, holders: Sequence[Holder]) -> float:
    """Count free accelerators; who has just begun holds nothing yet, but soon will."""
    return max(0.0, inventory.gpus - max(busy, sum(holder.gpus for holder in holders)))


def node_gpus(node: Node, needs: int, holders: Sequence[Holder], in_ray: float) -> Finding:
    """Judge that a node has as many free GPUs as a server takes there; `holders` hold so many of
    this node's.

    `in_ray` are those that Ray has given away there, which may be the same.
    """
    known = sum(holder.gpus for holder in holders)
    free = max(0.0, node.gpus - max(known, in_ray))
    if free >= needs:
        return passed(node)
    if in_ray > known:
        holders = [*holders, Holder(what="work in Ray", gpus=in_ray - known, end=LIST_GROUPS)]
    text = f"{free:g} of {node.gpus} GPUs are free, the server needs {needs}{_held(holders)}"
    return failed(node, text, fix=_ends(holders) + "\nor let it take other nodes: `--nodes`")


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
    reserved: list[tuple[object, object]] = []
    for group in said.get("groups", ()):
        if group.get("state") not in ("REMOVED", "PENDING", "INFEASIBLE"):
            reserved += [
                (bundle.get("node_id"), bundle.get("unit_resources"))
                for bundle in _rows(group.get("bundles"))
            ]
    reserved += [
        (actor.get("node_id"), actor.get("required_resources"))
        for actor in said.get("actors", ())
        if actor.get("state") == "ALIVE" and not actor.get("placement_group_id")
    ]
    return [(str(node or ""), _gpus(resources)) for node, resources in reserved]


def _rows(raw: object) -> list[dict[str, Any]]:
    return [row for row in raw if isinstance(row, dict)] if isinstance(raw, list) else []


def _gpus(resources: object) -> float:
    count = resources.get("GPU", 0) if isinstance(resources, dict) else 0
    return _positive(count) if isinstance(count, (int, float)) else 0.0


def _positive(count: float) -> float:
    """Return a number of accelerators; 0 for what cannot be one."""
    return float(count) if 0 <= count < 1e9 else 0.0


def _held(holders: Sequence[Holder]) -> str:
    """Return in words what each of them holds, to be put behind what is missing."""
    named = [f"{each.what} holds {each.gpus:g}" if each.gpus else each.what for each in holders]
    return f": {', '.join(named)}" if named else ""


def _ends(holders: Sequence[Holder]) -> str:
    if ends := [each.end for each in holders if each.end != LIST_GROUPS]:
        return "\n".join(f"wait for it, or end it: `{end}`" for end in ends)
    return f"see who holds them: `{LIST_GROUPS}`"


def claimed(job: Mapping[str, Any]) -> float:
    """Return how many accelerators a batch's Ray job needs at least, as its metadata says."""
    try:
        return _positive(float((job.get("metadata") or {}).get(GPUS, 0)))
    except ValueError:
        return 0.0


def batches(said: Mapping[str, Any]) -> list[Batch]:
    """Return the batch jobs that are not over."""
    return [
        Batch(name=name, id=job["submission_id"], gpus=claimed(job))
        for job in said.get("jobs", ())
        if job["status"] not in OVER and (name := _named(job.get("metadata") or {}))
    ]


def job_holders(said: Mapping[str, Any]) -> list[Holder]:
    """Return the batch jobs that need accelerators."""
    return [
        Holder(what=f"batch job `{job.name}`", gpus=job.gpus, end=f"vlaunch stop {job.name}")
        for job in batches(said)
        if job.gpus
    ]


def job_room(
    inventory: Inventory,
    least: float,
    most: float,
    said: Mapping[str, Any],
    holders: Sequence[Holder],
    *,
    queue: bool,
) -> list[Finding]:
    """Judge that a batch job can begin now; with `queue` it may wait for what others hold."""
    free = _free(inventory, busy_gpus(said), holders)
    unit = "slots" if inventory.accelerator == "cpu" else "GPUs"
    text = f"{free:g} of {inventory.gpus} {unit} are free in Ray"
    if free >= least:
        short = f"; of {most:g} that the job would use" if free < most else ""
        return [passed("", text + short)]
    text += f", the job needs {least:g}{_held(holders)}"
    if queue:
        return [Finding(node="", status="warn", text=f"{text}; it waits for them")]
    ends = ", ".join(f"`{each.end}`" for each in holders)
    who = f"end what holds them: {ends}" if ends else f"see who holds them: `{LIST_GROUPS}`"
    return [failed("", text, fix=f"{who}\nor submit it, to wait for them: `--queue`")]


def job_disk(node: Node, need: int, facts: HostFacts) -> list[Finding]:
    """Judge that the head has room for what is shipped, and for as much output again."""
    if facts.disk_free is None:
        return [skipped(node, f"nobody could say how much room {node.hf_home} has")]
    wanted = 2 * need + _SPARE
    if facts.disk_free >= wanted:
        return [passed(node, f"{sizes.told(facts.disk_free)} free under {node.hf_home}")]
    return [
        failed(
            node,
            f"{sizes.told(facts.disk_free)} free under {node.hf_home}, the job's files need about"
            f" {sizes.told(wanted)}",
            fix=(
                "free some space there, remove jobs that are done (`vlaunch jobs --remove NAME`),\n"
                "or read from and write to a path of the nodes (`nodes:/…`) or an object store"
            ),
        )
    ]


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
    fix = "run `vlaunch up`, then look at `vlaunch status`"
    return [
        passed(node) if node.ip in alive else failed(node, "is not in Ray", fix=fix)
        for node in site.nodes
    ]


def cluster_gate(seen: ClusterSnapshot) -> Gate:
    """Every node is in Ray: what runs in Ray needs all of them."""
    return observed(
        "cluster",
        "the cluster is up: every node is in Ray",
        partial(cluster, seen.site, seen.said),
    )


def agents(site: Site, nodes: Sequence[Node], heard: Mapping[str, float]) -> list[Finding]:
    """Judge that the agents in the nodes' containers are of this vlaunch and connected; `heard` is
    how many seconds ago.
    """
    return [_container(site, node) or _agent(node, heard.get(node.name)) for node in nodes]


def _named(metadata: Mapping[str, Any]) -> str:
    """Return the name of a batch that a Ray job's metadata give; empty for a name that no job of
    ours has.
    """
    name = metadata.get(NAME)
    return name if isinstance(name, str) and BATCH_NAME.fullmatch(name) else ""


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


def _agent(node: Node, heard: float | None) -> Finding:
    if heard is not None and heard < SILENT:
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


def model_gate(seen: ClusterSnapshot, nodes: Sequence[Node], name: str) -> Gate:
    """The nodes that load a model have it, or may download it."""
    offline = {each.name: each.env.get("HF_HUB_OFFLINE", "0") not in ("0", "") for each in nodes}
    return observed(
        "model",
        "every node has the model, or may download it",
        partial(model, nodes, name, seen.models, offline),
    )


def model(
    nodes: Sequence[Node], name: str, seen: Mapping[str, ModelSeen], offline: Mapping[str, bool]
) -> list[Finding]:
    """Judge that the model is the same on every node that will load it; `offline` nodes may not
    download it. `seen` may have other nodes, too.
    """
    digests = {seen[node.name].digest for node in nodes if node.name in seen} - {""}
    whole = [node for node, copy in seen.items() if copy.where == "there"]

    def judge(node: Node) -> Finding:
        copy = seen.get(node.name)
        if copy is None or copy.where == "unknown":
            return skipped(node, "could not be asked whether it has the model")
        if copy.absent:
            return _absent(node, name, copy, offline=offline.get(node.name, False), whole=whole)
        if len(digests) <= 1:
            return passed(node, "has the model")
        return failed(
            node,
            f"{name} is not the same model on all nodes",
            evidence=f"its config.json has sha256 {copy.digest[:16] or '(none)'}…",
            fix=f"bring one of them everywhere: `vlaunch model copy {name} --from {whole[0]}`",
        )

    return [judge(node) for node in nodes]


def _absent(
    node: Node, name: str, found: ModelSeen, *, offline: bool, whole: Sequence[str]
) -> Finding:
    """Judge a node that lacks files of a model, of which a server may download those of a cache."""
    fix = bring(name, whole)
    if found.where == "begun":
        return failed(node, f"the copy of {name} is not finished there", fix=fix)
    what = f"has no {name} in its container"
    if found.where == "lacks":
        what = f"lacks {found.lacking} of {name}"
    elif found.where == "not cached":
        what = f"does not have {name} in its cache"
    if name.startswith("/") or found.where == "missing":
        return failed(node, what, fix=fix)
    if offline:
        fix = f"{fix}\nor take HF_HUB_OFFLINE out of `env:`"
        return failed(node, f"{what}, and HF_HUB_OFFLINE forbids to download it", fix=fix)
    if whole:
        text = f"{what}, and will download it, though {fold(list(whole))} has it"
        return warned(node, text, fix=fix)
    if found.where == "lacks":
        return warned(node, f"{what}, and will download the rest", fix=fix)
    return passed(node, "will download the model")


def bring(name: str, whole: Sequence[str]) -> str:
    """Say how a model gets to nodes that lack it; `whole` are those that have all of it."""
    if whole:
        return f"copy it from {whole[0]}: `vlaunch model copy {name}`, or add `--fetch`"
    if name.startswith("/"):
        return (
            f"copy it from this machine: `vlaunch model copy ./FOLDER --as {name}`; it must lie"
            " below `hf_home:` or one of `mounts:`"
        )
    return f"download it once for all nodes: `vlaunch model pull {name}`, or add `--fetch`"


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


def ask_jobs(site: Site, peers: tuple[str, ...] = ()) -> Command:
    """Ask the head for jobs, nodes, actors and placement groups, for its servers, and which `peers`
    (`ip:port`) are closed; without Ray for its servers alone.
    """
    if site.inventory.ray.off:
        return servers.ask(site)
    return site.inside(site.head, agent_queries.jobs(site.inventory.ports, peers))


def holders(said: Mapping[str, Any]) -> list[Holder]:
    """Return who may hold accelerators: servers, and batch jobs."""
    running = servers.read(said).running
    return [*(holder(server, server.gpus) for server in running), *job_holders(said)]


def holder(server: servers.Server, gpus: int) -> Holder:
    """Return a server as the holder of so many GPUs."""
    return Holder(what=server.what, gpus=gpus, end=f"vlaunch stop {server.name}")
