"""Probe of a node, which runs before the first change, and its result; `host_output` parses it.

The probe is a POSIX shell script that only reads, so it is safe at any time.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from launcher.core import shell
from launcher.core.domain import Argv, Node
from launcher.core.sizes import format_size
from launcher.tools import docker as docker_tool
from launcher.tools.compile_cache import CompileCache
from launcher.tools.host.survey import GpuProcess, Survey

DEADLINE = 15  # seconds per part, as in `shell/probe.sh`
UNFINISHED: Final = r"^unfinished (copy|download): ([0-9]{1,15}) KiB of (.+)$"
_UNFINISHED_PART = "unfinished"
_HUB = re.compile(r".*/hub/models--(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedModel:
    """Model with an unfinished `copy` or `download`, by name or folder, and its bytes so far."""

    kind: str
    model: str
    bytes: int

    @property
    def summary(self) -> str:
        """Progress so far, and the command that continues."""
        if self.kind == "copy":
            return (
                f"a copy of {self.model} is incomplete, {format_size(self.bytes)} so far:"
                f" `vlaunch model copy {self.model}` continues it"
            )
        return (
            f"a download of {self.model} is running or was interrupted, {format_size(self.bytes)}"
            f" so far: `vlaunch model pull {self.model}` continues it"
        )


def unfinished_script(hf_home: str) -> str:
    """Return the shell code that lists unfinished models, for `extra_script` of `probe`."""
    program = shlex.quote(shell.program_text("models_unfinished"))
    return f"sh_c {_UNFINISHED_PART} {program} {shlex.quote(hf_home)}\n"


def parse_unfinished(text: str | None) -> tuple[UnfinishedModel, ...]:
    """Parse the output of `unfinished_script`; empty if it did not run or failed."""
    matches = re.finditer(UNFINISHED, text or "", re.MULTILINE)
    return tuple(
        UnfinishedModel(kind=match[1], model=_model_name(match[3]), bytes=int(match[2]) * 1024)
        for match in matches
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address on a network interface; `up` is the state of the link."""

    interface: str
    ip: str
    prefix: int
    up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """GPU as reported by `nvidia-smi`; memory in MiB."""

    index: int
    name: str
    memory_total: int
    memory_used: int
    driver: str
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDir:
    """State directory of a cluster on a node, which may not exist yet: whether the SSH user can
    write there, whether the file system is read-only, and the free bytes.
    """

    writable: bool
    read_only: bool
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Result of the probe of a node.

    Failed parts are `None`, with their messages in `part_errors`; `timed_out_parts` were stopped
    after `DEADLINE` seconds. `lost_gpus` has the driver's messages about GPUs that it has lost.

    `state_base` is the parent of the clusters' state directories: the node's own one where nodes
    may share a home.

    `podman` is true if the `docker` command is Podman's; `security` has the security options of
    `docker info`, such as `rootless` and `selinux`; `selinux` has the labels of mounted folders,
    `None` unless SELinux is enforcing.

    `amd_renders` has the minor number of the render node (`/dev/dri/renderD128`, …) of each AMD
    GPU; `gpu_allocations` are the NVIDIA GPUs used by containers of all clusters.

    `secret_names` are the secrets on disk, `secrets_in_memory` those in memory, `None` without a
    folder there; `memory_dir` is the possible parent of such folders, empty if there is none;
    `folders` are the existing ones. `certificates` are the public certificates of the agent (PEM),
    the authority's first; `front_certificate` is that of the front.
    """

    home: str = "/root"
    state_base: str = ""
    user: str = ""
    hostname: str = ""
    addresses: tuple[Address, ...] | None = None
    listening: frozenset[tuple[str, int]] | None = None
    disk_free: int | None = None
    docker_disk_free: int | None = None
    infiniband: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] | None = None
    lost_gpus: tuple[str, ...] = ()
    gpu_processes: tuple[GpuProcess, ...] | None = None
    amd_renders: tuple[int | None, ...] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    has_directory: bool = False
    token: str = field(default="", repr=False)
    secret_names: tuple[str, ...] = ()
    certificates: str = ""
    front_certificate: str = ""
    memory_dir: str = ""
    secrets_in_memory: tuple[str, ...] | None = None
    folders: tuple[str, ...] = ()
    docker_version: str | None = None
    runtimes: tuple[str, ...] = ()
    log_driver: str = ""
    toolkit: bool = False
    podman: bool = False
    security: tuple[str, ...] = ()
    state: StateDir | None = None
    selinux: Mapping[str, str] | None = None
    images: Mapping[str, docker_tool.Image | None] = field(default_factory=dict)
    containers: tuple[docker_tool.Container, ...] = ()
    gpu_allocations: tuple[docker_tool.GpuAllocation, ...] = ()
    compile_cache: CompileCache | None = None
    unfinished: tuple[UnfinishedModel, ...] = ()
    part_errors: Mapping[str, str] = field(default_factory=dict)
    timed_out_parts: frozenset[str] = frozenset()
    survey: Survey | None = None

    def container(self, name: str) -> docker_tool.Container | None:
        """Return the cluster's container with this name, if any."""
        return next((container for container in self.containers if container.name == name), None)

    def used_gpus(self, node: Node) -> tuple[Gpu, ...]:
        """Return the existing GPUs that a node uses: those in `gpu_ids`, or the first `gpus`."""
        gpus = self.gpus or ()
        if not node.gpu_ids:
            return gpus[: node.gpus]
        return tuple(gpu for gpu in gpus if {str(gpu.index), gpu.uuid} & set(node.gpu_ids))

    def interface_of(self, ip: str) -> str | None:
        """Return the interface with an address."""
        return next(
            (address.interface for address in self.addresses or () if address.ip == ip), None
        )


def probe(
    docker: Argv,
    *,
    cluster: str,
    state_dir: str,
    hf_home: str,
    accelerator: str,
    images: tuple[str, ...],
    addresses: tuple[str, ...] = (),
    survey: bool = False,
    extra_script: str = "",
) -> Argv:
    """Query all facts of a node in one round trip, without changing anything.

    With `survey`, include `HostFacts.survey` and the time to look up the names of `addresses`; the
    standard input is then the launcher's clock when the command was sent, in seconds since 1970.
    `extra_script` is shell code that runs last, with the Hugging Face home in `$hf` and the docker
    command in `"$@"`.
    """
    program = shell.program_text("survey") if survey else shell.program_text("probe")
    return (
        "sh",
        "-c",
        program + extra_script,
        "probe",
        cluster,
        state_dir,
        hf_home,
        accelerator,
        " ".join(addresses),
        str(len(images)),
        *images,
        *docker,
    )


def _model_name(folder: str) -> str:
    """Return the model name for a folder of a Hugging Face cache, else the folder."""
    match = _HUB.fullmatch(folder)
    return match[1].replace("--", "/") if match else folder
