"""What a plan is made of: a model and the GPUs it may have, from files and flags, or from nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.capacity.architecture import Architecture
from launcher.capacity.architecture_read import architecture_of
from launcher.capacity.cluster import Cluster, Host, Link
from launcher.capacity.estimate import Gpu
from launcher.cli import expected
from launcher.errors import RequestError, UnreadableAnswer
from launcher.model import Answer, Node
from launcher.site import Site
from launcher.state import observe, preflight
from launcher.tools import model as models
from launcher.transport import by_node

if TYPE_CHECKING:
    from launcher.cli.session import Session

# A model's name, what it is made of, and the bytes of its weights.
Model = tuple[str, Architecture, int]

_MOST = 16 << 20
_WEIGHTS = ".safetensors"
_NAMELESS = "MODEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A model by its name, what it is made of, the bytes of its weights, and the cluster."""

    name: str
    model: Architecture
    weight_bytes: int
    cluster: Cluster


def model_here(name: str | None, config: Path | None, weight_bytes: int | None) -> Model | None:
    """Read a model from this machine: a folder, or its configuration and size; None when it is not
    here. Raises RequestError for files that are none.
    """
    folder = Path(name) if name else None
    if folder and folder.is_dir():
        config = config or folder / "config.json"
        weight_bytes = weight_bytes or sum(
            each.stat().st_size for each in folder.glob(f"*{_WEIGHTS}")
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
    known = expected.load().gpu(gpu) if gpu else None
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
    """Ask the nodes for their GPUs and, unless it is here, for the model.

    Raises NodeError and RequestError: nobody has GPUs, or the model.
    """
    site = Site(session.inventory, observe.observe(session.inventory, session.transport, []))
    cluster = _cluster(site, link)
    read = here or _model_there(session, site, name)
    return Inputs(name=read[0], model=read[1], weight_bytes=read[2], cluster=cluster)


def _model_there(session: Session, site: Site, name: str) -> Model:
    """Return the model as the first node has it whole."""
    said = by_node(
        session.transport,
        [*preflight.read_config(site, name), *preflight.list_files(site, name)],
    )
    for config, files in (answers for answers in said.values() if len(answers) == 2):
        seen = models.parse_look(config)
        size = _size(files)
        if seen.config is not None and size:
            return name, architecture_of(seen.config), size
    raise RequestError(
        f"no node has the model {name} whole",
        hint="say what it is: `--config FILE --weights-bytes N`",
    )


def _size(answer: Answer) -> int:
    """Return the bytes of a model's safetensors; 0 where one is missing, or there are none."""
    try:
        files = models.parse_files(answer) or {}
    except UnreadableAnswer:
        return 0
    sizes = [size for path, size in files.items() if path.endswith(_WEIGHTS)]
    return sum(sizes) if sizes and min(sizes) > 0 else 0


def _cluster(site: Site, link: Link) -> Cluster:
    hosts = [host for node in site.inventory.nodes if (host := _host(site, node))]
    if not hosts:
        raise RequestError(
            "no node of this cluster has GPUs that tell their memory",
            hint="describe them, and the model: `--gpu NAME --gpus-per-node N --nodes N"
            " --config FILE --weights-bytes N`",
        )
    return Cluster(hosts=tuple(hosts), link=link)


def _host(site: Site, node: Node) -> Host | None:
    """Return a node with the GPUs that it uses; None when it has none.

    nvidia-smi counts what the driver keeps for itself; CUDA reports less, by our table.
    """
    facts = site.facts.get(node.name)
    used = facts.used(node) if facts else ()
    if not used:
        return None
    smallest = min(used, key=lambda gpu: gpu.memory_total)
    known = expected.load().gpu(smallest.name)
    total = smallest.memory_total / 1024
    reported = known.reported(smallest.name) if known else None
    near = reported is not None and abs(reported - total) < total / 10
    memory = reported if near and reported is not None else total
    return Host(name=node.name, gpus=len(used), gpu=Gpu(name=smallest.name, memory_gib=memory))
