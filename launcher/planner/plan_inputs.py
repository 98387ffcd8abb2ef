"""Inputs of a plan: a model and its GPUs, from files and flags or from nodes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.app.session import Session
from launcher.core import expectations_file
from launcher.core.domain import Answer, Inventory, Node
from launcher.core.errors import RequestError
from launcher.core.transport import run_by_node
from launcher.planner import estimate
from launcher.planner.architecture import Architecture
from launcher.planner.architecture_parser import parse_architecture
from launcher.planner.cluster import Cluster, ClusterLink, PlanHost
from launcher.planner.estimate import GpuModel
from launcher.planner.flags import parse_flags
from launcher.planner.measurement import MeasuredStart
from launcher.planner.weights import GIB
from launcher.tools import model as models
from launcher.tools import vllm
from launcher.tools.host import node_probes
from launcher.tools.site import Site, history, network_verdict
from launcher.tools.site.history import ServerRevision

# A model's name, its architecture, and the bytes of its weights.
Model = tuple[str, Architecture, int]

_MAX_CONFIG_BYTES = 16 << 20
_NAMELESS = "MODEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """A model with its architecture and size, the cluster, and earlier starts of it there."""

    name: str
    model: Architecture
    weight_bytes: int
    cluster: Cluster
    starts: tuple[MeasuredStart, ...] = ()


def read_local_model(
    name: str | None, config: Path | None, weight_bytes: int | None
) -> Model | None:
    """Read a model on this machine; None if it is not here. Raises RequestError."""
    folder = Path(name) if name else None
    if folder and folder.is_dir():
        config = config or folder / "config.json"
        weight_bytes = weight_bytes or sum(
            path.stat().st_size for path in folder.glob(f"*{models.WEIGHTS}")
        )
    if config is None:
        return None
    if not weight_bytes:
        raise RequestError(
            f"unknown size of the weights of {name or config}",
            hint="pass their size in bytes: `--weights-bytes N`",
        )
    return name or _NAMELESS, parse_architecture(_read_config(config)), weight_bytes


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_bytes()[: _MAX_CONFIG_BYTES + 1]
        if len(text) > _MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {_MAX_CONFIG_BYTES >> 20} MiB")
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            f"{path} cannot be read",
            evidence=str(error) or type(error).__name__,
            hint="pass a model's folder as `--model`, or its config.json as `--config`",
        ) from None
    return config


def describe_cluster(
    gpu: str | None, memory_gib: float | None, counts: Mapping[str, int], link: ClusterLink
) -> Cluster:
    """Return a cluster of nodes with one GPU model; `counts` is the GPUs of each node.

    Raises RequestError for an unknown GPU.
    """
    expected = expectations_file.load_for_user().gpu(gpu) if gpu else None
    memory = memory_gib or (expected.reported_gib(gpu) if expected and gpu else None)
    if memory is None:
        raise RequestError(
            f"unknown memory size of {gpu or 'the GPU'}",
            hint="pass what CUDA reports, slightly below the nominal size: `--gpu-memory-gib X`",
        )
    gpu_model = GpuModel(name=gpu or "GPU", memory_gib=memory)
    hosts = tuple(PlanHost(name=name, gpus=count, gpu=gpu_model) for name, count in counts.items())
    return Cluster(hosts=hosts, link=link)


def query_inputs(session: Session, name: str, link: ClusterLink, local: Model | None) -> PlanInputs:
    """Query the nodes for their GPUs and, unless it is local, the model, and the head for the
    measured link and earlier starts. Facts in `link` come first.

    Raises NodeError, and RequestError if no node has GPUs or the model.
    """
    inventory = session.inventory
    site = Site(inventory, node_probes.probe_nodes(inventory, session.transport, [], survey=True))
    cluster = Cluster(hosts=list_hosts(site), link=link)
    history_query = history.query_all_histories(site)
    model_queries = [] if local else models.query_scans(site, name, hosts=True)
    head_queries = [network_verdict.query_record(site), *([history_query] if history_query else [])]
    answers = run_by_node(session.transport, [*head_queries, *model_queries])
    head_answers = answers[inventory.head.name]
    record = network_verdict.parse_record(head_answers.pop(0))
    revisions = history.parse_all_histories(head_answers.pop(0)) if history_query else ()
    model = local or find_model(answers, name)
    return PlanInputs(
        name=model[0],
        model=model[1],
        weight_bytes=model[2],
        cluster=replace(cluster, link=merge_link(site, link, record)),
        starts=measured_starts(revisions, model[0], model[1], inventory),
    )


def engine_env(inventory: Inventory, own: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """Return the variables of engines that affect memory; the inventory's come first."""
    env = {**(own or {}), **inventory.head.env}
    if inventory.accelerator != "cpu":
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return env


