"""`scripts/run_cluster.sh` starts what `vlaunch up` would start, refuses what cannot work, and
shows no secret.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from launcher import containers
from launcher.model import Inventory, Node, Ports, RaySettings, Secret, SecretSource
from launcher.plan import files
from launcher.site import Site
from launcher.tools import docker
from launcher.tools.host import Address, HostFacts
from launcher.tools.image import RAY_EXTRAS

pytestmark = pytest.mark.processes

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "scripts" / "run_cluster.sh"
_TOKEN = "36" * 32  # its characters include those whose byte, in the HMAC, becomes NUL
_IMAGE = "vllm-ray:1"

# Stands for docker: what it was told goes to a file, what it says comes from files that a test
# writes.
_DOCKER = r"""#!/bin/sh
printf '%s\n' "$*" >>"$FAKE/calls"
case "$1 $2" in
  "run --detach") [ ! -f "$FAKE/run_error" ] || { cat "$FAKE/run_error" >&2; exit 125; } ;;
  "run --rm") cat "$FAKE/ray" 2>/dev/null || echo /usr/bin/ray ;;
  "inspect --type")
    case "$*" in *RestartCount*) cat "$FAKE/state" ;; *) cat "$FAKE/existing" ;; esac \
      2>/dev/null || exit 1 ;;
  "version --format") [ ! -f "$FAKE/refused" ] || { cat "$FAKE/refused" >&2; exit 1; } ;;
  "image inspect") [ ! -f "$FAKE/no_image" ] ;;
  "pull --quiet") echo "manifest unknown" >&2; exit 1 ;;
  "logs --tail") echo "the last words of Ray" ;;
esac
"""
_IP = """#!/bin/sh
case "$*" in
  "-o route get 10.0.0.11") echo '10.0.0.11 dev eth1 src 10.0.0.12 uid 0 \\    cache' ;;
  "-o route get 10.0.0.20") echo 'local 10.0.0.20 dev lo src 10.0.0.20' ;;
  "-o route get "*) echo 'RTNETLINK answers: Network is unreachable' >&2; exit 2 ;;
  "-o -4 addr show")
    echo '1: lo    inet 127.0.0.1/8 scope host lo'
    echo '2: eth0    inet 192.168.1.5/24 brd 192.168.1.255 scope global eth0'
    echo '3: eth1    inet 10.0.0.11/24 brd 10.0.0.255 scope global eth1'
    echo '3: eth1    inet 10.0.0.12/24 brd 10.0.0.255 scope global secondary eth1' ;;
