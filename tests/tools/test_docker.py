"""Docker command lines, and the parsers of their output."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest

from launcher.core.domain import Argv, Mount, Node
from launcher.core.transport import Command
from launcher.ssh import local
from launcher.ssh.background import RunningCommands
from launcher.tools import docker
from launcher.tools.docker import Container, ContainerSpec
from tests import containers
from tests.simulated import parse_run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "docker"
RECORDED = (FIXTURES / "inspect-ray-head-20.10.json").read_text()
SPEC = ContainerSpec(
    name="vlaunch-c-gpu01",
    image="vllm:1",
    command=("/opt/vlaunch/entry.sh", "ray", "start"),
    cluster="c",
    role="head",
    node="gpu01",
    env={"B": "2", "A": "one two; $(x)"},
    mounts=(Mount(source="/s", target="/t", read_only=True),),
)
# For each field, another value: each must change the hash.
OTHERS: dict[str, Any] = {
    "name": "vlaunch-c-gpu02",
    "image": "vllm:2",
    "command": ("/opt/vlaunch/entry.sh", "ray", "stop"),
    "cluster": "d",
    "role": "worker",
    "node": "gpu02",
    "entrypoint": "/bin/bash",
    "user": "0:0",
    "env": {"A": "1"},
    "mounts": (),
    "shm": 1 << 30,
    "gpus": "8",
    "devices": ("/dev/kfd",),
    "cap_add": ("IPC_LOCK",),
    "groups": ("video",),
    "security": ("seccomp=unconfined",),
    "ulimits": {"memlock": "-1"},
    "privileged": True,
    "log_driver": "local",
    "log_options": {"max-size": "1m"},
    "labels": {"x": "y"},
    "restart": "no",
}


def container(spec: ContainerSpec, **changes: Any) -> Container:
    """Return this spec's container, as reported by Docker."""
    fields = {
        "role": spec.role,
        "node": spec.node,
        "image": spec.image,
        "spec": spec.labels.get(docker.SPEC, ""),
        "env": spec.env,
        "labels": spec.labels,
        "argv": spec.command,
    }
    return containers.container(spec.name, **{**fields, **changes})


def test_docker_run_has_every_field() -> None:
    """As parsed by an independent parser of `docker run`."""
    full = dataclasses.replace(
        SPEC,
        gpus="8",
        devices=("/dev/infiniband",),
        cap_add=("IPC_LOCK",),
        groups=("video",),
        labels={"x": "y=z"},
        ulimits={"stack": "67108864", "memlock": "-1"},
        security=("seccomp=unconfined",),
        privileged=True,
        log_driver="local",
        log_options={"max-size": "1m", "max-file": "2"},
        shm=16 << 30,
    )
    options = parse_run(docker.run((), full))

    assert options["HostConfig"] == {
        "NetworkMode": "host",
        "IpcMode": None,
        "Tmpfs": None,
        "ShmSize": str(16 << 30),
        "Binds": ["/s:/t:ro"],
        "RestartPolicy": {"Name": "always"},
        "CapAdd": ["IPC_LOCK"],
        "Privileged": True,
        "LogConfig": {"Type": "local", "Config": ["max-file=2", "max-size=1m"]},
        "GroupAdd": ["video"],
        "SecurityOpt": ["seccomp=unconfined"],
        "Ulimits": ["memlock=-1", "stack=67108864"],
        "Devices": ["/dev/infiniband"],
        "DeviceRequests": [{"Driver": "", "Capabilities": [["gpu"]], "Count": 8}],
    }
    assert options["Config"] == {
        "Image": "vllm:1",
        "Env": ["A=one two; $(x)", "B=2"],
        "Cmd": ["/opt/vlaunch/entry.sh", "ray", "start"],
        "Entrypoint": ["/bin/sh"],
        "Labels": {
            "x": "y=z",
            "vlaunch.cluster": "c",
            "vlaunch.role": "head",
            "vlaunch.node": "gpu01",
        },
    }
    assert options["Name"] == "/vlaunch-c-gpu01"


@pytest.mark.parametrize(
    ("shm", "ipc", "tmpfs"), [("private", "private", "/dev/shm"), ("host", "host", None)]
)
def test_shared_memory_without_a_size(
    shm: Literal["private", "host"], ipc: str, tmpfs: str | None
) -> None:
    """Its own tmpfs or the host's: `--ipc host` and `--shm-size` exclude each other."""
    mounts = parse_run(
        docker.run(("sudo", "-n", "docker"), dataclasses.replace(SPEC, shm=shm))[3:]
    )["HostConfig"]

    assert (mounts["IpcMode"], mounts["Tmpfs"], mounts["ShmSize"]) == (ipc, tmpfs, None)
    assert mounts["DeviceRequests"] is None


