"""What a plan is made of: a model and the GPUs it may have, from files and flags, or from nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.app.session import Session
from launcher.core import expectations_read
from launcher.core.domain import Answer, Inventory, Node
from launcher.core.errors import RequestError
from launcher.core.transport import by_node
from launcher.planner import estimate
from launcher.planner.architecture import Architecture
from launcher.planner.architecture_read import architecture_of
from launcher.planner.cluster import Cluster, Host, Link
from launcher.planner.estimate import Gpu
from launcher.planner.flags import flags_of
from launcher.planner.measured import Started
from launcher.planner.weights import GIB
from launcher.tools import history, network_verdict, observe, vllm
from launcher.tools import model as models
from launcher.tools.history import Answered
from launcher.tools.site import Site

# A model's name, what it is made of, and the bytes of its weights.
Model = tuple[str, Architecture, int]

_MOST = 16 << 20
_NAMELESS = "MODEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A model by its name, what it is made of, the bytes of its weights, the cluster, and what has
    been served of it there.
    """

    name: str
    model: Architecture
    weight_bytes: int
    cluster: Cluster
    starts: tuple[Started, ...] = ()


def model_here(name: str | None, config: Path | None, weight_bytes: int | None) -> Model | None:
    """Read a model from this machine: a folder, or its configuration and size; None when it is not
    here. Raises RequestError for files that are none.
    """
    folder = Path(name) if name else None
    if folder and folder.is_dir():
        config = config or folder / "config.json"
        weight_bytes = weight_bytes or sum(
            each.stat().st_size for each in folder.glob(f"*{models.WEIGHTS}")
        )
    if config is None:
        return None
    if not weight_bytes:
        raise RequestError(
            f"the weights of {name or config} have no size",
            hint="say how many bytes they have: `--weights-bytes N`",
        )
    return name or _NAMELESS, architecture_of(_read(config)), weight_bytes


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_bytes()[: _MOST + 1]
        if len(text) > _MOST:
            raise ValueError(f"it is larger than {_MOST >> 20} MiB")
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            f"{path} cannot be read",
            evidence=str(error) or type(error).__name__,
            hint="name the folder of a model with `--model`, or its config.json with `--config`",
        ) from None
    return found


def described(
    gpu: str | None, memory_gib: float | None, counts: Mapping[str, int], link: Link
) -> Cluster:
    """Return a cluster of nodes with so many GPUs each, which are of one model.

    Raises RequestError for a GPU that is not known.
    """
    known = expectations_read.load_for_user().gpu(gpu) if gpu else None
    memory = memory_gib or (known.reported(gpu) if known and gpu else None)
    if memory is None:
        raise RequestError(
            f"how much memory {gpu or 'the GPU'} has is not known",
            hint="say what CUDA reports, a little less than is sold: `--gpu-memory-gib X`",
        )
    card = Gpu(name=gpu or "GPU", memory_gib=memory)
    hosts = tuple(Host(name=name, gpus=count, gpu=card) for name, count in counts.items())
    return Cluster(hosts=hosts, link=link)


def asked(session: Session, name: str, link: Link, here: Model | None) -> Inputs:
    """Ask the nodes for their GPUs and, unless it is here, for the model; and the head for the
    link as it was measured, and for what has been served. What `link` says itself counts first.

    Raises NodeError and RequestError: nobody has GPUs, or the model.
    """
    inventory = session.inventory
    site = Site(inventory, observe.observe(inventory, session.transport, [], survey=True))
    cluster = Cluster(hosts=hosts_of(site), link=link)
    answered = history.ask_all(site)
    looks = [] if here else models.query(site, name, hosts=True)
    asked_head = [network_verdict.query_record(site), *([answered] if answered else [])]
    said = by_node(session.transport, [*asked_head, *looks])
    of_head = said[inventory.head.name]
    measured = network_verdict.parse_record(of_head.pop(0))
    found = history.read_all(of_head.pop(0)) if answered else ()
    read = here or model_in(said, name)
    return Inputs(
        name=read[0],
        model=read[1],
        weight_bytes=read[2],
        cluster=replace(cluster, link=link_of(site, link, measured)),
        starts=starts_of(found, read[0], read[1], inventory),
    )