esac
"""
_NVIDIA_SMI = "#!/bin/sh\nprintf '0\\n1\\n2\\n'\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A made-up machine: programs in `bin` stand before the real ones."""

    home: Path
    bin: Path
    fake: Path

    def run(
        self,
        *words: str,
        env: Mapping[str, str] | None = None,
        path: str | None = None,
        script: Path = _SCRIPT,
    ) -> subprocess.CompletedProcess[str]:
        """Run the script there."""
        environment = {
            "PATH": path or f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "FAKE": str(self.fake),
        }
        return subprocess.run(
            ["bash", str(script), *words],
            env={**environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def say(self, name: str, text: str) -> None:
        """Make the stand-in for docker say something."""
        (self.fake / name).write_text(text)

    @property
    def state(self) -> Path:
        """Where the files of the default cluster are."""
        return self.home / ".vlaunch" / "vllm"

    @property
    def calls(self) -> list[str]:
        """What docker was told."""
        file = self.fake / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def give_token(self, text: str = _TOKEN, mode: int = 0o600) -> Path:
        """Put the token where the launcher puts it."""
        file = self.state / "secrets" / "RAY_AUTH_TOKEN"
        file.parent.mkdir(parents=True)
        file.write_text(text)
        file.chmod(mode)
        return file


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for name in ("home", "bin", "fake", "home/hf"):
        (tmp_path / name).mkdir()
    for name, text in (("docker", _DOCKER), ("ip", _IP), ("nvidia-smi", _NVIDIA_SMI)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return Machine(home=tmp_path / "home", bin=tmp_path / "bin", fake=tmp_path / "fake")


@pytest.fixture
def listening() -> Iterator[int]:
    """A port of this machine that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


# ---- the same container --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The same node said to both: to the launcher as an inventory, to the script as words."""

    role: str
    inventory: Inventory
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict)


_HEAD = Node(name="gpu01", host="gpu01", ip="10.0.0.11", gpus=8, head=True, hf_home="/data/hf")
_WORKER = replace(_HEAD, name="gpu02", host="gpu02", ip="10.0.0.12", head=False)
_BASE = Inventory(path=Path("inventory.yaml"), cluster="vllm", image=_IMAGE, nodes=(_HEAD, _WORKER))
_WITH_TOKEN = {"RAY_AUTH_TOKEN": Secret(_TOKEN)}
_HCA = ("mlx5_0", "mlx5_1")
_CPU = replace(
    _BASE,
    accelerator="cpu",
    ray=RaySettings(token_auth=False, object_store=200_000_000),
    ports=Ports(
        gcs=7001,
        dashboard=7002,
        client=7003,
        node_manager=7004,
        object_manager=7005,
        runtime_env_agent=7006,
        dashboard_agent_grpc=7007,
        dashboard_agent_http=7008,
        metrics_export=7009,
        worker_min=7100,
        worker_max=7199,
        group=7010,
        metrics=7011,
    ),
    nodes=(
        replace(_HEAD, gpus=1, env={"OMP_NUM_THREADS": "1"}),
        replace(_WORKER, gpus=1, env={"OMP_NUM_THREADS": "1"}),
    ),
)
# Of ranks of vLLM and of copies, which the script does not start.
_NOT_TOLD = {"api", "mp_master", "dp_rpc", "probe", "copy"}
_CPU_WORDS = (
    "--accelerator=cpu",
    "--no-token",
    "--object-store",
    "200000000",
    *(
        f"--port={name}={getattr(_CPU.ports, name)}"
        for name in Ports.__slots__
        if name not in _NOT_TOLD
    ),
)
_CASES = {
    "head, nvidia, rdma": Case(
        role="head",
        inventory=replace(
            _BASE, fabric="infiniband", nodes=(replace(_HEAD, hca=_HCA), replace(_WORKER, hca=_HCA))
        ),
        before=("--rdma",),
        after=(
            *("-e", "NCCL_IB_HCA==mlx5_0,mlx5_1"),
            *("-e", "NVSHMEM_HCA_LIST=mlx5_0,mlx5_1"),
            *("-e", "UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1,eth1"),
        ),
        secrets=_WITH_TOKEN,
    ),
    "worker, nvidia, rdma, Hugging Face token": Case(
        role="worker",
        inventory=replace(_BASE, fabric="roce", secrets={"HF_TOKEN": SecretSource(env="HF_TOKEN")}),
        before=("--rdma",),
        after=("-eVLLM_HOST_IP=10.0.0.12",),
        env={"HF_TOKEN": "hf_" + "x" * 30},
        secrets={**_WITH_TOKEN, "HF_TOKEN": Secret("hf_" + "x" * 30)},
    ),
    "head, cpu, an open Ray, other ports": Case(
        role="head",
        inventory=_CPU,
        before=_CPU_WORDS,
        after=("--env=OMP_NUM_THREADS=1",),
        secrets=_WITH_TOKEN,
    ),
    "worker, cpu, an open Ray, other ports": Case(
        role="worker",
        inventory=_CPU,
        before=_CPU_WORDS,
        after=("--env", "OMP_NUM_THREADS=1"),
        secrets=_WITH_TOKEN,
    ),
    "worker, amd": Case(
        role="worker",
        inventory=replace(_BASE, accelerator="amd"),
        before=("--accelerator", "amd"),
        secrets=_WITH_TOKEN,
    ),
    "worker, other secrets and no token": Case(
        role="worker",
        inventory=replace(
            _BASE,
            ray=RaySettings(token_auth=False),
            secrets={"VLLM_API_KEY": SecretSource(env="VLLM_API_KEY")},
        ),
        before=("--no-token", "--secret", "VLLM_API_KEY"),
        env={"VLLM_API_KEY": "key of the API"},
        secrets={"VLLM_API_KEY": Secret("key of the API")},
    ),
}

# Fields of `docker run` in which the two may differ, each with its reason. There is none: hence the
# equal spec hash.
_INTENDED: dict[str, str] = {}


def _both(machine: Machine, case: Case) -> tuple[docker.ContainerSpec, list[str]]:
    node = case.inventory.head if case.role == "head" else case.inventory.workers[0]
    facts = HostFacts(
        home=str(machine.home),
        addresses=tuple(
            Address(interface="eth1", ip=ip, prefix=24, up=True)
            for ip in ("10.0.0.11", "10.0.0.12")
        ),
    )
    if "RAY_AUTH_TOKEN" in case.secrets:
        machine.give_token()
    words = ("--dry-run", "--name", node.name, "--gpus", str(node.gpus), *case.before)
    done = machine.run(
        *words,
        _IMAGE,
        case.inventory.head.ip,
        f"--{case.role}",
        node.hf_home,
        *case.after,
        env=case.env,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    return containers.node_spec(
        Site(case.inventory, {node.name: facts}), node, _IMAGE, case.secrets
    ), shlex.split(done.stdout)


def _fields(argv: list[str]) -> dict[str, list[str]]:
    """Read a `docker run` line whose options take one value each, but for two."""
    at, found = 2, defaultdict[str, list[str]](list)
    assert argv[:2] == ["docker", "run"]
    while argv[at].startswith("-"):
        if argv[at] in ("--detach", "--privileged"):
            found[argv[at]].append("")
            at += 1
        else:
            found[argv[at]].append(argv[at + 1])
            at += 2
    return {**found, "image": [argv[at]], "command": argv[at + 1 :]}


@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_the_container_is_the_launchers(machine: Machine, case: Case) -> None:
    """Every field of `docker run`, head and worker, on each kind of hardware."""
    spec, said = _both(machine, case)

    ours, theirs = _fields(said), _fields(list(docker.run(("docker",), spec)))
    assert {name: value for name, value in ours.items() if name not in _INTENDED} == {
        name: value for name, value in theirs.items() if name not in _INTENDED
    }


@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_status_sees_no_difference(machine: Machine, case: Case) -> None:
    """The spec hash and the secrets' fingerprint are those that the launcher computes, so a node
    that it finds is its own.
    """
    spec, said = _both(machine, case)

    labels = dict(label.partition("=")[::2] for label in _fields(said)["--label"])
    assert labels["vlaunch.spec"] == spec.hash
    assert labels["vlaunch.secrets"] == containers.fingerprint(case.secrets)


def test_every_port_of_a_node_can_be_told(machine: Machine) -> None:
    """Ray's ports of the model and the agents', by the same names and with the same defaults."""
    shown = machine.run("--help").stdout

    for name in set(Ports.__slots__) - _NOT_TOLD:
        assert f"{name}={getattr(Ports(), name)}" in shown


def test_the_advice_names_the_launchers_ray() -> None:
    """Somebody who builds the image by hand gets the version and the parts that `vlaunch up` would
    add.
    """
    assert f'ray[{RAY_EXTRAS}]=={RaySettings().version}\\"' in _SCRIPT.read_text()


def test_the_agent_comes_along(machine: Machine, listening: int) -> None:
    """With what answers for it; `vlaunch` finds them as it would have written them, but for
    programs that it adds itself.
    """
    _start(machine, listening)

    written = {
        str(path.relative_to(machine.state)): path
        for path in machine.state.rglob("payload/**/*")
        if path.is_file()
    }
    wanted = files.payload_digests()
    assert {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in written.items()
    }.items() <= wanted.items()
    agent = {name for name in wanted if name.startswith("payload/lib/vlaunch_agent/")}
    assert {"payload/entry.sh", "payload/head.py", *agent} == set(written)


def test_a_copy_of_the_script_alone_starts_ray(
    machine: Machine, listening: int, tmp_path: Path
) -> None:
    """The same container, with its secrets in place; that no agent runs there is said."""
    alone = tmp_path / "alone" / "run_cluster.sh"
    alone.parent.mkdir()
    shutil.copy(_SCRIPT, alone)
    done = _start(
        machine, listening, "--secret", "MY_KEY", env={"MY_KEY": "it's a key"}, script=alone
    )
    entry = (machine.state / "payload" / "entry.sh").read_text()

    assert done.returncode == 0, done.stderr
    assert "no agent runs here" in done.stderr
    (run,) = [call for call in machine.calls if call.startswith("run --detach")]
    words = run[run.index("/opt/vlaunch/entry.sh") :].split()[1:]
    assert words[:3] == ["agent", "--node", "n1"]
    assert words[words.index("--") + 1 :][:2] == ["ray", "start"]
    given = (
        "agent",
        "--node",
        "n1",
        "--",
        "sh",
        "-c",
        'echo "$MY_KEY $0 $RAY_AUTH_TOKEN"',
        "started",
    )
    there = entry.replace("/run/vlaunch/secrets", str(machine.state / "secrets"))
    ran = subprocess.run(
        ["sh", "-c", there, "entry.sh", *given], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "it's a key started \n"


@pytest.mark.parametrize(
    "extra",
    [
        ("-v", "/a b:/c", "--label", 'it\'s="quoted" $HOME `id` \\ & *'),
        ("--env-file", "/tmp/with space", "-e", "NAME_ONLY", "-e", "EMPTY=", "--privileged"),
        ("-e", "TWO=a=b", "-e", 'TEXT=it\'s a "line" with $HOME, `id`, \\ and & *'),
    ],
)
def test_odd_arguments_arrive_as_they_are(machine: Machine, extra: tuple[str, ...]) -> None:
    """The printed line, read by a shell, gives back each of them whole, before the image."""
    done = machine.run(
        "--dry-run", "--no-token", _IMAGE, "10.0.0.11", "--worker", "/data/hf", *extra
    )

    argv = subprocess.run(
        ["bash", "-c", f'docker() {{ printf "%s\\0" "$@"; }}; {done.stdout}'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")[:-1]
    before = argv[: argv.index(_IMAGE)]
    assert [word for word in extra if word not in before and word not in ("-e", "--env")] == []


def test_json_of_odd_arguments_is_pythons(machine: Machine) -> None:
    """Quotes, backslashes, tabs and line breaks do not change what the spec hash is of."""
    env = {"A": 'it\'s "x" \\n \\\\', "B": "a\tb & c"}
    node = replace(_WORKER, env=env)
    machine.give_token()
    words = [word for name, value in env.items() for word in ("-e", f"{name}={value}")]
    done = machine.run(
        "--dry-run",
        "--name",
        "gpu02",
        "--gpus",
        "8",
        _IMAGE,
        "10.0.0.11",
        "--worker",
        "/data/hf",
        *words,
    )

    facts = HostFacts(
        home=str(machine.home),
        addresses=(Address(interface="eth1", ip="10.0.0.12", prefix=24, up=True),),
    )
    spec = containers.node_spec(
        Site(replace(_BASE, nodes=(_HEAD, node)), {node.name: facts}), node, _IMAGE, _WITH_TOKEN
    )
    assert f"vlaunch.spec={spec.hash}" in shlex.split(done.stdout)


def test_a_size_of_shared_memory_replaces_the_default(machine: Machine) -> None:
    """Docker ignores --shm-size next to a tmpfs."""
    done = machine.run(
        "--dry-run", "--no-token", _IMAGE, "10.0.0.11", "--worker", "/hf", "--shm-size=10g"
    )

    assert "--shm-size=10g" in done.stdout
    assert "--ipc" not in done.stdout
    assert "--tmpfs" not in done.stdout
    assert "--private-shm" in done.stdout


@pytest.mark.parametrize("words", [("--ipc=host",), ("--ipc", "host")])
def test_shared_memory_of_the_host_is_not_the_agents_to_sweep(
    machine: Machine, words: tuple[str, ...]
) -> None:
    """Others use it, too."""
    done = machine.run("--dry-run", "--no-token", _IMAGE, "10.0.0.11", "--worker", "/hf", *words)

    assert "--private-shm" not in done.stdout


def test_gpus_are_counted_and_the_address_is_found(machine: Machine) -> None:
    """A worker needs to be told nothing."""
    done = machine.run("--dry-run", "--no-token", _IMAGE, "10.0.0.11", "--worker", "/data/hf")

    found = _fields(shlex.split(done.stdout))
    assert found["--gpus"] == ["3"]
    assert {"VLLM_HOST_IP=10.0.0.12", "GLOO_SOCKET_IFNAME=eth1", "NCCL_SOCKET_IFNAME==eth1"} <= set(
        found["--env"]
    )


def test_a_dry_run_changes_nothing(machine: Machine) -> None:
    """Docker is only asked, no file is written; a token that is not there yet is said to be
    missing.
    """
    done = machine.run("--dry-run", _IMAGE, "10.0.0.11", "--head", "/nowhere")

    assert done.returncode == 0
    assert "RAY_AUTH_TOKEN is not there yet" in done.stderr
    assert {call.split()[0] for call in machine.calls} <= {"info", "image"}
    assert sorted(path.name for path in machine.home.rglob("*")) == ["hf"]


# ---- doing it ------------------------------------------------------------------------------------


def _start(
    machine: Machine,
    listening: int,
    *before: str,
    role: str = "worker",
    env: Mapping[str, str] | None = None,
    script: Path = _SCRIPT,
) -> subprocess.CompletedProcess[str]:
    """Start against a port that answers: what a worker wants of the head and of itself."""
    machine.say("state", "running 0\n")
    if role == "worker" and not {"--no-token", "--token-file"} & set(before):
        machine.give_token()
    # Loopback is refused as an address of a cluster, so the connection is made to one of this
    # machine's own.
    words = (
        "--port",
        f"gcs={listening}",
        "--port",
        f"node_manager={listening}",
        "--wait",
        "5",
        "--name",
        "n1",
        *before,
    )
    return machine.run(
        *words,
        _IMAGE,
        "10.0.0.11",
        f"--{role}",
        str(machine.home / "hf"),
        env={**(env or {})},
        script=script,
    )


@pytest.fixture(autouse=True)
def loopback(machine: Machine) -> None:
    """Make every address of the script's own knocking this machine's loopback."""
    (machine.bin / "timeout").write_text(
        '#!/bin/sh\nport=$6\nexec bash -c \'exec 3<>"/dev/tcp/127.0.0.1/$0"\' "$port"\n'
    )
    (machine.bin / "timeout").chmod(0o755)


def test_a_worker_starts(machine: Machine, listening: int) -> None:
    """It is started, it listens, its name is on standard output."""
    done = _start(machine, listening)

    assert (done.returncode, done.stdout) == (0, "vlaunch-vllm-n1\n"), done.stderr
    assert sum(call.startswith("run --detach") for call in machine.calls) == 1


def test_the_head_makes_the_token(machine: Machine, listening: int) -> None:
    """64 hex digits, for the owner alone; it says how workers get it, and never what it is."""
    (machine.bin / "timeout").write_text(  # taken only after docker was told to run
        '#!/bin/sh\ngrep -q "^run --detach" "$FAKE/calls"\n'
    )
    done = _start(machine, listening, role="head")

    file = machine.state / "secrets" / "RAY_AUTH_TOKEN"
    token = file.read_text()
    assert (done.returncode, len(token), file.stat().st_mode & 0o777) == (0, 64, 0o600), done.stderr
    assert f"scp -p {file} WORKER:" in done.stderr
    assert token not in done.stdout + done.stderr + "".join(machine.calls)


def test_no_secret_is_shown(machine: Machine, listening: int) -> None:
    """Neither in what is printed, nor in what docker is told; each is in a file of mode 0600."""
    values = {"HF_TOKEN": "hf_secretsecretsecret", "VLLM_API_KEY": "api-secret"}
    given = machine.home / "token"
    given.write_text(_TOKEN + "\n")
    given.chmod(0o600)
    done = _start(
        machine, listening, "--token-file", str(given), "--secret", "VLLM_API_KEY", env=values
    )

    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr + "".join(machine.calls)
    for name, value in {**values, "RAY_AUTH_TOKEN": _TOKEN}.items():
        file = machine.state / "secrets" / name
        assert (file.read_text(), file.stat().st_mode & 0o777) == (value, 0o600)
        assert value not in shown
    dry = machine.run(
        "--dry-run", "--secret", "VLLM_API_KEY", _IMAGE, "10.0.0.11", "--worker", "/hf", env=values
    )
    assert not [value for value in (*values.values(), _TOKEN) if value in dry.stdout + dry.stderr]


def test_a_second_start_changes_nothing(machine: Machine, listening: int) -> None:
    """The same container that runs is left alone, and the script says so."""
    _start(machine, listening, "--no-token")
    (run,) = [call for call in machine.calls if call.startswith("run --detach")]
    spec = next(word.partition("=")[2] for word in run.split() if word.startswith("vlaunch.spec="))
    machine.say("existing", f"running {spec}\n")
    done = _start(machine, listening, "--no-token")

    assert (done.returncode, done.stdout) == (0, "vlaunch-vllm-n1\n")
    assert "nothing was changed" in done.stderr
    assert sum(call.startswith("run --detach") for call in machine.calls) == 1


def test_a_taken_name_is_said_and_replaced_on_request(machine: Machine, listening: int) -> None:
    """Another container is not removed unasked."""
    machine.say("existing", "exited 0123456789ab\n")
    refused = _start(machine, listening, "--no-token")
    replaced = _start(machine, listening, "--no-token", "--replace")

    assert refused.returncode == 1
    assert "vlaunch-vllm-n1 already, and it is exited" in refused.stderr
    assert "--replace" in refused.stderr
    assert replaced.returncode == 0
    assert "rm --force --volumes vlaunch-vllm-n1" in machine.calls


def test_stop_removes_by_label_and_what_was_written(machine: Machine, listening: int) -> None:
    """As `vlaunch down` does."""
    _start(machine, listening)
    done = machine.run("--stop")

    assert done.returncode == 0, done.stderr
    assert any("label=vlaunch.cluster=vllm" in call for call in machine.calls)
    assert not machine.state.exists()


# ---- what goes wrong -----------------------------------------------------------------------------

_GOOD = (_IMAGE, "10.0.0.11", "--worker", "/hf")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "there are only 0 of them"),
        (_GOOD[:3], "there are only 3 of them"),
        (
            (_IMAGE, "10.0.0.11", "worker", "/hf"),
            "the third word is --head or --worker, not `worker`",
        ),
        (("--head", *_GOOD), "--head stands after IMAGE and HEAD_IP"),
        (("--gpu", "3", *_GOOD), "there is no option --gpu"),
        (("--gpus", "eight", *_GOOD), "--gpus is a whole number"),
        (("--port", "gsc=1", *_GOOD), "there is no port called `gsc`"),
        (("--port", "gcs=70000", *_GOOD), "a number from 1 to 65535"),
        (("--cluster", "a b", *_GOOD), "--cluster is a name"),
        (("--name", "$(id)", *_GOOD), "--name is a name"),
        (("--accelerator", "tpu", *_GOOD), "nvidia, amd or cpu"),
        (("--secret", "NOT_THERE", *_GOOD), "the environment variable is not set"),
        ((_IMAGE, "10.0.0.256", "--worker", "/hf"), "not `10.0.0.256`"),
        ((_IMAGE, "gpu01", "--worker", "/hf"), "not `gpu01`"),
        ((_IMAGE, "10.0.0.20", "--worker", "/hf"), "10.0.0.20 is this machine's own address"),
        ((_IMAGE, "127.0.0.1", "--worker", "/hf"), "not `127.0.0.1`"),
        ((*_GOOD, "-e", "VLLM_HOST_IP=ten"), "not `ten`"),
        ((*_GOOD, "-e"), "nothing after -e"),
        ((*_GOOD, "-e", "VLLM_HOST_IP=10.0.0.11"), "this worker's address is HEAD_IP"),
        (("--node-ip", "10.0.0.13", *_GOOD, "-e", "VLLM_HOST_IP=10.0.0.12"), "say it once"),
        ((_IMAGE, "10.0.0.11", "--head", "/hf", "-e", "VLLM_HOST_IP=10.0.0.12"), "must be HEAD_IP"),
        ((*_GOOD, "--rdma"), "stand before IMAGE"),
        ((*_GOOD, "--dry-run"), "stand before IMAGE"),
        ((*_GOOD, "--gpus", "all"), "--gpus stands before IMAGE"),
        ((*_GOOD, "--name=x"), "--name stands before IMAGE"),
        ((*_GOOD, "--rm"), "is decided by this script"),
        ((*_GOOD, "-e", "HF_TOKEN=hf_0123456789"), "-e HF_TOKEN would show a secret"),
        ((*_GOOD, "-e", "HF_TOKEN"), "-e HF_TOKEN would show a secret"),
        ((*_GOOD, "-e", "RAY_ADDRESS=x"), "RAY_ADDRESS is decided by this script"),
        (("--stop", *_GOOD), "--stop goes without"),
    ],
)
def test_a_wrong_request_is_refused(machine: Machine, words: tuple[str, ...], said: str) -> None:
    """With exit status 2 and the reason, before docker is told anything."""
    done = machine.run("--dry-run", *words)

    assert (done.returncode, done.stdout, machine.calls) == (2, "", [])
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "hf_0123456789" not in done.stderr


def test_a_home_that_does_not_exist_is_refused(machine: Machine) -> None:
    """Docker would make it, as root, and vLLM would download into it."""
    done = machine.run(_IMAGE, "10.0.0.11", "--worker", "/not/there")

    assert done.returncode == 2
    assert "HF_HOME /not/there is not a directory" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((_IMAGE, "10.9.9.9", "--worker", "/hf"), "no route from here to HEAD_IP 10.9.9.9"),
        ((_IMAGE, "10.0.0.99", "--head", "/hf"), "10.0.0.99 is not an address of this machine"),
    ],
)
def test_an_address_of_another_machine_is_refused(
    machine: Machine, words: tuple[str, ...], said: str
) -> None:
    """The evidence is what the machine says about its network."""
    done = machine.run("--dry-run", *words)

    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert "unreachable" in done.stderr or "eth1 10.0.0.11/24" in done.stderr


def test_gpus_that_cannot_be_counted_are_asked_for(machine: Machine) -> None:
    """Rather than started without."""
    (machine.bin / "nvidia-smi").write_text("#!/bin/sh\necho 'driver not loaded'; exit 9\n")
    done = machine.run("--dry-run", *_GOOD)

    assert done.returncode == 1
    assert "--gpus N" in done.stderr
    assert "driver not loaded" in done.stderr


def test_a_missing_docker_is_said(machine: Machine) -> None:
    """Not as bash says it."""
    (machine.bin / "docker").unlink()
    for tool in (
        "bash",
        "ip",
        "uname",
        "find",
        "sha256sum",
        "awk",
        "tail",
        "sed",
        "id",
        "dirname",
        "cat",
        "sort",
    ):
        found = next(
            (p for p in (Path(d) / tool for d in os.environ["PATH"].split(":")) if p.exists()), None
        )
        if found and not (machine.bin / tool).exists():
            (machine.bin / tool).symlink_to(found)
    words = ("--no-token", "--gpus", "1", _IMAGE, "10.0.0.11", "--worker", str(machine.home / "hf"))
    done = machine.run(*words, path=str(machine.bin))

    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "error: docker is not installed")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (
            "refused",
            "permission denied while trying to connect to the Docker daemon socket",
            "does not let",
        ),
        ("refused", "Cannot connect to the Docker daemon", "the docker daemon does not answer"),
        ("ray", "no Ray\n", "`vlaunch up` builds an image that does"),
        ("no_image", "", "is not here and cannot be pulled"),
        ("run_error", "could not select device driver", "NVIDIA Container Toolkit"),
        ("run_error", "error setting rlimit type 8", "leave --rdma out"),
        ("run_error", "something else", "something else"),
    ],
)
def test_what_docker_refuses_is_explained(
    machine: Machine, listening: int, file: str, text: str, said: str
) -> None:
    """With docker's own words; a container that could not start is not left behind."""
    machine.say(file, text)
    done = _start(machine, listening, "--no-token")

    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    if file == "run_error":
        assert machine.calls[-1] == "rm --force --volumes vlaunch-vllm-n1"