def test_the_hash_test_covers_all_fields() -> None:
    """A new field needs a line in OTHERS."""
    assert OTHERS.keys() == {field.name for field in dataclasses.fields(ContainerSpec)}


@pytest.mark.parametrize("name", OTHERS)
def test_the_hash_changes_with_any_field(name: str) -> None:
    """Any difference in the command recreates the container."""
    assert dataclasses.replace(SPEC, **{name: OTHERS[name]}).hash != SPEC.hash


def test_the_hash_does_not_depend_on_the_order_of_names_nor_on_itself() -> None:
    """The same inventory gives the same hash, even with the spec's own label."""
    turned = dataclasses.replace(SPEC, env=dict(reversed(list(SPEC.env.items()))))

    assert turned.hash == SPEC.hash == SPEC.labelled().hash == SPEC.labelled().labelled().hash
    assert SPEC.labelled().labels[docker.SPEC] == SPEC.hash


def test_the_hash_does_not_depend_on_how_docker_is_called() -> None:
    """Giving a user access to Docker must not restart a cluster."""
    assert docker.run(("sudo", "docker"), SPEC)[2:] == docker.run(("docker",), SPEC)[1:]


def test_differences_are_described() -> None:
    """In terms of the inventory's settings."""
    spec = dataclasses.replace(
        SPEC,
        image="vllm:2",
        env={"A": "1", "C": "3"},
        command=("/opt/vlaunch/entry.sh", "ray", "stop"),
    ).labelled()
    existing = container(SPEC.labelled(), env={**SPEC.env, "PATH": "/bin"})

    assert docker.describe_differences(existing, spec, {"PATH": "/bin"}) == [
        "image vllm:1 → vllm:2",
        "env A: one two; $(x) → 1",
        "env B: 2 → unset",
        "env C: unset → 3",
        "command: start → stop",
    ]


def test_hidden_differences_are_mentioned() -> None:
    """A restart always has a reason."""
    spec = dataclasses.replace(SPEC, cap_add=("IPC_LOCK",)).labelled()

    assert docker.describe_differences(container(SPEC.labelled()), spec, {}) == [
        "devices, capabilities, mounts, limits or logging"
    ]


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [(False, True, "it becomes privileged"), (True, False, "it is no longer privileged")],
)
def test_changed_rights_are_described(before: bool, after: bool, difference: str) -> None:
    """In both directions, including a removed `privileged: true`."""
    existing = container(SPEC.labelled(), privileged=before)
    spec = dataclasses.replace(SPEC, privileged=after).labelled()

    assert docker.describe_differences(existing, spec, {}) == [difference]


def test_a_changed_secret_is_described_without_its_value() -> None:
    """Only the fact of the change."""
    spec = dataclasses.replace(SPEC, labels={"vlaunch.secrets": "b"}).labelled()
    existing = container(dataclasses.replace(SPEC, labels={"vlaunch.secrets": "a"}).labelled())

    assert docker.describe_differences(existing, spec, {}) == ["the value of a secret changed"]


def test_a_variable_that_the_image_sets_to_the_same_value_is_no_difference() -> None:
    """The image's HF_HOME may equal the inventory's."""
    existing = container(SPEC.labelled())
    spec = dataclasses.replace(SPEC, cap_add=("IPC_LOCK",)).labelled()

    assert docker.describe_differences(existing, spec, {"B": "2"}) == [
        "devices, capabilities, mounts, limits or logging"
    ]


def test_an_empty_value_differs_from_none() -> None:
    """`env A: 1 → unset` would be wrong for `A: ""`."""
    existing = container(SPEC.labelled())
    spec = dataclasses.replace(SPEC, env={**SPEC.env, "B": ""}).labelled()

    assert docker.describe_differences(existing, spec, {}) == ['env B: 2 → ""']


def test_reordered_arguments_are_a_difference() -> None:
    """Two exchanged numbers must not read as no difference."""
    existing = container(dataclasses.replace(SPEC, command=("--tp", "1", "--pp", "2")).labelled())
    (difference,) = docker.describe_differences(
        existing, dataclasses.replace(SPEC, command=("--tp", "2", "--pp", "1")).labelled(), {}
    )

    assert "(nothing) → (nothing)" not in difference


def test_builders_of_short_commands() -> None:
    """As typed by users."""
    sudo = ("sudo", "-n", "docker")

    assert docker.remove(sudo, "a", "b") == (*sudo, "rm", "--force", "--volumes", "a", "b")
    assert docker.pull(("docker",), "x:1") == ("docker", "pull", "--quiet", "x:1")
    assert docker.exec_(("docker",), "c", "ls", stdin=True) == (
        "docker",
        "exec",
        "--interactive",
        "c",
        "ls",
    )
    assert docker.inspect(("docker",), "c") == ("docker", "inspect", "--type", "container", "c")
    assert docker.list_ids(("docker",), "c")[-1] == "label=vlaunch.cluster=c"
    assert docker.list_gpus(node(sudo), "x:1", cluster="c")[-5:-1] == (
        "--entrypoint",
        "sh",
        "x:1",
        "-c",
    )
    assert docker.run_python(sudo, "x:1", "pass", cluster="c", node="n")[-3:] == (
        "x:1",
        "-c",
        "pass",
    )


