"""Docker command lines, and the types of their results; `docker_output` parses them.

All builders take `docker`, the node's command prefix (`("docker",)` or `("sudo", "-n", "docker")`).
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from launcher.core.domain import Argv, ExistingMount, Mount, Node

CLUSTER = "vlaunch.cluster"
ROLE = "vlaunch.role"
NODE = "vlaunch.node"
SPEC = "vlaunch.spec"

Role = Literal["head", "worker", "front", "probe"]

# A tmpfs without a size limit holds half of the memory (tmpfs(5)); Docker's /dev/shm has 64 MB.
_SHM: Final[Mapping[object, Argv]] = {
    "private": ("--ipc", "private", "--tmpfs", "/dev/shm"),
    "host": ("--ipc", "host"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """Specification of a container; `gpus` is a device request from `gpu_request`.

    `shm` is `"private"` (its own /dev/shm of up to half of the node's memory, removed with the
    container), `"host"` (the host's, where segments of killed processes remain), or a size in
    bytes.

    `restart` is `always`: without live-restore, a dockerd that restarts after SIGKILL stops all
    containers and treats that as an operator's `docker stop` (moby's `restore` and
    `killWithSignal`), so `unless-stopped` would never start them again.
    """

    name: str
    image: str
    command: Argv
    cluster: str
    role: Role
    node: str
    entrypoint: str = "/bin/sh"
    user: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    shm: int | Literal["private", "host"] = "private"
    gpus: str = ""
    devices: tuple[str, ...] = ()
    cap_add: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    security: tuple[str, ...] = ()
    ulimits: Mapping[str, str] = field(default_factory=dict)
    privileged: bool = False
    log_driver: str = ""
    log_options: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    restart: str = "always"

    @property
    def hash(self) -> str:
        """Twelve hex digits that change exactly when the `docker run` command changes."""
        argv = run(
            (),
            replace(self, labels={key: value for key, value in self.labels.items() if key != SPEC}),
        )
        return hashlib.sha256(json.dumps(argv).encode()).hexdigest()[:12]

    def labelled(self) -> ContainerSpec:
        """Return the spec with its hash as a label, by which later runs detect changes."""
        return replace(self, labels={**self.labels, SPEC: self.hash})


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """Container as reported by a node.

    `status` is Docker's: running, exited, created, restarting, dead, paused.
    """

    name: str
    id: str
    role: str
    node: str
    image: str
    status: str
    spec: str
    exit_code: int
    restarts: int
    env: Mapping[str, str]
    labels: Mapping[str, str]
    error: str = ""
    argv: Argv = ()
    started: str = ""
    privileged: bool = False
    log_driver: str = ""

    @property
    def running(self) -> bool:
        """True when its main process runs and is not in a restart loop."""
        return self.status == "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Image as reported by a node.

    `identity` is equal on two nodes exactly when layers and configuration are equal. `layers` are
    the SHA-256 of the unpacked layers, the lowest first; `size` is their total in bytes.
    """

    id: str
    identity: str
    digests: tuple[str, ...]
    architecture: str
    labels: Mapping[str, str]
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    names: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    size: int = 0

    @property
    def runs_as_root(self) -> bool:
        """True when its containers run as root by default."""
        return self.user.partition(":")[0] in ("", "0", "root")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAllocation:
    """GPUs requested by a running container of any cluster: the host's first `count` (-1: all), or
    those in `ids`, by index or UUID.
    """

    container: str
    cluster: str
    count: int = 0
    ids: tuple[str, ...] = ()

    def includes(self, index: int, uuid: str) -> bool:
        """Return True if a GPU of the host is included."""
        if self.count:
            return self.count < 0 or index < self.count
        return bool({str(index), uuid} & set(self.ids))