@pytest.mark.parametrize("before", [(), ("--no-token", "--token-file", "/not/there")])
def test_a_worker_needs_the_heads_token(machine: Machine, before: tuple[str, ...]) -> None:
    """It says how to get it; one that is named must be there, however open Ray is."""
    done = machine.run(*before, _IMAGE, "10.0.0.11", "--worker", str(machine.home / "hf"))

    assert done.returncode == 1
    assert "scp -p HEAD:~/.vlaunch/vllm/secrets/RAY_AUTH_TOKEN ~/ray-token" in done.stderr


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [(_TOKEN, 0o640, "chmod 600"), ("", 0o600, "one word"), ("a b", 0o600, "word")],
)
def test_a_bad_token_file_is_refused(machine: Machine, text: str, mode: int, said: str) -> None:
    """One that others may read, or that holds no token; its text is not shown."""
    machine.give_token(text, mode)
    done = machine.run("--dry-run", *_GOOD)

    assert done.returncode == 1
    assert said in done.stderr
    assert not text or text not in done.stderr


def test_without_the_token_a_worker_joins_an_open_ray_only(
    machine: Machine, listening: int
) -> None:
    """And says what it has no part in."""
    done = _start(machine, listening, "--no-token")

    assert done.returncode == 0, done.stderr
    assert "`vlaunch serve` cannot use it" in done.stderr


