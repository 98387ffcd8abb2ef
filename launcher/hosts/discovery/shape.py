"""Data types of discovery: options, scanned hosts, and the inventory to write."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.core.domain import Accelerator, Argv, Fabric, Ssh
from launcher.hosts.discovery.local_assets import LocalAssets
from launcher.tools.host import HostFacts
from launcher.tools.host.survey import Survey

DOCKER: Argv = ("docker",)
HF_HOME = "/data/huggingface"
GID = "NCCL_IB_GID_INDEX"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedHost:
    """A scanned host.

    `docker` is the Docker command on it, `ssh` only the settings from the command line; `name` is
    set once its node has one.
    """

    host: str
    facts: HostFacts
    assets: LocalAssets = field(default_factory=LocalAssets)
    docker: Argv = DOCKER
    ssh: Ssh = field(default_factory=Ssh)
    name: str = ""

    @property
    def survey(self) -> Survey:
        """The host's survey; empty without an answer."""
        return self.facts.survey or Survey()

    @property
    def amd_gpus(self) -> int:
        """The number of AMD GPUs in either of the two answers."""
        return max(self.assets.amd_gpus, len(self.facts.amd_renders or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """Options of `vlaunch init`, which chooses the rest; `ssh` applies to all hosts."""

    cluster: str = "vllm"
    image: str | None = None
    hf_home: str | None = None
    accelerator: Accelerator | None = None
    ssh: Ssh = field(default_factory=Ssh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A value and the reasons for choosing it."""

    value: str
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredNode:
    """A node of the future inventory; `gid` is the RoCE v2 index common to its devices, if any."""

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
    """The inventory to write.

    `summary` describes the hosts, `network` and `gpus` the rejected networks, devices and GPUs.
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
