"""`scripts/run_cluster.sh` with a fake docker: its arguments, errors, containers and secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.core.domain import RaySettings
from launcher.tools.image import RAY_EXTRAS

pytestmark = pytest.mark.processes

_SCRIPT = Path(__file__).parents[2] / "scripts" / "run_cluster.sh"
_HEAD = ("IMAGE", "10.0.0.11", "--head", ".")
_WORKER = ("IMAGE", "10.0.0.20", "--worker", ".")

# Records its arguments, one call a line; prints what a test wrote to files.
_DOCKER = r"""#!/bin/bash
printf '%q ' "$@" >>"$FAKE/calls"; echo >>"$FAKE/calls"
case "$1 $2" in
  "version ") [ ! -f "$FAKE/down" ] || { cat "$FAKE/down"; exit 1; } ;;
  "container inspect") [ -f "$FAKE/exists" ] ;;
  "inspect --format") cat "$FAKE/restarts" 2>/dev/null || echo 0 ;;
  "run --rm") cat "$FAKE/ray" 2>/dev/null || echo /usr/bin/ray ;;
  "run --detach") [ ! -f "$FAKE/refusal" ] || { cat "$FAKE/refusal" >&2; exit 125; } ;;
  "exec "*) cat "$FAKE/nodes" 2>/dev/null || echo 10.0.0.11 10.0.0.12 ;;
  "logs --tail") echo "the last line of Ray" ;;
  "ps --all") cat "$FAKE/ids" 2>/dev/null ;;
esac
"""
# 10.0.0.11 and 10.0.1.11 are this machine's; 10.0.0.20 is reached from 10.0.0.11.
_IP = r"""#!/bin/sh
case "$*" in
  "-o route get 10.0.0.11") echo 'local 10.0.0.11 dev lo src 10.0.0.11 uid 0 \    cache' ;;
  "-o route get 10.0.0.20") echo '10.0.0.20 dev eth1 src 10.0.0.11 uid 0 \    cache' ;;
  "-o route get 10.0.0.21") echo '10.0.0.21 via 10.0.0.1 dev eth1 src 10.0.0.11 \    cache' ;;
  "-o route get "*) echo 'RTNETLINK answers: Network is unreachable' >&2; exit 2 ;;
  "-o -4 addr show to 10.0.0.11") echo '3: eth1    inet 10.0.0.11/24 scope global eth1' ;;
  "-o -4 addr show to 10.0.1.11") echo '4: ib0    inet 10.0.1.11/24 scope global ib0' ;;
  "-br -4 addr") echo 'eth1  UP  10.0.0.11/24' ;;
