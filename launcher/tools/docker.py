"""What we say to the docker command line, and what it tells; `docker_read` reads its answers.

Every builder takes `docker`, the node's own way to call it (`("docker",)` or `("sudo", "-n",
"docker")`).
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

Role = Literal["head", "worker", "probe"]

# A tmpfs without a size holds half of the memory (tmpfs(5)); Docker's own /dev/shm would have 64
# MB.
_SHM: Final[Mapping[object, Argv]] = {
    "private": ("--ipc", "private", "--tmpfs", "/dev/shm"),
    "host": ("--ipc", "host"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """One container to be; `gpus` is a device request, as `gpu_request` writes it.

    `shm` is `"private"` (a /dev/shm of its own, which may take half of the node's memory and
    vanishes with the container), `"host"` (the host's, where segments of killed processes stay), or
    a size in bytes.

    `restart` is `always`: a dockerd that comes back after SIGKILL, without live-restore, stops the
    containers that it finds and takes that for an operator's `docker stop` (moby's `restore` and
    `killWithSignal`), after which `unless-stopped` never starts them again.
    """

    name: str
    image: str
    command: Argv
    cluster: str
    role: Role
    node: str
    entrypoint: str = "/bin/sh"
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
        """Twelve hex digits that change when, and only when, the container would be started
        differently.
        """
        bare = run(
            (),
            replace(self, labels={key: value for key, value in self.labels.items() if key != SPEC}),
        )
        return hashlib.sha256(json.dumps(bare).encode()).hexdigest()[:12]

    def labelled(self) -> ContainerSpec:
        """Return the spec with its own hash as a label: how a later run knows that nothing has
        changed.
        """
        return replace(self, labels={**self.labels, SPEC: self.hash})


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container as a node reports it.

    `status` is Docker's word: running, exited, created, restarting, dead, paused.
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
        """True when its main process runs and is not in a restart loop right now."""
        return self.status == "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image as a node reports it.

    `identity` is equal on two nodes exactly when layers and configuration are.
    `layers` are the SHA-256 of the unpacked layers, the lowest first, `size` the bytes of all.
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
    def root(self) -> bool:
        """True when its containers run as root, unless told otherwise."""
        return self.user.partition(":")[0] in ("", "0", "root")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The GPUs that a running container of any cluster asked for: so many, which are the host's
    first ones (-1: all), or those that `ids` names by index or UUID.
    """

    container: str
    cluster: str
    count: int = 0
    ids: tuple[str, ...] = ()

    def has(self, index: int, uuid: str) -> bool:
        """True when a GPU of the host is among them."""
        if self.count:
            return self.count < 0 or index < self.count
        return bool({str(index), uuid} & set(self.ids))


def run(docker: Argv, spec: ContainerSpec, *, once: bool = False, attached: bool = False) -> Argv:
    """Start a detached container in the host's network (`docker run`); with `once` wait for its end
    and leave nothing of it; `attached` does so too, for who ends and starts it by itself.
    """
    labels = {**spec.labels, CLUSTER: spec.cluster, ROLE: spec.role, NODE: spec.node}
    shm = _SHM.get(spec.shm) or ("--shm-size", str(spec.shm))
    words = (
        "--network",
        "host",
        *shm,
        *(() if once or attached else ("--restart", spec.restart)),
        *(("--gpus", spec.gpus) if spec.gpus else ()),
        *(("--privileged",) if spec.privileged else ()),
        *_each("--device", spec.devices),
        *_each("--cap-add", spec.cap_add),
        *_each("--group-add", spec.groups),
        *_each("--security-opt", spec.security),
        *_each("--ulimit", _assignments(spec.ulimits)),
        *(("--log-driver", spec.log_driver) if spec.log_driver else ()),
        *_each("--log-opt", _assignments(spec.log_options)),
        *_each("--volume", (_volume(each) for each in spec.mounts if not _must_exist(each))),
        *_each("--mount", (_bind(each) for each in spec.mounts if _must_exist(each))),
        *_each("--env", _assignments(spec.env)),
        *_each("--label", _assignments(labels)),
        "--entrypoint",
        spec.entrypoint,
        spec.image,
        *spec.command,
    )
    if once:
        return _once(docker, spec.name, ("--interactive", *words))
    how = "--rm" if attached else "--detach"
    return (*docker, "run", how, "--name", spec.name, *words)


def throw_away(
    docker: Argv,
    image: str,
    *argv: str,
    cluster: str,
    node: str,
    options: Argv = ("--network", "none"),
) -> Argv:
    """Run a short command in a container of an image that is already on the node, and leave nothing
    of it.
    """
    labels = _each("--label", (f"{CLUSTER}={cluster}", f"{NODE}={node}", f"{ROLE}=probe"))
    words = ("--pull", "never", *options, *labels, "--entrypoint", argv[0], image, *argv[1:])
    return _once(docker, f"vlaunch-{cluster}-{node}-probe", words)


def _once(docker: Argv, name: str, words: Argv) -> Argv:
    """Run a container that ends with its command, and with whoever waits for it.

    The main process of a container ignores the TERM that `docker run` hands on, unless it has a
    handler; and the KILL that follows, or the loss of a `docker run` under sudo, ends the client
    alone. So whoever is told to end removes the container. The shell's number in its name lets two
    of them run at once. `exec 3<&0`: a command behind `&` would read nothing.
    """
    end = shlex.quote(f'{shlex.join(remove(docker))} "$n" >/dev/null 2>&1; wait')
    start = f'{shlex.join((*docker, "run", "--rm", "--name"))} "$n" "$@"'
    return (
        "sh",
        "-c",
        f'n=$1-$$; shift; exec 3<&0; trap {end} TERM; {start} <&3 3<&- & wait "$!"',
        "once",
        name,
        *words,
    )


