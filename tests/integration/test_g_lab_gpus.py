"""`accelerator: nvidia` on hosts with simulated GPUs: every command before CUDA is the real one,
and vLLM's CPU build answers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.inventory.load import load
from launcher.lab import gpu_image, machine
from launcher.lab.host_configs import MODEL
from tests import golden
from tests.integration.batches import wait_until
from tests.integration.conftest import VLAUNCH, CommandResult, LabCluster, wait_for_output
from tests.ssh import sshd

pytestmark = [pytest.mark.lab, pytest.mark.long]

GOLDEN = Path(__file__).with_name("golden")
# Pipeline stages and ranks on a CPU; `--enforce-eager` would ask for a C++ compiler.
ON_A_CPU = ("--dtype=float32", "--max-model-len=512", "-cc.mode=2", "-cc.backend=eager")


@pytest.fixture(scope="module")
def hosts(with_gpus: LabCluster) -> Iterator[LabCluster]:
    """Two hosts with eight GPUs each, and the inventory that `init` writes."""
    home = with_gpus.folder
    env = sshd.make_home(
        home,
        "".join(
            f"Host {host.name}\n  HostName {host.ip}\n  User root\n  IdentityFile"
            f" {with_gpus.lab.identity}\n  UserKnownHostsFile {with_gpus.lab.known_hosts}\n"
            for host in with_gpus.lab.hosts
        ),
    )
    arguments = ("--output", str(with_gpus.inventory), "--force", "--cluster", "gpus")
    env["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", "/root/.cache")
    patch = pytest.MonkeyPatch()
    for name, value in env.items():
        patch.setenv(name, value)
    result = with_gpus.vlaunch("init", "node1", "node2", *arguments)
    assert result.code == 0, result.output
    yield with_gpus
    patch.undo()


def set_faults(lab_cluster: LabCluster, *faults: str) -> None:
    """Set these faults of the GPUs, and no others."""
    lab = lab_cluster.lab
    command = [VLAUNCH, "lab", "up", "--name", lab.name, "--subnet", lab.subnet]
    command += ["--nodes", str(lab.nodes), "--gpus", str(lab.gpus), "--accelerator", "nvidia"]
    for fault in faults:
        command += ["--gpu-trouble", fault]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_init_detects_the_gpus(hosts: LabCluster) -> None:
    """With the image that replaces one with CUDA."""
    inventory = load(hosts.inventory)

    assert (inventory.accelerator, inventory.image) == ("nvidia", gpu_image.NAME)
    assert [node.gpus for node in inventory.nodes] == [8, 8]
    assert "8 × NVIDIA H100 80GB HBM3 (practice)" in hosts.inventory.read_text()


def test_init_skips_gpus_that_are_not_free(hosts: LabCluster) -> None:
    """A GPU with a display, one in use, and one that the driver lost."""
    path = hosts.folder / "found.yaml"
    set_faults(hosts, "node1:display:0", "node1:busy:7", "node2:lost:2")
    try:
        result = hosts.vlaunch("init", "node1", "node2", "--output", str(path), "--force")
    finally:
        set_faults(hosts)

    assert result.code == 0, result.output
    assert [node.gpu_ids for node in load(path).nodes] == [
        tuple("123456"),
        tuple("0134567"),
    ]
    assert "not GPU 7: in use by ops (on node1)" in path.read_text()
    assert "node2: the driver has lost a GPU" in result.err


@pytest.mark.parametrize(
    ("fault", "check", "message", "refused"),
    [
        ("node1:busy:3", "gpu-memory", r"node1: 61169 MiB of GPU memory used by ops", False),
        ("node2:ecc:1", "gpu-errors", r"node2: uncorrected memory errors \(GPU 1: 2\)", False),
        ("node1:lost:3", "accelerator", r"node1: the driver has lost a GPU\n.*GPU3: 0000", True),
        (
            "node2:no-toolkit",
            "gpu-runtime",
            r"node2: Docker cannot expose GPUs to containers",
            True,
        ),
    ],
)
def test_check_names_the_fault(
    hosts: LabCluster, fault: str, check: str, message: str, refused: bool
) -> None:
    """Only this check fails; `up` refuses faults that prevent containers."""
    set_faults(hosts, fault)
    try:
        result = hosts.vlaunch("check")
        up = hosts.vlaunch("up") if refused else None
    finally:
        set_faults(hosts)

    assert (result.code, re.findall(r"^  FAIL  (\S+)", result.out, re.MULTILINE)) == (1, [check])
    assert re.search(message, result.out), result.out
    if up is not None:
        assert up.code == 1
        assert re.search(message, up.err), up.err
        assert hosts.containers() == {}


def test_docker_exposes_the_requested_gpus(hosts: LabCluster) -> None:
    """Numbered from 0 in the container, with their UUIDs of the host."""
    query = ("--query-gpu=index,uuid", "--format=csv,noheader")
    on_host = dict(
        line.split(", ") for line in hosts.on("node1", "nvidia-smi", *query).splitlines()
    )
    run = ("run", "--rm", "--network", "none", "--gpus", '"device=4,5"')
    inside = hosts.docker("node1", *run, "--entrypoint", "nvidia-smi", gpu_image.NAME, *query)

    assert inside.splitlines() == [f"0, {on_host['4']}", f"1, {on_host['5']}"]


def test_the_main_workflow(hosts: LabCluster) -> None:
    """`check`, `up`, `serve` beside a GPU in use, which does not delay it, `chat`, `down`."""
    check = hosts.vlaunch("check")
    assert (check.code, "FAIL" in check.out) == (0, False), check.out
    up = hosts.vlaunch("up", timeout=600)
    assert up.code == 0, up.output
    assert "node[1-2]: 8 GPUs in a container" in up.err
    assert "cluster gpus is up: 2 nodes, 16 GPUs" in up.err

    set_faults(hosts, "node1:busy:3")
    serving = serve(hosts, "--tp", "2")
    assert "node1: 61169 MiB of GPU memory used by ops" in serving.err
    assert "in use" not in serving.err
    assert "vllm-0.32.0-tp2" in serving.out
    used = [*read_memory(hosts, "node1").values(), *read_memory(hosts, "node2").values()]
    assert used.pop(3) == 4 + 61169
    assert sorted(used)[-3:] == [4, 4 + CLAIM, 4 + CLAIM]  # on whichever node

    chat = hosts.vlaunch("chat", "--max-tokens", "4", "Hi")
    assert chat.code == 0, chat.output
    down = hosts.vlaunch("down", "--yes", timeout=300)
    assert down.code == 0, down.output
    assert hosts.containers() == {}
    set_faults(hosts)
    assert set(read_memory(hosts, "node1").values()) == {4}


CLAIM = 75034  # MiB: 0.92 of a GPU


def serve(lab_cluster: LabCluster, *options: str) -> CommandResult:
    """Start a server, and assert that it answers."""
    arguments = ("--model", MODEL, "--pp", "1", "--skip-network-check", *options)
    result = lab_cluster.vlaunch("serve", *arguments, "--", *ON_A_CPU, timeout=600)
    assert result.code == 0, result.output
    return result


def read_memory(lab_cluster: LabCluster, host: str) -> dict[int, int]:
    """Return the MiB in use on each GPU of a host."""
    query = ("--query-gpu=index,memory.used", "--format=csv,noheader,nounits")
    lines = lab_cluster.on(host, "nvidia-smi", *query).splitlines()
    return {int(index): int(used) for index, used in (line.split(", ") for line in lines)}


def read_ranks(lab_cluster: LabCluster) -> dict[int, int]:
    """Return the pid, in the container of node1, of each GPU's rank."""
    container = next(name for name in lab_cluster.containers() if name.endswith("node1"))
    smi = ("exec", container, "nvidia-smi")
    form = "--format=csv,noheader,nounits"
    gpus = lab_cluster.docker("node1", *smi, "--query-gpu=index,uuid", form).splitlines()
    apps = lab_cluster.docker("node1", *smi, "--query-compute-apps=gpu_uuid,pid,process_name", form)
    numbers = {uuid: int(index) for index, uuid in (line.split(", ") for line in gpus)}
    rows = [line.split(", ") for line in apps.splitlines()]
    return {numbers[uuid]: int(pid) for uuid, pid, name in rows if name != "[Not Found]"}


