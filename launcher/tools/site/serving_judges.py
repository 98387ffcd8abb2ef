"""Resources of servers and batch jobs, and the checks before one starts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from launcher.core import sizes
from launcher.core.check import Finding, failed, passed, skipped, warned
from launcher.core.domain import Inventory, Node, fold
from launcher.core.plan import Gate, precomputed_gate
from launcher.core.transport import Command
from launcher.tools import agent_queries, ray
from launcher.tools.host import HostFacts
from launcher.tools.model import ModelScan
from launcher.tools.site import Site, servers
from launcher.tools.site.snapshot import ClusterSnapshot

LIST_GROUPS = "vlaunch exec --head -- ray list placement-groups"
# Metadata of a batch's Ray job, for later runs.
NAME, GPUS = "vlaunch.batch", "vlaunch.gpus"
BATCH_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,38}[a-z0-9])?", re.ASCII)
OVER = ("SUCCEEDED", "FAILED", "STOPPED", "ABSENT")
_SPARE = 64 * 2**20  # bytes that must stay free in addition to a batch job's files
SILENT = 60.0  # seconds without a report after which a node's agent counts as lost
_LONG = 10 * 365 * 86400.0  # seconds; larger ages are invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Waiting or running batch job: the id of its Ray job, and its minimum of accelerators."""

    name: str
    id: str
    gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUser:
    """Server or job that may use accelerators, and the command that stops it."""

    label: str
    gpus: float
    stop_command: str


def judge_free_gpus(
    inventory: Inventory,
    needs: int,
    split: str,
    payload: Mapping[str, Any],
    users: Sequence[GpuUser],
    freed: float = 0.0,
) -> list[Finding]:
    """Check that Ray has enough free GPUs for a layout; vLLM would wait half an hour for them.

    `users` are the other users of GPUs; `freed` GPUs belong to the server that is replaced.
    """
    free = _count_free_gpus(inventory, busy_gpus(payload) - freed, users)
    text = f"{free:g} of {inventory.gpus} GPUs are free in Ray"
    if free >= needs:
        return [passed("", text)]
    return [
        failed("", f"{text}, {split} needs {needs}{_describe_users(users)}", fix=_stop_hints(users))
    ]


def _count_free_gpus(inventory: Inventory, busy: float, users: Sequence[GpuUser]) -> float:
    """Count free accelerators; `users` includes those that have just started."""
    return max(0.0, inventory.gpus - max(busy, sum(user.gpus for user in users)))


def judge_node_gpus(node: Node, needs: int, users: Sequence[GpuUser], in_ray: float) -> Finding:
    """Check that a node has enough free GPUs for a server; `users` are those of this node.

    `in_ray` GPUs are reserved in Ray, possibly by the same users.
    """
    claimed = sum(user.gpus for user in users)
    free = max(0.0, node.gpus - max(claimed, in_ray))
    if free >= needs:
        return passed(node)
    if in_ray > claimed:
        users = [
            *users,
            GpuUser(label="work in Ray", gpus=in_ray - claimed, stop_command=LIST_GROUPS),
        ]
    text = (
        f"{free:g} of {node.gpus} GPUs are free, the server needs {needs}{_describe_users(users)}"
    )
    return failed(node, text, fix=_stop_hints(users) + "\nor choose other nodes: `--nodes`")


def busy_gpus(payload: Mapping[str, Any]) -> float:
    """Count the GPUs reserved by placement groups, and by actors outside of them."""
    return sum(count for _, count in _reserved_gpus(payload))


def busy_gpus_by_node(payload: Mapping[str, Any]) -> dict[str, float]:
    """Count the reserved GPUs by node address."""
    rows = ray.parse_nodes(payload["nodes"]) if "nodes" in payload else ()
    addresses = {row.id: row.ip for row in rows}
    busy: dict[str, float] = {}
    for node, count in _reserved_gpus(payload):
        ip = addresses.get(node, "")
        busy[ip] = busy.get(ip, 0.0) + count
    return busy