def remove(docker: Argv, *names: str) -> Argv:
    """Stop and remove containers; a name that is not there is an error of `docker rm` unless none
    is left.
    """
    return (*docker, "rm", "--force", "--volumes", *names)


def pull(docker: Argv, image: str) -> Argv:
    """Fetch an image from its registry."""
    return (*docker, "pull", "--quiet", image)


def tag(docker: Argv, image: str, name: str) -> Argv:
    """Give an image one more name."""
    return (*docker, "tag", image, name)


def exec_(docker: Argv, name: str, *argv: str, stdin: bool = False) -> Argv:
    """Run a command in a running container."""
    return (*docker, "exec", *(("--interactive",) if stdin else ()), name, *argv)


def bounded(argv: Argv, seconds: float) -> Argv:
    """Wrap a command for a container so that it ends at its deadline, or as soon as its standard
    input is closed.

    Ending `docker exec` on the node does not end what it started in the container; but it closes
    that command's input.
    """
    # A `timeout` that receives the signal while it forks exits without its child (seen in coreutils
    # 9.1), so the signal goes to its process group.
    end = 'kill -s TERM -- "-$p" || kill "$p"'
    watch = (
        f't=$1; shift; timeout -k 5 "$t" "$@" </dev/null & p=$!; (cat; {end}) <&3 >/dev/null'
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
    """Print a container's log, standard output and error together."""
    options = (
        *(("--follow",) if follow else ()),
        *(() if tail is None else ("--tail", str(tail))),
        *(("--since", since) if since else ()),
    )
    return ("sh", "-c", 'exec "$@" 2>&1', "logs", *docker, "logs", *options, name)


def inspect(docker: Argv, *names: str) -> Argv:
    """Print everything Docker knows about containers, as JSON."""
    return (*docker, "inspect", "--type", "container", *names)


def run_python(docker: Argv, image: str, program: str, *, cluster: str, node: str) -> Argv:
    """Run a short Python program in a throw-away container."""
    return throw_away(docker, image, "python3", "-c", program, cluster=cluster, node=node)


def gpu_request(node: Node) -> str:
    """Return what `--gpus` asks for: so many of the host's GPUs, which are its first ones, or those
    that are named. The inner quotes are for a list that Docker reads as CSV
    (https://docs.docker.com/engine/containers/resource_constraints/#gpu).
    """
    return f'"device={",".join(node.gpu_ids)}"' if node.gpu_ids else str(node.gpus)


# CUresult of `cuInit`, which needs more than the driver that nvidia-smi talks to.
_CUDA = 'import ctypes; print("cuInit", ctypes.CDLL("libcuda.so.1").cuInit(0))'


def try_gpus(node: Node, image: str, *, cluster: str) -> Argv:
    """Print a line for each NVIDIA GPU that a throw-away container gets when it asks for those of a
    node, and then what CUDA says when it is initialized (`cuInit 0`).
    """
    options = ("--network", "none", "--gpus", gpu_request(node))
    words = ("sh", "-c", f"nvidia-smi --list-gpus && python3 -c {shlex.quote(_CUDA)}")
    return throw_away(node.docker, image, *words, cluster=cluster, node=node.name, options=options)


def list_ids(docker: Argv, cluster: str) -> Argv:
    """Print the ids of all containers of a cluster, whatever their state."""
    return (
        *docker,
        "ps",
        "--all",
        "--quiet",
        "--no-trunc",
        "--filter",
        f"label={CLUSTER}={cluster}",
    )


def differences(there: Container, spec: ContainerSpec, image_env: Mapping[str, str]) -> list[str]:
    """Say in words how a running container differs from what it should be; never empty when the
    hashes differ.
    """
    said = [f"image {there.image} → {spec.image}"] if there.image != spec.image else []
    given = {name for name, value in there.env.items() if image_env.get(name) != value}
    for name in sorted({*given, *spec.env}):
        before, after = there.env.get(name), spec.env.get(name)
        if before != after:
            said.append(f"env {name}: {_shown(before)} → {_shown(after)}")
    if there.argv != spec.command:
        said.append(f"command: {_changed_words(there.argv, spec.command)}")
    if there.privileged != spec.privileged:
        said.append("it becomes privileged" if spec.privileged else "it is no longer privileged")
    if there.labels.get("vlaunch.secrets") != spec.labels.get("vlaunch.secrets"):
        said.append("a secret has another value")
    return said or ["devices, rights, mounts, limits or log of its container"]


def _changed_words(before: Argv, after: Argv) -> str:
    gone = [word for word in before if word not in after]
    new = [word for word in after if word not in before]
    if not gone and not new:
        return "its words in another order"
    return f"{' '.join(gone) or '(nothing)'} → {' '.join(new) or '(nothing)'}"


def _shown(value: str | None) -> str:
    return "unset" if value is None else value or '""'


def _must_exist(mount: Mount) -> bool:
    return isinstance(mount, ExistingMount)


def _volume(mount: Mount) -> str:
    return f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}"


def _bind(mount: Mount) -> str:
    how = ",readonly" if mount.read_only else ""
    return f"type=bind,source={mount.source},target={mount.target}{how}"


def _assignments(values: Mapping[str, str]) -> Iterator[str]:
    return (f"{name}={value}" for name, value in sorted(values.items()))


def _each(option: str, values: Any) -> tuple[str, ...]:
    return tuple(word for value in values for word in (option, value))