def measured_starts(
    revisions: Sequence[ServerRevision], name: str, model: Architecture, inventory: Inventory
) -> tuple[MeasuredStart, ...]:
    """Return a model's earlier starts; the environment is assumed to be unchanged."""
    starts = []
    for revision in revisions:
        concurrency = vllm.parse_capacity(revision.held).concurrency
        if revision.model != name or not concurrency:
            continue
        flags = parse_flags(revision.args, engine_env(inventory, revision.env))
        starts.append(
            MeasuredStart(
                at=revision.at,
                tp=revision.tp,
                pp=revision.pp,
                dp=revision.dp,
                flags=replace(flags, length=flags.length or model.context or 4096),
                concurrency=concurrency / revision.dp,
            )
        )
    return tuple(starts)


def merge_link(site: Site, link: ClusterLink, record: network_verdict.NetworkRecord) -> ClusterLink:
    """Return the link, completed with measurements and the GPUs' reports of NVLink."""
    measured = record.link
    rdma = link.rdma or site.inventory.fabric != "ethernet"
    nvlink = _has_nvlink(site) if link.nvlink is None else link.nvlink
    if measured is None or link.gbps is not None:
        return replace(link, rdma=rdma, nvlink=nvlink)
    return replace(
        link,
        rdma=rdma and not measured.tcp,
        nvlink=nvlink,
        gbps=measured.gbps,
        latency_us=measured.latency_us,
    )


def _has_nvlink(site: Site) -> bool | None:
    """True if NVLink connects each pair of GPUs that a node uses; None if no node reports it."""
    links = set[str]()
    for node in site.observed_nodes:
        facts = site.facts[node.name]
        used = {f"GPU{gpu.index}" for gpu in facts.used_gpus(node)}
        for gpu in facts.survey.gpus if facts.survey else ():
            own = f"GPU{gpu.index}"
            if own in used:
                links |= {link for peer, link in gpu.peers.items() if peer in used - {own}}
    return all(link.startswith("NV") for link in links) if links else None


def find_model(answers: Mapping[str, Sequence[Answer]], name: str) -> Model:
    """Return the model of the first node with a complete copy. Raises RequestError."""
    for scan in (models.parse_scan(scans[0]) for scans in answers.values() if scans):
        if scan.config is not None and scan.weight_bytes:
            return name, parse_architecture(scan.config), scan.weight_bytes
    raise RequestError(
        f"no node has a complete copy of {name}",
        hint="describe it: `--config FILE --weights-bytes N`",
    )


def list_hosts(site: Site) -> tuple[PlanHost, ...]:
    """Return the nodes with their GPUs; raises RequestError if there are none."""
    hosts = tuple(host for node in site.inventory.nodes if (host := _build_host(site, node)))
    if not hosts:
        raise RequestError(
            "no node of this cluster has GPUs that report their memory",
            hint="describe them, and the model: `--gpu NAME --gpus-per-node N --nodes N"
            " --config FILE --weights-bytes N`",
        )
    return hosts


def _build_host(site: Site, node: Node) -> PlanHost | None:
    """Return a node with the GPUs that it uses, or the slots of its CPU; None if it has none.

    nvidia-smi includes the driver's own memory; CUDA reports less, as in our table.
    """
    facts = site.facts.get(node.name)
    if site.inventory.accelerator == "cpu":
        memory = facts.survey.memory if facts and facts.survey else None
        gpu_model = GpuModel(name=estimate.CPU_NAME, memory_gib=(memory or 0) / GIB)
        return PlanHost(name=node.name, gpus=node.gpus, gpu=gpu_model)
    used = facts.used_gpus(node) if facts else ()
    if not used:
        return None
    smallest = min(used, key=lambda gpu: gpu.memory_total)
    expected = expectations_file.load_for_user().gpu(smallest.name)
    total = smallest.memory_total / 1024
    reported = expected.reported_gib(smallest.name) if expected else None
    is_plausible = reported is not None and abs(reported - total) < total / 10
    memory_gib = reported if is_plausible and reported is not None else total
    gpu_model = GpuModel(name=smallest.name, memory_gib=memory_gib)
    return PlanHost(name=node.name, gpus=len(used), gpu=gpu_model)