def _reserved_gpus(payload: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the reservations in Ray as pairs of node id (empty if unknown) and GPUs."""
    reserved: list[tuple[object, object]] = []
    for group in payload.get("groups", ()):
        if group.get("state") not in ("REMOVED", "PENDING", "INFEASIBLE"):
            reserved += [
                (bundle.get("node_id"), bundle.get("unit_resources"))
                for bundle in _rows(group.get("bundles"))
            ]
    reserved += [
        (actor.get("node_id"), actor.get("required_resources"))
        for actor in payload.get("actors", ())
        if actor.get("state") == "ALIVE" and not actor.get("placement_group_id")
    ]
    return [(str(node or ""), _gpu_amount(resources)) for node, resources in reserved]


def _rows(raw: object) -> list[dict[str, Any]]:
    return [row for row in raw if isinstance(row, dict)] if isinstance(raw, list) else []


def _gpu_amount(resources: object) -> float:
    count = resources.get("GPU", 0) if isinstance(resources, dict) else 0
    return _positive(count) if isinstance(count, (int, float)) else 0.0


def _positive(count: float) -> float:
    """Return a number of accelerators; 0 if invalid."""
    return float(count) if 0 <= count < 1e9 else 0.0


def _describe_users(users: Sequence[GpuUser]) -> str:
    """Describe the users of GPUs, as the end of a message."""
    descriptions = [
        f"{user.label} uses {user.gpus:g}" if user.gpus else user.label for user in users
    ]
    return f": {', '.join(descriptions)}" if descriptions else ""


def _stop_hints(users: Sequence[GpuUser]) -> str:
    if commands := [user.stop_command for user in users if user.stop_command != LIST_GROUPS]:
        return "\n".join(f"wait for it, or stop it: `{command}`" for command in commands)
    return f"see what uses them: `{LIST_GROUPS}`"


def claimed_gpus(job: Mapping[str, Any]) -> float:
    """Return the minimum of accelerators in the metadata of a batch's Ray job."""
    try:
        return _positive(float((job.get("metadata") or {}).get(GPUS, 0)))
    except ValueError:
        return 0.0


def active_batches(payload: Mapping[str, Any]) -> list[Batch]:
    """Return the batch jobs that have not finished."""
    return [
        Batch(name=name, id=job["submission_id"], gpus=claimed_gpus(job))
        for job in payload.get("jobs", ())
        if job["status"] not in OVER and (name := _batch_name(job.get("metadata") or {}))
    ]


def running_work(payload: Mapping[str, Any]) -> list[str]:
    """Return the names for display of the servers and batch jobs that run."""
    jobs = [f"batch job {job.name}" for job in active_batches(payload)]
    return [server.label for server in servers.parse_servers(payload).running] + jobs


def job_gpu_users(payload: Mapping[str, Any]) -> list[GpuUser]:
    """Return the batch jobs that need accelerators."""
    return [
        GpuUser(
            label=f"batch job `{job.name}`", gpus=job.gpus, stop_command=f"vlaunch stop {job.name}"
        )
        for job in active_batches(payload)
        if job.gpus
    ]


def judge_job_room(
    inventory: Inventory,
    minimum: float,
    maximum: float,
    payload: Mapping[str, Any],
    users: Sequence[GpuUser],
    *,
    queue: bool,
) -> list[Finding]:
    """Check that a batch job can start now; with `queue` it may wait for accelerators."""
    free = _count_free_gpus(inventory, busy_gpus(payload), users)
    unit = "slots" if inventory.accelerator == "cpu" else "GPUs"
    text = f"{free:g} of {inventory.gpus} {unit} are free in Ray"
    if free >= minimum:
        short = f"; the job can use {maximum:g}" if free < maximum else ""
        return [passed("", text + short)]
    text += f", the job needs {minimum:g}{_describe_users(users)}"
    if queue:
        return [Finding(node="", status="warn", text=f"{text}; the job waits until they are free")]
    commands = ", ".join(f"`{user.stop_command}`" for user in users)
    advice = (
        f"stop what uses them: {commands}" if commands else f"see what uses them: `{LIST_GROUPS}`"
    )
    return [failed("", text, fix=f"{advice}\nor queue it until they are free: `--queue`")]


def judge_job_disk(node: Node, need: int, facts: HostFacts) -> list[Finding]:
    """Check that the head has enough disk space for the job's files, and as much for output."""
    if facts.disk_free is None:
        return [skipped(node, f"the free space under {node.hf_home} is unknown")]
    required = 2 * need + _SPARE
    if facts.disk_free >= required:
        return [passed(node, f"{sizes.format_size(facts.disk_free)} free under {node.hf_home}")]
    return [
        failed(
            node,
            f"{sizes.format_size(facts.disk_free)} free under {node.hf_home}, the job's files need"
            f" about {sizes.format_size(required)}",
            fix=(
                "free space there, or remove finished jobs: `vlaunch jobs remove NAME`\nor read"
                " from and write to a path of the nodes (`nodes:/…`) or an object store"
            ),
        )
    ]


def judge_members(site: Site, payload: Mapping[str, Any]) -> list[Finding]:
    """Check that all nodes' containers run and all nodes are in Ray; `payload` is the head's reply
    about Ray, or its `error`.
    """
    if findings := [fault for node in site.nodes if (fault := _judge_container(site, node))]:
        return findings
    if "nodes" not in payload:
        reason = str(payload.get("error", "no reason given"))
        fix = (
            "it may be busy: run the same command again"
            if "timed out" in reason
            else "run `vlaunch up`"
        )
        return [failed(site.head, f"Ray does not answer: {reason}", fix=fix)]
    alive = {row.ip for row in ray.parse_nodes(payload["nodes"]) if row.alive}
    fix = "run `vlaunch up`, then check `vlaunch status`"
    return [
        passed(node) if node.ip in alive else failed(node, "is not in Ray", fix=fix)
        for node in site.nodes
    ]


def cluster_gate(snapshot: ClusterSnapshot) -> Gate:
    """Return the gate that requires all nodes to be in Ray."""
    return precomputed_gate(
        "cluster",
        "the cluster is up: every node is in Ray",
        partial(judge_members, snapshot.site, snapshot.payload),
    )


def judge_agents(
    site: Site, nodes: Sequence[Node], last_reports: Mapping[str, float]
) -> list[Finding]:
    """Check that the nodes' agents are connected; `last_reports` are ages in seconds by node."""
    return [
        _judge_container(site, node) or _judge_agent(node, last_reports.get(node.name))
        for node in nodes
    ]


def _batch_name(metadata: Mapping[str, Any]) -> str:
    """Return the name of a batch from a Ray job's metadata; empty if invalid."""
    name = metadata.get(NAME)
    return name if isinstance(name, str) and BATCH_NAME.fullmatch(name) else ""


def _judge_container(site: Site, node: Node) -> Finding | None:
    """Return a finding if a node's container does not run."""
    container = site.container(node)
    if container is None:
        return failed(node, "has no container of this cluster", fix="run `vlaunch up` first")
    if not container.running:
        return failed(
            node,
            f"its container is not running ({container.status})",
            fix="run `vlaunch up`, which restarts it",
        )
    return None


def _judge_agent(node: Node, age: float | None) -> Finding:
    if age is not None and age < SILENT:
        return passed(node)
    when = f"last reported {age:.0f}s ago" if age is not None and age < _LONG else "never reported"
    fix = (
        f"read its log: `vlaunch logs {node.name}`; `vlaunch check` says whether the nodes reach"
        " each other"
    )
    return failed(node, f"its agent {when}, so nothing can be started there", fix=fix)


def model_gate(snapshot: ClusterSnapshot, nodes: Sequence[Node], name: str) -> Gate:
    """Return the gate that requires the nodes to have the model, or to be able to download it."""
    offline = {node.name: node.env.get("HF_HUB_OFFLINE", "0") not in ("0", "") for node in nodes}
    return precomputed_gate(
        "model",
        "every node has the model or can download it",
        partial(judge_model, nodes, name, snapshot.models, offline),
    )


def judge_model(
    nodes: Sequence[Node], name: str, scans: Mapping[str, ModelScan], offline: Mapping[str, bool]
) -> list[Finding]:
    """Check that the model is the same on all nodes that will load it; `offline` nodes cannot
    download it. `scans` may include other nodes.
    """
    digests = {scans[node.name].digest for node in nodes if node.name in scans} - {""}
    complete_nodes = [node for node, scan in scans.items() if scan.where == "there"]

    def judge(node: Node) -> Finding:
        scan = scans.get(node.name)
        if scan is None or scan.where == "unknown":
            return skipped(node, "the check for the model failed")
        if scan.absent:
            return _judge_absent_model(
                node,
                name,
                scan,
                offline=offline.get(node.name, False),
                complete_nodes=complete_nodes,
            )
        if len(digests) <= 1:
            return passed(node, "has the model")
        return failed(
            node,
            f"{name} differs between nodes",
            evidence=f"its config.json has sha256 {scan.digest[:16] or '(none)'}…",
            fix=(
                f"copy one of them to all nodes: `vlaunch model copy {name} --from"
                f" {complete_nodes[0]}`"
            ),
        )

    return [judge(node) for node in nodes]


def _judge_absent_model(
    node: Node, name: str, scan: ModelScan, *, offline: bool, complete_nodes: Sequence[str]
) -> Finding:
    """Check whether a server can download the files of a model that a node lacks."""
    fix = copy_hint(name, complete_nodes)
    if scan.where == "begun":
        return failed(node, f"its copy of {name} is incomplete", fix=fix)
    problem = f"has no {name} in its container"
    if scan.where == "lacks":
        problem = f"lacks {scan.missing_file} of {name}"
    elif scan.where == "not cached":
        problem = f"does not have {name} in its cache"
    if name.startswith("/") and scan.where != "lacks":
        problem = f"has no model at {name}"
    if name.startswith("/") or scan.where == "missing":
        return failed(node, problem, fix=fix)
    if offline:
        fix = f"{fix}\nor remove HF_HUB_OFFLINE from `env:`"
        return failed(node, f"{problem}, and HF_HUB_OFFLINE prevents the download", fix=fix)
    if complete_nodes:
        text = f"{problem}, and will download it, though {fold(list(complete_nodes))} has it"
        return warned(node, text, fix=fix)
    if scan.where == "lacks":
        return warned(node, f"{problem}, and will download the rest", fix=fix)
    return passed(node, "will download the model")


def copy_hint(name: str, complete_nodes: Sequence[str]) -> str:
    """Return the hint for nodes that lack a model; `complete_nodes` have all of it."""
    if complete_nodes:
        return f"copy it from {complete_nodes[0]}: `vlaunch model copy {name}`, or add `--fetch`"
    if name.startswith("/"):
        return (
            f"copy it from this machine: `vlaunch model copy ./FOLDER --as {name}`; it must be"
            " below `hf_home:` or one of `mounts:`"
        )
    return f"download it once for all nodes: `vlaunch model pull {name}`, or add `--fetch`"


def judge_port(node: Node, number: int, use: str, facts: HostFacts) -> Finding:
    """Check that a port of a node is free."""
    if facts.listening is None:
        return skipped(node, "neither `ss` nor `netstat` is installed; ports were not checked")
    if all(open_port != number for _, open_port in facts.listening):
        return passed(node)
    return failed(
        node,
        f"port {number} ({use}) is already in use",
        fix=(
            f"find the process with `sudo ss -ltnp 'sport = :{number}'` on {node.name}, or choose"
            " another port with `--port`"
        ),
    )


def query_jobs(site: Site, peers: tuple[str, ...] = ()) -> Command:
    """Query jobs, nodes, actors, placement groups and servers from the head, and which `peers`
    (`ip:port`) are unreachable; without Ray, only servers.
    """
    if site.inventory.ray.off:
        return servers.query_servers(site)
    return site.in_container(site.head, agent_queries.jobs(site.inventory.ports, peers))


def gpu_users(payload: Mapping[str, Any]) -> list[GpuUser]:
    """Return the servers and batch jobs that may use accelerators."""
    running = servers.parse_servers(payload).running
    return [*(server_gpu_user(server, server.gpus) for server in running), *job_gpu_users(payload)]


def server_gpu_user(server: servers.Server, gpus: int) -> GpuUser:
    """Return a server as the user of a number of GPUs."""
    return GpuUser(label=server.label, gpus=gpus, stop_command=f"vlaunch stop {server.name}")