def test_logs_of_both_streams_are_combined() -> None:
    """`docker logs` separates them. Run with a fake docker."""
    argv = docker.logs(
        ("sh", "-c", 'echo "$@"; echo error >&2', "docker"), "c", tail=5, since="1m", follow=True
    )
    done = subprocess.run(argv, capture_output=True, text=True, check=True)

    assert done.stdout == "logs --follow --tail 5 --since 1m c\nerror\n"
    assert done.stderr == ""


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3)])
def test_a_command_with_a_deadline_has_its_own_exit_code(script: str, code: int) -> None:
    """Its output is passed on."""
    argv = docker.with_deadline(("sh", "-c", f"echo out; {script}"), 10)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        # its input stays open: closing it would stop the command
        out = process.stdout.read()

    assert (process.returncode, out) == (code, b"out\n")


def test_a_command_with_a_deadline_is_killed() -> None:
    """Even if its input stays open."""
    with subprocess.Popen(
        docker.with_deadline(("sleep", "60"), 0.2), stdin=subprocess.PIPE
    ) as process:
        assert process.wait(timeout=60) == 124


def test_a_command_with_a_deadline_stops_with_its_input() -> None:
    """Stopping `docker exec` closes the command's input, which is the only signal. The output stays
    open until the command exits.
    """
    argv = docker.with_deadline(("sh", "-c", "echo started; exec sleep 60"), 60)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"

        # this closes its input
        assert process.communicate(timeout=60) == (b"", None)


# A fake Docker: a container that ignores TERM, like a main process without a handler, and a client
# of root, which the user may not signal. Only `rm` stops it.
_DOCKER = """#!/bin/sh
cd "${0%/*}" || exit
case $1 in
  run) echo "$4" >"there.$$"; trap "" TERM; echo up; cat >>given
    until [ -e "gone.$4" ]; do sleep 0.05; done; rm "there.$$" ;;
  rm) shift 3; for each; do touch "gone.$each"; done ;;
esac
"""


def node(docker: Argv) -> Node:
    """A node with a GPU and a fake docker."""
    return Node(name="gpu01", host="gpu01", ip="10.0.0.1", gpus=1, docker=docker)


@pytest.fixture
def stubborn(tmp_path: Path) -> Argv:
    """A docker with containers that stop only when they are removed."""
    program = tmp_path / "docker"
    program.write_text(_DOCKER)
    program.chmod(0o755)
    return (str(program),)


def test_a_temporary_container_is_removed_at_its_deadline(stubborn: Argv, tmp_path: Path) -> None:
    """Stopping the client does not stop the container."""
    argv = docker.list_gpus(node(stubborn), "x:1", cluster="c")
    answer = local.run(
        Command(node="gpu01", argv=argv, timeout=2), marker="@@", running=RunningCommands()
    )

    assert answer.timed_out
    assert answer.out == "up\n"
    (removed,) = tmp_path.glob("gone.*")
    assert removed.name.startswith("gone.vlaunch-c-gpu01-probe-")
    assert list(tmp_path.glob("there.*")) == []


def test_two_temporary_containers_have_two_names() -> None:
    """Two runs may use a node at once."""
    called = ("sh", "-c", 'echo "$@"', "docker")
    argv = docker.run_python(called, "x:1", "pass", cluster="c", node="gpu01")
    command_lines = [
        subprocess.run(argv, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    names = [
        arguments[arguments.index("--name") + 1] for arguments in map(str.split, command_lines)
    ]

    assert all(name.startswith("vlaunch-c-gpu01-probe-") for name in names)
    assert names[0] != names[1]


@pytest.mark.parametrize("code", [0, 3])
def test_a_temporary_container_has_input_and_exit_code(code: int) -> None:
    """And its output is passed on, without other messages."""
    spec = dataclasses.replace(SPEC, role="probe")
    argv = docker.run(("sh", "-c", f"cat; exit {code}", "docker"), spec, once=True)
    done = subprocess.run(argv, input="hold\n", capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (code, "hold\n", "")


def test_a_temporary_container_has_the_clusters_label(stubborn: Argv) -> None:
    """`down` removes containers left behind by a hanging daemon."""
    argv = docker.run_python(stubborn, "x:1", "pass", cluster="c", node="gpu01")

    assert docker.list_ids(stubborn, "c")[-1].removeprefix("label=") in argv
