"""The nouns of discovery: what was asked for, what each host said, and what an inventory of them
should say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.core.domain import Accelerator, Argv, Fabric, Ssh
from launcher.hosts.discovery.local_assets import LocalAssets
from launcher.tools.host import HostFacts
from launcher.tools.survey import Survey

DOCKER: Argv = ("docker",)
HF_HOME = "/data/huggingface"
GID = "NCCL_IB_GID_INDEX"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A host as it was asked for, and what it said.

    `docker` is what starts Docker there; `ssh` only what was asked for; `name` is that of the node,
    once it has one.
    """

    host: str
    facts: HostFacts
    assets: LocalAssets = field(default_factory=LocalAssets)
    docker: Argv = DOCKER
    ssh: Ssh = field(default_factory=Ssh)
    name: str = ""

    @property
    def survey(self) -> Survey:
        """What it is made of; empty when it did not say."""
        return self.facts.survey or Survey()

    @property
    def amd_gpus(self) -> int:
        """AMD's GPUs, as far as they show in either of its two answers."""
        return max(self.assets.amd_gpus, len(self.facts.amd_renders or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Options of the user; `init` chooses the rest. `ssh` applies to all hosts."""

    cluster: str = "vllm"
    image: str | None = None
    hf_home: str | None = None
    accelerator: Accelerator | None = None
    ssh: Ssh = field(default_factory=Ssh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A value, and the lines that say why it and not another one."""

    value: str
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredNode:
    """A node of the inventory to be.

    `gid` is its RoCE v2 index in the GID tables, if all of its devices agree on one.
    """

    host: str
    name: str
    ip: str
    gpus: int
    interface: str
    gpu_ids: tuple[str, ...] = ()
    hca: tuple[str, ...] = ()
    gid: int | None = None
    docker: Argv = DOCKER
    ssh: Ssh = field(default_factory=Ssh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """What to write.

    `summary` describes the hosts, `network` says which networks and devices were passed over and
    why, `gpus` which GPUs.
    """

    cluster: str
    image: Choice
    accelerator: Accelerator
    fabric: Fabric
    hf_home: Choice
    nodes: tuple[DiscoveredNode, ...]
    state_dir: Choice | None = None
    ssh: Ssh = field(default_factory=Ssh)
    summary: tuple[str, ...] = ()
    network: tuple[str, ...] = ()
    docker: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    object_store: Choice | None = None
    rights: Mapping[str, Choice] = field(default_factory=dict)  # `devices` and `cap_add`
    env: Mapping[str, Choice] = field(default_factory=dict)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    engine_why: tuple[str, ...] = ()
    gid_why: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