def read_record(lab_cluster: LabCluster, name: str) -> dict[str, Any]:
    """Return the supervisor's record of a server."""
    rows = json.loads(lab_cluster.vlaunch("status", "--json").out)["servers"]
    return next(server["observed"] for server in rows if server["name"] == name)


def assert_recovers(lab_cluster: LabCluster, name: str, gpu: int) -> None:
    """Kill the rank of a server, and assert that it returns on the same GPU; other servers are not
    affected.
    """
    before = {other: read_record(lab_cluster, other) for other in list_servers(lab_cluster)}
    container = next(name for name in lab_cluster.containers() if name.endswith("node1"))
    rank = str(read_ranks(lab_cluster)[gpu])
    lab_cluster.docker(
        "node1", "exec", container, "python3", "-c", f"import os; os.kill({rank}, 9)"
    )
    faults = before[name]["fault_count"]
    wait_until(
        lambda: read_record(lab_cluster, name)["fault_count"] > faults,
        "a fault is written down",
        60,
    )
    wait_until(
        lambda: read_record(lab_cluster, name)["state"] == "ready", f"`{name}` is ready again", 400
    )
    for other, old in before.items():
        new = read_record(lab_cluster, other)
        restarts = other == name
        assert (new["state"], new["generation"]) == ("ready", old["generation"] + restarts), new
        assert new["fault_count"] == old["fault_count"] + restarts, new
    assert str(read_ranks(lab_cluster)[gpu]) != rank