def run(docker: Argv, spec: ContainerSpec, *, once: bool = False, attached: bool = False) -> Argv:
    """Start a detached container in the host's network (`docker run`).

    With `once`, wait for its exit and remove it; so does `attached`, whose caller stops and
    restarts it.
    """
    labels = {**spec.labels, CLUSTER: spec.cluster, ROLE: spec.role, NODE: spec.node}
    shm = _SHM.get(spec.shm) or ("--shm-size", str(spec.shm))
    arguments = (
        "--network",
        "host",
        *shm,
        *(() if once or attached else ("--restart", spec.restart)),
        *(("--user", spec.user) if spec.user else ()),
        *(("--gpus", spec.gpus) if spec.gpus else ()),
        *(("--privileged",) if spec.privileged else ()),
        *_repeat_option("--device", spec.devices),
        *_repeat_option("--cap-add", spec.cap_add),
        *_repeat_option("--group-add", spec.groups),
        *_repeat_option("--security-opt", spec.security),
        *_repeat_option("--ulimit", _assignments(spec.ulimits)),
        *(("--log-driver", spec.log_driver) if spec.log_driver else ()),
        *_repeat_option("--log-opt", _assignments(spec.log_options)),
        *_repeat_option(
            "--volume", (_volume(mount) for mount in spec.mounts if not _must_exist(mount))
        ),
        *_repeat_option("--mount", (_bind(mount) for mount in spec.mounts if _must_exist(mount))),
        *_repeat_option("--env", _assignments(spec.env)),
        *_repeat_option("--label", _assignments(labels)),
        "--entrypoint",
        spec.entrypoint,
        spec.image,
        *spec.command,
    )
    if once:
        return _run_attached(docker, spec.name, ("--interactive", *arguments))
    mode = "--rm" if attached else "--detach"
    return (*docker, "run", mode, "--name", spec.name, *arguments)


def run_throwaway(
    docker: Argv,
    image: str,
    *argv: str,
    cluster: str,
    node: str,
    options: Argv = ("--network", "none"),
) -> Argv:
    """Run a short command in a container of an image on the node, and remove the container."""
    labels = _repeat_option("--label", (f"{CLUSTER}={cluster}", f"{NODE}={node}", f"{ROLE}=probe"))
    arguments = ("--pull", "never", *options, *labels, "--entrypoint", argv[0], image, *argv[1:])
    return _run_attached(docker, f"vlaunch-{cluster}-{node}-probe", arguments)


def _run_attached(docker: Argv, name: str, arguments: Argv) -> Argv:
    """Run a container that is removed when its command exits or the client is stopped.

    The main process of a container ignores the TERM that `docker run` forwards, unless it has a
    handler; KILL, or the loss of a `docker run` under sudo, stops only the client. So TERM removes
    the container. The shell's process id in its name allows several at once. `exec 3<&0`: a command
    started with `&` would have no input.
    """
    stop = shlex.quote(f'{shlex.join(remove(docker))} "$n" >/dev/null 2>&1; wait')
    run_command = f'{shlex.join((*docker, "run", "--rm", "--name"))} "$n" "$@"'
    return (
        "sh",
        "-c",
        f'n=$1-$$; shift; exec 3<&0; trap {stop} TERM; {run_command} <&3 3<&- & wait "$!"',
        "once",
        name,
        *arguments,
    )


def remove(docker: Argv, *names: str) -> Argv:
    """Stop and remove containers; unknown names are an error unless no container is left."""
    return (*docker, "rm", "--force", "--volumes", *names)


def pull(docker: Argv, image: str) -> Argv:
    """Pull an image from its registry."""
    return (*docker, "pull", "--quiet", image)


def tag(docker: Argv, image: str, name: str) -> Argv:
    """Add a name to an image."""
    return (*docker, "tag", image, name)


def exec_(docker: Argv, name: str, *argv: str, stdin: bool = False) -> Argv:
    """Run a command in a running container."""
    return (*docker, "exec", *(("--interactive",) if stdin else ()), name, *argv)


def with_deadline(argv: Argv, seconds: float) -> Argv:
    """Wrap a command for a container so that it exits at its deadline or when its input closes.

    Stopping `docker exec` on the node does not stop the command in the container, but closes its
    input.
    """
    # A `timeout` that receives the signal during its fork exits without its child (coreutils 9.1),
    # so the signal goes to the process group.
    stop = 'kill -s TERM -- "-$p" || kill "$p"'
    watch = (
        f't=$1; shift; timeout -k 5 "$t" "$@" </dev/null & p=$!; (cat; {stop}) <&3 >/dev/null'
        " 2>&1 & w=$!; "
    )
    return (
        "sh",
        "-c",
        f"exec 3<&0; {watch}wait $p; c=$?; kill $w 2>/dev/null; exit $c",
        "bounded",
        str(seconds),
        *argv,
    )