def env_of(inventory: Inventory, own: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """Return the environment of engines, as far as it counts for memory: a server's `own`, and over
    it the inventory's.
    """
    env = {**(own or {}), **inventory.head.env}
    if inventory.accelerator != "cpu":
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return env


def starts_of(
    answered: Sequence[Answered], name: str, model: Architecture, inventory: Inventory
) -> tuple[Started, ...]:
    """Return those servers of a model that have answered and said what they hold; the inventory's
    environment is taken to have been what it is now.
    """
    found = []
    for each in answered:
        times = vllm.capacity(each.held).concurrency
        if each.model != name or not times:
            continue
        flags = flags_of(each.args, env_of(inventory, each.env))
        found.append(
            Started(
                at=each.at,
                tp=each.tp,
                pp=each.pp,
                dp=each.dp,
                flags=replace(flags, length=flags.length or model.context or 4096),
                concurrency=times / each.dp,
            )
        )
    return tuple(found)


def link_of(site: Site, link: Link, record: network_verdict.Record) -> Link:
    """Return the link with what was measured, and what the GPUs say of NVLink, where `link` itself
    says nothing.
    """
    measured = record.link
    rdma = link.rdma or site.inventory.fabric != "ethernet"
    nvlink = _nvlink(site) if link.nvlink is None else link.nvlink
    if measured is None or link.gbps is not None:
        return replace(link, rdma=rdma, nvlink=nvlink)
    return replace(
        link,
        rdma=rdma and not measured.tcp,
        nvlink=nvlink,
        gbps=measured.gbps,
        latency_us=measured.latency_us,
    )


def _nvlink(site: Site) -> bool | None:
    """Tell whether NVLink leads from each GPU that a node uses to each other one; None where no
    node says it.
    """
    words = set[str]()
    for node in site.seen:
        facts = site.facts[node.name]
        used = {f"GPU{gpu.index}" for gpu in facts.used(node)}
        for gpu in facts.survey.gpus if facts.survey else ():
            mine = f"GPU{gpu.index}"
            if mine in used:
                words |= {word for name, word in gpu.peers.items() if name in used - {mine}}
    return all(word.startswith("NV") for word in words) if words else None


def model_in(said: Mapping[str, Sequence[Answer]], name: str) -> Model:
    """Return the model as the first node has it whole; raises RequestError when none has."""
    for scan in (models.parse(answers[0]) for answers in said.values() if answers):
        if scan.config is not None and scan.weight_bytes:
            return name, architecture_of(scan.config), scan.weight_bytes
    raise RequestError(
        f"no node has the model {name} whole",
        hint="say what it is: `--config FILE --weights-bytes N`",
    )


def hosts_of(site: Site) -> tuple[Host, ...]:
    """Return the nodes with what they bring; raises RequestError where none brings anything."""
    hosts = tuple(host for node in site.inventory.nodes if (host := _host(site, node)))
    if not hosts:
        raise RequestError(
            "no node of this cluster has GPUs that tell their memory",
            hint="describe them, and the model: `--gpu NAME --gpus-per-node N --nodes N"
            " --config FILE --weights-bytes N`",
        )
    return hosts


def _host(site: Site, node: Node) -> Host | None:
    """Return a node with the GPUs that it uses, or the slots of its CPU; None when it has none.

    nvidia-smi counts what the driver keeps for itself; CUDA reports less, by our table.
    """
    facts = site.facts.get(node.name)
    if site.inventory.accelerator == "cpu":
        memory = facts.survey.memory if facts and facts.survey else None
        card = Gpu(name=estimate.CPU_NAME, memory_gib=(memory or 0) / GIB)
        return Host(name=node.name, gpus=node.gpus, gpu=card)
    used = facts.used(node) if facts else ()
    if not used:
        return None
    smallest = min(used, key=lambda gpu: gpu.memory_total)
    known = expectations_read.load_for_user().gpu(smallest.name)
    total = smallest.memory_total / 1024
    reported = known.reported(smallest.name) if known else None
    near = reported is not None and abs(reported - total) < total / 10
    memory_gib = reported if near and reported is not None else total
    return Host(name=node.name, gpus=len(used), gpu=Gpu(name=smallest.name, memory_gib=memory_gib))
