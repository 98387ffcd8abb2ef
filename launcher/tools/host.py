"""One question that tells everything about a node before the first write, and what it tells.

The probe is a POSIX shell script that only reads, so it is safe at any moment. `host_read` reads
its answer.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from launcher.core import shell
from launcher.core.domain import Argv, Node
from launcher.core.sizes import told
from launcher.tools import docker as docker_tool
from launcher.tools.compile_cache import CompileCache
from launcher.tools.survey import GpuProcess, Survey

DEADLINE = 15  # seconds for each part, as `shell/probe.sh` has it
UNFINISHED: Final = r"^unfinished (copy|download): ([0-9]{1,15}) KiB of (.+)$"
_UNFINISHED_PART = "unfinished"
_HUB = re.compile(r".*/hub/models--(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A model, by its name or its folder, of which a `copy` of ours or a `download` is not
    finished, and the bytes that are there of it.
    """

    kind: str
    model: str
    bytes: int

    @property
    def words(self) -> str:
        """What there is of it, and the command that goes on with it."""
        if self.kind == "copy":
            return (
                f"a copy of {self.model} is not finished, {told(self.bytes)} so far: `vlaunch model"
                f" copy {self.model}` continues it"
            )
        return (
            f"a download of {self.model} runs or was interrupted, {told(self.bytes)} so far:"
            f" `vlaunch model pull {self.model}` continues it"
        )


def unfinished_script(hf_home: str) -> str:
    """Return the shell that lists unfinished models, to run behind `probe` (its `more`)."""
    program = shlex.quote(shell.program("models_unfinished"))
    return f"sh_c {_UNFINISHED_PART} {program} {shlex.quote(hf_home)}\n"


def read_unfinished(text: str | None) -> tuple[Unfinished, ...]:
    """Read the answer of `unfinished_script`; nothing where it was not run, or failed."""
    matches = re.finditer(UNFINISHED, text or "", re.MULTILINE)
    return tuple(
        Unfinished(kind=match[1], model=_model_of(match[3]), bytes=int(match[2]) * 1024)
        for match in matches
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address on a network interface; `up` is the kernel's word for the link."""

    interface: str
    ip: str
    prefix: int
    up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as `nvidia-smi` reports it; memory in MiB."""

    index: int
    name: str
    memory_total: int
    memory_used: int
    driver: str
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDir:
    """Where the cluster's files lie or will lie on a node: whether the login may write there,
    whether the file system is read-only, and how many bytes are free.
    """

    writable: bool
    read_only: bool
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a node was when it was looked at.

    A part that could not be asked is `None` and its words are in `said`; `late` are the parts that
    were ended after `DEADLINE` seconds; `lost_gpus` is what a driver says of GPUs that it cannot
    reach any more.

    `podman` is true where that is what calls itself Docker; `security` are `docker info`'s options,
    such as `rootless` and `selinux`; `selinux` has the labels of mounted folders where SELinux
    enforces, `None` where it does not.

    `amd_renders` has for each AMD GPU the minor number of its render node, `/dev/dri/renderD128`
    and so on; `given` are the NVIDIA GPUs that clusters' containers have.

    `secret_names` are the secrets on its disk, `in_memory` those in memory, or `None` where the
    cluster has no folder there; `memory` is where such a folder may be, empty where there is no
    such place; `folders` are all that are there. `certificates` are the public ones of its agent
    (PEM), the authority's first.
    """

    home: str = "/root"
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
    memory: str = ""
    in_memory: tuple[str, ...] | None = None
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
    given: tuple[docker_tool.Given, ...] = ()
    compiled: CompileCache | None = None
    unfinished: tuple[Unfinished, ...] = ()
    said: Mapping[str, str] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    survey: Survey | None = None

    def container(self, name: str) -> docker_tool.Container | None:
        """Return the cluster's container with this name, if it is there."""
        return next((each for each in self.containers if each.name == name), None)

    def used(self, node: Node) -> tuple[Gpu, ...]:
        """Return the GPUs that a node uses, as far as they are there: those it names, or as many as
        it says, which are the first ones.
        """
        there = self.gpus or ()
        if not node.gpu_ids:
            return there[: node.gpus]
        return tuple(gpu for gpu in there if {str(gpu.index), gpu.uuid} & set(node.gpu_ids))

    def interface_of(self, ip: str) -> str | None:
        """Return the interface that carries an address."""
        return next((each.interface for each in self.addresses or () if each.ip == ip), None)


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
    more: str = "",
) -> Argv:
    """Ask a node everything in one round trip; it changes nothing.

    With `survey` it also tells what it is made of (`HostFacts.survey`), and how long it takes to
    look up the names of `addresses`. A line on standard input is then taken as the launcher's
    clock at the moment it was sent, in seconds since 1970. `more` is
    shell that runs last, with `$hf` the Hugging Face home and `"$@"` what starts docker; what it
    prints is left alone.
    """
    asked = shell.program("survey") if survey else shell.program("probe")
    return (
        "sh",
        "-c",
        asked + more,
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


def _model_of(folder: str) -> str:
    """Return what users call the model of a folder: by its name where it is of a cache."""
    match = _HUB.fullmatch(folder)
    return match[1].replace("--", "/") if match else folder