def logs(
    docker: Argv, name: str, *, tail: int | None = 100, since: str = "", follow: bool = False
) -> Argv:
    """Print a container's log, with standard output and error combined."""
    options = (
        *(("--follow",) if follow else ()),
        *(() if tail is None else ("--tail", str(tail))),
        *(("--since", since) if since else ()),
    )
    return ("sh", "-c", 'exec "$@" 2>&1', "logs", *docker, "logs", *options, name)


def inspect(docker: Argv, *names: str) -> Argv:
    """Print the details of containers as JSON."""
    return (*docker, "inspect", "--type", "container", *names)


def run_python(docker: Argv, image: str, program: str, *, cluster: str, node: str) -> Argv:
    """Run a short Python program in a throw-away container."""
    return run_throwaway(docker, image, "python3", "-c", program, cluster=cluster, node=node)


def gpu_request(node: Node) -> str:
    """Return the value of `--gpus`: a number of GPUs, or their ids.

    Docker parses the value as CSV, so lists need the inner quotes
    (https://docs.docker.com/engine/containers/resource_constraints/#gpu).
    """
    return f'"device={",".join(node.gpu_ids)}"' if node.gpu_ids else str(node.gpus)


# Prints the CUresult of `cuInit`, which needs more than the driver used by nvidia-smi.
_CUDA = 'import ctypes; print("cuInit", ctypes.CDLL("libcuda.so.1").cuInit(0))'


def list_gpus(node: Node, image: str, *, cluster: str) -> Argv:
    """Print a line per NVIDIA GPU that Docker gives to a container of a node, and then the result
    of initialising CUDA (`cuInit 0`).
    """
    options = ("--network", "none", "--gpus", gpu_request(node))
    command = ("sh", "-c", f"nvidia-smi --list-gpus && python3 -c {shlex.quote(_CUDA)}")
    return run_throwaway(
        node.docker, image, *command, cluster=cluster, node=node.name, options=options
    )


def list_ids(docker: Argv, cluster: str) -> Argv:
    """Print the ids of all containers of a cluster, in any state."""
    return (
        *docker,
        "ps",
        "--all",
        "--quiet",
        "--no-trunc",
        "--filter",
        f"label={CLUSTER}={cluster}",
    )


def describe_differences(
    container: Container, spec: ContainerSpec, image_env: Mapping[str, str]
) -> list[str]:
    """Describe how a container differs from its spec; never empty."""
    differences = (
        [f"image {container.image} → {spec.image}"] if container.image != spec.image else []
    )
    own_env = {name for name, value in container.env.items() if image_env.get(name) != value}
    for name in sorted({*own_env, *spec.env}):
        before, after = container.env.get(name), spec.env.get(name)
        if before != after:
            differences.append(f"env {name}: {_format_value(before)} → {_format_value(after)}")
    if container.argv != spec.command:
        differences.append(f"command: {_changed_arguments(container.argv, spec.command)}")
    if container.privileged != spec.privileged:
        differences.append(
            "it becomes privileged" if spec.privileged else "it is no longer privileged"
        )
    if container.labels.get("vlaunch.secrets") != spec.labels.get("vlaunch.secrets"):
        differences.append("the value of a secret changed")
    return differences or ["devices, capabilities, mounts, limits or logging"]


def _changed_arguments(before: Argv, after: Argv) -> str:
    removed = [argument for argument in before if argument not in after]
    added = [argument for argument in after if argument not in before]
    if not removed and not added:
        return "its arguments in another order"
    return f"{' '.join(removed) or '(nothing)'} → {' '.join(added) or '(nothing)'}"


def _format_value(value: str | None) -> str:
    return "unset" if value is None else value or '""'


def _must_exist(mount: Mount) -> bool:
    return isinstance(mount, ExistingMount)


def _volume(mount: Mount) -> str:
    return f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}"


def _bind(mount: Mount) -> str:
    suffix = ",readonly" if mount.read_only else ""
    return f"type=bind,source={mount.source},target={mount.target}{suffix}"


def _assignments(values: Mapping[str, str]) -> Iterator[str]:
    return (f"{name}={value}" for name, value in sorted(values.items()))


def _repeat_option(option: str, values: Any) -> tuple[str, ...]:
    return tuple(argument for value in values for argument in (option, value))