def test_a_worker_without_a_head_is_refused(machine: Machine) -> None:
    """Ray itself would try for a minute and restart."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = int(server.getsockname()[1])
    done = _start(machine, closed, "--no-token")

    assert done.returncode == 1
    assert f"nothing answers at 10.0.0.11:{closed}" in done.stderr


def test_a_taken_port_is_refused(machine: Machine, listening: int) -> None:
    """A head that cannot listen would restart for ever; so would its agent try for ever."""
    (machine.bin / "timeout").write_text(f'#!/bin/sh\n[ "$6" = {listening} ]\n')
    done = _start(machine, listening, "--no-token", role="head")
    agents = _start(machine, listening, "--port=gcs=1", f"--port=group={listening}", role="head")

    assert (done.returncode, agents.returncode) == (1, 1)
    assert f"port {listening} is taken on 10.0.0.11" in done.stderr
    assert "or say --port group=…" in agents.stderr


@pytest.mark.parametrize("state", ["exited 0", "running 2", "restarting 1"])
def test_a_container_that_ends_is_a_failure(machine: Machine, listening: int, state: str) -> None:
    """With its last words."""
    (machine.fake / "state").write_text(state)
    words = (
        "--no-token",
        "--gpus",
        "1",
        "--port",
        f"gcs={listening}",
        _IMAGE,
        "10.0.0.11",
        "--worker",
        str(machine.home / "hf"),
    )
    done = machine.run(*words)

    assert done.returncode == 1
    assert "the last words of Ray" in done.stderr


def test_shellcheck_has_nothing_to_say() -> None:
    """At its strictest default level."""
    checker = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([str(checker), str(_SCRIPT)], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")