def list_servers(lab_cluster: LabCluster) -> list[str]:
    """Return the names of all servers."""
    return [
        server["name"]
        for server in json.loads(lab_cluster.vlaunch("status", "--json").out)["servers"]
    ]


@pytest.fixture(scope="module")
def up(hosts: LabCluster) -> Iterator[LabCluster]:
    """A cluster of one of the hosts."""
    assert hosts.vlaunch("down", "--yes", timeout=300).code == 0
    before = hosts.inventory.read_text()
    document = yaml.safe_load(before)
    document["nodes"] = [{"host": "node1", "ip": hosts.lab.host("node1").ip, "gpus": 8}]
    hosts.inventory.write_text(yaml.safe_dump(document))
    result = hosts.vlaunch("up", timeout=600)
    assert result.code == 0, result.output
    yield hosts
    down = hosts.vlaunch("down", "--yes", timeout=300)
    hosts.inventory.write_text(before)
    assert down.code == 0, down.output


@pytest.fixture
def single(up: LabCluster) -> Iterator[LabCluster]:
    """The same, without servers and faults, before and after."""
    yield up
    set_faults(up)
    stop = up.vlaunch("stop", "--all")
    assert stop.code == 0, stop.output


def test_servers_share_a_node(single: LabCluster) -> None:
    """Two in Ray and one of `mp`, one GPU each, beside a GPU in use; each recovers while the others
    run.
    """
    set_faults(single, "node1:busy:3")
    serve(single, "--tp", "1", "--name", "a")
    serve(single, "--tp", "1", "--name", "b", "--port", "8001")
    assert sorted(read_ranks(single)) == [0, 1]
    assert_recovers(single, "a", 0)

    serve(single, "--tp", "1", "--name", "c", "--port", "8002", "--backend", "mp")
    assert sorted(read_ranks(single)) == [0, 1, 2]
    assert_recovers(single, "b", 1)
    assert_recovers(single, "c", 2)
    assert read_memory(single, "node1")[3] == 4 + 61169


def test_a_server_waits_while_all_gpus_are_in_use(single: LabCluster) -> None:
    """It shows the busy GPUs, and starts as soon as enough are free."""
    set_faults(single, *(f"node1:busy:{index}" for index in range(8)))
    arguments = (
        "--model",
        MODEL,
        "--tp",
        "1",
        "--pp",
        "1",
        "--skip-network-check",
        "--",
        *ON_A_CPU,
    )
    serving = single.start("serve", *arguments)
    machine.await_true(
        lambda: "0 of 8 GPUs have 92% of their memory free" in single.vlaunch("status").out,
        what="the server's wait for GPU memory",
        timeout=120,
    )
    single.on("node1", "sh", "-c", "kill $(cat /etc/practice-gpus/held-0)")
    out, err = wait_for_output(serving, timeout=600)
    assert serving.returncode == 0, out + err
    golden.check(GOLDEN / "serve_waits.txt", waiting_lines(err))


def test_ray_gives_a_server_a_gpu_that_others_use(single: LabCluster) -> None:
    """Ray does not know of other users: vLLM exits, the error suggests a fix, and nothing waits
    forever.
    """
    set_faults(single, "node1:busy:0")
    arguments = (
        "--model",
        MODEL,
        "--tp",
        "1",
        "--pp",
        "1",
        "--skip-network-check",
        "--",
        *ON_A_CPU,
    )
    result = single.vlaunch("serve", *arguments, timeout=600)

    assert result.code == 1, result.output
    assert "node1: 61169 MiB of GPU memory used by ops" in result.err
    assert "Free memory on device cuda:0 (19.91/79.65 GiB)" in result.err
    assert "if another program needs that GPU, remove it" in result.err


def waiting_lines(err: str) -> str:
    """Return the lines of `serve` about GPU memory, without pids."""
    lines = [f"{line}\n" for line in err.splitlines() if "memory" in line and "GPU" in line]
    return re.sub(r"pid \d+", "pid N", "".join(lines))