esac
"""


@dataclass(frozen=True)
class Machine:
    """A machine with fake programs; `fake` holds what they print."""

    root: Path

    @property
    def fake(self) -> Path:
        return self.root / "fake"

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run the script."""
        environment = {
            **os.environ,
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "FAKE": str(self.fake),
        }
        return subprocess.run(
            ["bash", str(_SCRIPT), *argv],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def calls(self, *start: str) -> list[list[str]]:
        """Return the arguments of the docker commands that start with these words."""
        file = self.fake / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        split = 'eval "words=($1)"; printf "%s\\0" "${words[@]}"'
        calls = [
            subprocess.run(
                ["bash", "-c", split, "bash", line], capture_output=True, text=True, check=True
            ).stdout.split("\0")[:-1]
            for line in lines
        ]
        return [call for call in calls if call[: len(start)] == list(start)]

    def started(self, *argv: str) -> list[str]:
        """Run the script, which must succeed; return its `docker run`."""
        ran = self.run(*argv)
        assert ran.returncode == 0, ran.stderr
        (call,) = self.calls("run", "--detach")
        return call

    def secrets(self, mode: int = 0o600, **values: str) -> str:
        """Write a folder of secrets; return its path."""
        folder = self.root / "secrets"
        folder.mkdir()
        for name, value in values.items():
            (folder / name).write_text(value)
            (folder / name).chmod(mode)
        return str(folder)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for name in ("bin", "fake"):
        (tmp_path / name).mkdir()
    for name, text in (("docker", _DOCKER), ("ip", _IP)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return Machine(tmp_path)


def _values(call: Sequence[str], option: str) -> list[str]:
    return [value for name, value in pairwise(call) if name == option]


def test_the_head(machine: Machine) -> None:
    """Detached, restarted, on the host's network, under HEAD_IP."""
    call = machine.started(*_HEAD)

    assert {"--detach", "--init"} <= set(call)
    assert _values(call, "--restart") == ["always"]
    assert _values(call, "--network") == ["host"]
    assert _values(call, "--gpus") == ["all"]
    assert _values(call, "--volume") == [f"{machine.root}:/root/.cache/huggingface"]
    assert {
        "VLLM_HOST_IP=10.0.0.11",
        "NCCL_SOCKET_IFNAME==eth1",
        "GLOO_SOCKET_IFNAME=eth1",
        "RAY_ADDRESS=10.0.0.11:6379",
    } <= set(_values(call, "-e"))
    ray = "ray start --block --node-ip-address 10.0.0.11 --head --port 6379"
    assert " ".join(call).endswith(ray)


def test_a_worker(machine: Machine) -> None:
    """Its address is the one from which HEAD_IP is reached."""
    call = machine.started("--port=7000", *_WORKER)

    assert "VLLM_HOST_IP=10.0.0.11" in call
    ray = "ray start --block --node-ip-address 10.0.0.11 --address 10.0.0.20:7000"
    assert " ".join(call).endswith(ray)


@pytest.mark.parametrize(
    "argv", [("-e", "VLLM_HOST_IP=10.0.1.11"), ("--env=VLLM_HOST_IP=10.0.1.11",)]
)
def test_vllm_host_ip_selects_address_and_interface(
    machine: Machine, argv: tuple[str, ...]
) -> None:
    """As with vLLM's own script."""
    (machine.fake / "nodes").write_text("10.0.0.20 10.0.1.11\n")
    call = machine.started(*_WORKER, *argv)

    assert {"VLLM_HOST_IP=10.0.1.11", "GLOO_SOCKET_IFNAME=ib0"} <= set(call)
    assert _values(call, "--node-ip-address") == ["10.0.1.11"]


def test_further_arguments_reach_docker_unchanged(machine: Machine) -> None:
    """Before the image, after the script's own, so that they win."""
    extra = ["-v", "/a b:/c", "--shm-size=1g", "-e", "TEXT=it's $HOME `id` \\ & *", "-eEMPTY="]
    call = machine.started(*_HEAD, *extra)

    start = call.index("-v")
    assert call[start : start + len(extra)] == extra
    assert call.index("--shm-size") < start < call.index("IMAGE")


def test_rdma(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices, the right to lock memory and no limit on it; an error without the devices."""
    for exists in (False, True):
        shell = machine.root / "bash_env"
        shell.write_text(
            '[() { if test "$*" = "-d /dev/infiniband ]"; then '
            + f'{str(exists).lower()}; else builtin [ "$@"; fi; }}\n'
        )
        monkeypatch.setenv("BASH_ENV", str(shell))
        ran = machine.run("--rdma", *_HEAD)
        if not exists:
            assert ran.returncode == 2
            assert "no /dev/infiniband" in ran.stderr
    (call,) = machine.calls("run", "--detach")

    assert _values(call, "--device") == ["/dev/infiniband"]
    assert _values(call, "--cap-add") == ["IPC_LOCK"]
    assert _values(call, "--ulimit") == ["memlock=-1", "stack=67108864"]


@pytest.mark.parametrize("option", ["--gpus=2", "--device=nvidia.com/gpu=all"])
def test_chosen_gpus_replace_all(machine: Machine, option: str) -> None:
    """Docker would add two `--gpus` up."""
    assert "all" not in _values(machine.started(*_HEAD, option), "--gpus")


def test_other_accelerators(machine: Machine) -> None:
    """AMD's devices; on CPUs a slot for Ray."""
    amd = machine.started("--accelerator", "amd", *_HEAD)
    (machine.fake / "calls").unlink()
    cpu = machine.started("--accelerator", "cpu", *_HEAD)

    assert _values(amd, "--device") == ["/dev/kfd", "/dev/dri"]
    assert _values(cpu, "--num-gpus") == ["1"]
    assert "--gpus" not in amd + cpu


def test_secrets_are_mounted_and_never_passed(machine: Machine) -> None:
    """Docker gets their paths; the container's first process exports the rest."""
    values = {"RAY_AUTH_TOKEN": "t0ken", "HF_TOKEN": "hf_value", "MY_KEY": "it's a key"}
    folder = machine.secrets(**values)
    call = machine.started("--secrets", folder, *_HEAD)

    assert f"{folder}:/run/secrets:ro" in _values(call, "--volume")
    assert {
        "RAY_AUTH_MODE=token",
        "RAY_AUTH_TOKEN_PATH=/run/secrets/RAY_AUTH_TOKEN",
        "HF_TOKEN_PATH=/run/secrets/HF_TOKEN",
    } <= set(_values(call, "-e"))
    calls = (machine.fake / "calls").read_text()
    assert not [value for value in values.values() if value in calls]
    entry = call[call.index("-c") + 1].replace("/run/secrets", folder)
    show = 'echo "$MY_KEY ${HF_TOKEN-unset} ${RAY_AUTH_TOKEN-unset}"'
    ran = subprocess.run(
        ["bash", "-c", entry, "bash", "sh", "-c", show], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "it's a key unset unset\n"


def test_an_open_ray_is_a_warning(machine: Machine) -> None:
    """Without a token anyone can run programs."""
    assert "warning: any host that reaches 10.0.0.11:6379" in machine.run(*_HEAD).stderr


def test_the_next_command_reads_the_api_key_from_its_file(machine: Machine) -> None:
    """`docker exec` starts no shell that has it."""
    ran = machine.run("--secrets", machine.secrets(VLLM_API_KEY="value"), *_HEAD)

    assert "Ray lists 10.0.0.11 10.0.0.12\n" in ran.stdout
    assert "VLLM_API_KEY=$(cat /run/secrets/VLLM_API_KEY) exec vllm serve" in ran.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "got 0 arguments"),
        (_HEAD[:3], "got 3 arguments"),
        (("IMAGE", "10.0.0.11", "worker", "."), "--head or --worker, not worker"),
        (("--head", *_HEAD), "--head must follow IMAGE and HEAD_IP"),
        (("IMAGE", "gpu01", "--head", "."), "HEAD_IP is not an IPv4 address: gpu01"),
        (("IMAGE", "10.0.0.11", "--head", "/not/there"), "HF_HOME is not a directory"),
        (("--gpu", "3", *_HEAD), "unknown option --gpu"),
        (("--name",), "--name needs a value"),
        (("--name", "$(id)", *_HEAD), "--name is not a container name"),
        (("--port", "70000", *_HEAD), "--port is not a port"),
        (("--wait", "soon", *_HEAD), "--wait is not a number"),
        (("--accelerator", "tpu", *_HEAD), "nvidia, amd or cpu"),
        (("--stop", *_HEAD), "--stop takes no IMAGE"),
        ((*_HEAD, "--rdma"), "--rdma must precede IMAGE"),
        ((*_HEAD, "--name=x"), "--name must precede IMAGE"),
        ((*_HEAD, "--restart=no"), "--restart is set by this script"),
        ((*_HEAD, "-e", "HF_TOKEN=hf_0123"), "-e HF_TOKEN would show the secret"),
        ((*_HEAD, "-eHF_TOKEN=hf_0123"), "-e HF_TOKEN would show the secret"),
        ((*_HEAD, "--env=AWS_SECRET_ACCESS_KEY"), "-e AWS_SECRET_ACCESS_KEY would show"),
        (("--secrets", "/not/there", *_HEAD), "--secrets is not a directory"),
        ((*_HEAD, "-e", "VLLM_HOST_IP=10.0.1.11"), "differs from HEAD_IP"),
    ],
)
def test_invalid_arguments(machine: Machine, argv: tuple[str, ...], message: str) -> None:
    """Exit code 2, the reason and a hint; no container is started and no value is repeated."""
    ran = machine.run(*argv)

    assert (ran.returncode, ran.stdout) == (2, "")
    assert message in ran.stderr
    assert "\nhint: " in ran.stderr
    assert "hf_0123" not in ran.stderr
    assert machine.calls("run") == []


@pytest.mark.parametrize(
    ("argv", "message", "evidence"),
    [
        (("IMAGE", "10.9.9.9", "--worker", "."), "no route to HEAD_IP 10.9.9.9", "unreachable"),
        (("IMAGE", "10.0.0.20", "--head", "."), "is not an address of this machine", "eth1"),
        (("IMAGE", "10.0.0.11", "--worker", "."), "is an address of this machine", "--head"),
        ((*_WORKER, "-e", "VLLM_HOST_IP=10.0.0.99"), "10.0.0.99 is not an address", "eth1"),
    ],
)
def test_addresses_of_other_machines(
    machine: Machine, argv: tuple[str, ...], message: str, evidence: str
) -> None:
    """The evidence is what the machine says about its network."""
    ran = machine.run(*argv)

    assert ran.returncode in (1, 2)
    assert message in ran.stderr
    assert evidence in ran.stderr
    assert machine.calls("run") == []


@pytest.mark.parametrize(("name", "mode"), [("HF_TOKEN", 0o644), ("not-a-variable", 0o600)])
def test_invalid_secrets(machine: Machine, name: str, mode: int) -> None:
    """Other users can read it, or it cannot be exported."""
    ran = machine.run("--secrets", machine.secrets(mode, **{name: "value"}), *_HEAD)

    assert ran.returncode == 2
    assert name in ran.stderr
    assert machine.calls("run") == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("down", "permission denied\n", "docker does not answer"),
        ("exists", "", "the container vllm-ray exists"),
        ("ray", "none\n", "IMAGE does not contain Ray"),
        ("refusal", "could not select device driver\n", "hint: install the NVIDIA Container"),
        ("refusal", "error setting rlimit\n", "or omit --rdma"),
    ],
)
def test_errors_of_docker(machine: Machine, file: str, text: str, message: str) -> None:
    """With Docker's message; a container that did not start is removed, an older one is not."""
    (machine.fake / file).write_text(text)
    (machine.fake / "ids").write_text("c0ffee\n")
    ran = machine.run(*_HEAD)

    assert ran.returncode == 1
    assert message in ran.stderr
    assert file == "ray" or text in ran.stderr
    removed = machine.calls("rm")
    assert removed == ([["rm", "--force", "--volumes", "c0ffee"]] if file == "refusal" else [])


def test_only_the_own_container_is_removed(machine: Machine) -> None:
    """Not that of another run, which was started while this one pulled the image."""
    conflict = 'Conflict. The container name "/vllm-ray" is already in use by container "abc".'
    (machine.fake / "refusal").write_text(conflict)
    ran = machine.run(*_HEAD)
    assert ran.returncode == 1
    assert "Conflict" in ran.stderr
    assert "--stop" in ran.stderr
    assert machine.calls("rm") == []

    (label,) = [
        label
        for label in _values(machine.calls("run", "--detach")[0], "--label")
        if label.startswith("run_cluster.sh.run=")
    ]
    assert machine.calls("ps") == [["ps", "--all", "--quiet", "--filter", f"label={label}"]]


def test_ray_that_does_not_list_the_node(machine: Machine) -> None:
    """The script waits for a worker until the deadline; a head that restarts ends it at once."""
    (machine.fake / "nodes").write_text("10.0.0.20 10.0.0.110\n")
    worker = machine.run("--wait", "1", *_WORKER)
    (machine.fake / "restarts").write_text("1\n")
    head = machine.run("--wait", "100", *_HEAD)

    for ran in (worker, head):
        assert ran.returncode == 1
        assert "Ray does not list this node" in ran.stderr
        assert "the last line of Ray" in ran.stderr


def test_stop_removes_the_container_of_the_script(machine: Machine) -> None:
    """By its label, so that a container of another program stays."""
    (machine.fake / "ids").write_text("abc\n")
    ran = machine.run("--name", "mine", "--stop")

    assert ran.returncode == 0, ran.stderr
    assert machine.calls("ps")[0][-1] == "label=run_cluster.sh=mine"
    assert machine.calls("rm") == [["rm", "--force", "--volumes", "abc"]]


def test_help_fits_on_a_screen(machine: Machine) -> None:
    """80 columns, 24 lines."""
    lines = machine.run("--help").stdout.splitlines()

    assert len(lines) < 24
    assert max(map(len, lines)) <= 80


def test_the_ray_of_the_hint_is_that_of_up() -> None:
    """So that both build the same image."""
    assert f"'ray[{RAY_EXTRAS}]=={RaySettings().version}'" in _SCRIPT.read_text()


def test_shellcheck() -> None:
    """No warning at the default level."""
    checker = Path(sys.executable).parent / "shellcheck"
    ran = subprocess.run([str(checker), str(_SCRIPT)], capture_output=True, text=True, check=False)

    assert (ran.returncode, ran.stdout) == (0, "")
