"""`accelerator: nvidia` on hosts with stand-in GPUs: every command that comes before CUDA is the
real one's, vLLM's CPU build is what answers.
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
from tests.integration.batches import until
from tests.integration.conftest import VLAUNCH, Practice, Ran, ended
from tests.ssh import sshd

pytestmark = [pytest.mark.lab, pytest.mark.long]

GOLDEN = Path(__file__).with_name("golden")
# Pipeline stages and ranks on a CPU; `--enforce-eager` would ask for a C++ compiler.
ON_A_CPU = ("--dtype=float32", "--max-model-len=512", "-cc.mode=2", "-cc.backend=eager")


@pytest.fixture(scope="module")
def hosts(with_gpus: Practice) -> Iterator[Practice]:
    """Two hosts with eight GPUs each, and the inventory that `init` writes of them."""
    home = with_gpus.folder
    env = sshd.make_home(
        home,
        "".join(
            f"Host {host.name}\n  HostName {host.ip}\n  User root\n  IdentityFile"
            f" {with_gpus.lab.identity}\n  UserKnownHostsFile {with_gpus.lab.known_hosts}\n"
            for host in with_gpus.lab.hosts
        ),
    )
    words = ("--output", str(with_gpus.inventory), "--force", "--cluster", "gpus")
    env["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", "/root/.cache")
    patch = pytest.MonkeyPatch()
    for name, value in env.items():
        patch.setenv(name, value)
    ran = with_gpus.vlaunch("init", "node1", "node2", *words)
    assert ran.code == 0, ran.said
    yield with_gpus
    patch.undo()


def trouble(practice: Practice, *words: str) -> None:
    """Let this be wrong with the GPUs, and nothing else."""
    lab = practice.lab
    command = [VLAUNCH, "lab", "up", "--name", lab.name, "--subnet", lab.subnet]
    command += ["--nodes", str(lab.nodes), "--gpus", str(lab.gpus), "--accelerator", "nvidia"]
    for word in words:
        command += ["--gpu-trouble", word]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_init_takes_them_for_gpus(hosts: Practice) -> None:
    """And the image that stands in for one with CUDA."""
    inventory = load(hosts.inventory)

    assert (inventory.accelerator, inventory.image) == ("nvidia", gpu_image.NAME)
    assert [node.gpus for node in inventory.nodes] == [8, 8]
    assert "8 × NVIDIA H100 80GB HBM3 (practice)" in hosts.inventory.read_text()


def test_init_leaves_out_what_is_not_free(hosts: Practice) -> None:
    """A GPU that drives a display, one that somebody uses, and one that is lost."""
    found = hosts.folder / "found.yaml"
    trouble(hosts, "node1:display:0", "node1:busy:7", "node2:lost:2")
    try:
        ran = hosts.vlaunch("init", "node1", "node2", "--output", str(found), "--force")
    finally:
        trouble(hosts)

    assert ran.code == 0, ran.said
    assert [node.gpu_ids for node in load(found).nodes] == [
        tuple("123456"),
        tuple("0134567"),
    ]
    assert "not GPU 7: in use by ops (on node1)" in found.read_text()
    assert "node2: the driver has lost a GPU" in ran.err


@pytest.mark.parametrize(
    ("wrong", "check", "said", "refused"),
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
def test_check_says_what_is_wrong(
    hosts: Practice, wrong: str, check: str, said: str, refused: bool
) -> None:
    """This and no other check fails; what lets no container start is refused by `up` too."""
    trouble(hosts, wrong)
    try:
        ran = hosts.vlaunch("check")
        up = hosts.vlaunch("up") if refused else None
    finally:
        trouble(hosts)

    assert (ran.code, re.findall(r"^  FAIL  (\S+)", ran.out, re.MULTILINE)) == (1, [check])
    assert re.search(said, ran.out), ran.out
    if up is not None:
        assert up.code == 1
        assert re.search(said, up.err), up.err
        assert hosts.containers() == {}


def test_docker_hands_out_what_it_is_asked_for(hosts: Practice) -> None:
    """Numbered from 0 in the container, with the identities that they have on the host."""
    query = ("--query-gpu=index,uuid", "--format=csv,noheader")
    on_host = dict(
        line.split(", ") for line in hosts.on("node1", "nvidia-smi", *query).splitlines()
    )
    run = ("run", "--rm", "--network", "none", "--gpus", '"device=4,5"')
    inside = hosts.docker("node1", *run, "--entrypoint", "nvidia-smi", gpu_image.NAME, *query)

    assert inside.splitlines() == [f"0, {on_host['4']}", f"1, {on_host['5']}"]


def test_the_whole_way(hosts: Practice) -> None:
    """`check`, `up`, `serve` beside a GPU that somebody else uses, which does not delay it, `chat`,
    `down`.
    """
    check = hosts.vlaunch("check")
    assert (check.code, "FAIL" in check.out) == (0, False), check.out
    up = hosts.vlaunch("up", timeout=600)
    assert up.code == 0, up.said
    assert "node[1-2]: 8 GPUs in a container" in up.err
    assert "cluster gpus is up: 2 nodes, 16 GPUs" in up.err

    trouble(hosts, "node1:busy:3")
    serving = serve(hosts, "--tp", "2")
    assert "node1: 61169 MiB of GPU memory used by ops" in serving.err
    assert "in use" not in serving.err
    assert "vllm-0.32.0-tp2" in serving.out
    used = [*memory(hosts, "node1").values(), *memory(hosts, "node2").values()]
    assert used.pop(3) == 4 + 61169
    assert sorted(used)[-3:] == [4, 4 + CLAIM, 4 + CLAIM]  # on whichever node

    chat = hosts.vlaunch("chat", "--max-tokens", "4", "Hi")
    assert chat.code == 0, chat.said
    down = hosts.vlaunch("down", "--yes", timeout=300)
    assert down.code == 0, down.said
    assert hosts.containers() == {}
    trouble(hosts)
    assert set(memory(hosts, "node1").values()) == {4}


CLAIM = 75034  # MiB: 0.92 of a GPU


def serve(practice: Practice, *words: str) -> Ran:
    """Start a server that must answer."""
    more = ("--model", MODEL, "--pp", "1", "--skip-network-check", *words)
    ran = practice.vlaunch("serve", *more, "--", *ON_A_CPU, timeout=600)
    assert ran.code == 0, ran.said
    return ran


def memory(practice: Practice, host: str) -> dict[int, int]:
    """Return the MiB in use of each GPU of a host."""
    query = ("--query-gpu=index,memory.used", "--format=csv,noheader,nounits")
    lines = practice.on(host, "nvidia-smi", *query).splitlines()
    return {int(index): int(used) for index, used in (line.split(", ") for line in lines)}


def ranks(practice: Practice) -> dict[int, int]:
    """Return the number, in the container of node1, of the rank that holds each GPU's memory."""
    container = next(name for name in practice.containers() if name.endswith("node1"))
    smi = ("exec", container, "nvidia-smi")
    form = "--format=csv,noheader,nounits"
    gpus = practice.docker("node1", *smi, "--query-gpu=index,uuid", form).splitlines()
    apps = practice.docker("node1", *smi, "--query-compute-apps=gpu_uuid,pid,process_name", form)
    numbers = {uuid: int(index) for index, uuid in (line.split(", ") for line in gpus)}
    rows = [line.split(", ") for line in apps.splitlines()]
    return {numbers[uuid]: int(pid) for uuid, pid, name in rows if name != "[Not Found]"}


def observed(practice: Practice, name: str) -> dict[str, Any]:
    """Return what the keeper says of a server."""
    said = json.loads(practice.vlaunch("status", "--json").out)["servers"]
    return next(server["observed"] for server in said if server["name"] == name)


def recovers(practice: Practice, name: str, gpu: int) -> None:
    """Kill the rank of a server, which must come back on the same GPU; no other server notices."""
    before = {other: observed(practice, other) for other in servers(practice)}
    container = next(name for name in practice.containers() if name.endswith("node1"))
    rank = str(ranks(practice)[gpu])
    practice.docker("node1", "exec", container, "python3", "-c", f"import os; os.kill({rank}, 9)")
    faults = before[name]["fault_count"]
    until(lambda: observed(practice, name)["fault_count"] > faults, "a fault is written down", 60)
    until(lambda: observed(practice, name)["state"] == "ready", f"`{name}` is ready again", 400)
    for other, was in before.items():
        now = observed(practice, other)
        more = other == name
        assert (now["state"], now["generation"]) == ("ready", was["generation"] + more), now
        assert now["fault_count"] == was["fault_count"] + more, now
    assert str(ranks(practice)[gpu]) != rank


def servers(practice: Practice) -> list[str]:
    """Return the names of all servers."""
    return [
        each["name"] for each in json.loads(practice.vlaunch("status", "--json").out)["servers"]
    ]


@pytest.fixture(scope="module")
def up(hosts: Practice) -> Iterator[Practice]:
    """A cluster of one of the hosts, which is up."""
    assert hosts.vlaunch("down", "--yes", timeout=300).code == 0
    before = hosts.inventory.read_text()
    document = yaml.safe_load(before)
    document["nodes"] = [{"host": "node1", "ip": hosts.lab.host("node1").ip, "gpus": 8}]
    hosts.inventory.write_text(yaml.safe_dump(document))
    ran = hosts.vlaunch("up", timeout=600)
    assert ran.code == 0, ran.said
    yield hosts
    down = hosts.vlaunch("down", "--yes", timeout=300)
    hosts.inventory.write_text(before)
    assert down.code == 0, down.said


@pytest.fixture
def one(up: Practice) -> Iterator[Practice]:
    """The same, without servers and trouble, before and after."""
    yield up
    trouble(up)
    stop = up.vlaunch("stop", "--all")
    assert stop.code == 0, stop.said


def test_servers_share_a_node(one: Practice) -> None:
    """Two of Ray's and one of `mp`, one GPU each, beside a GPU that somebody else keeps busy; each
    comes back while the others run.
    """
    trouble(one, "node1:busy:3")
    serve(one, "--tp", "1", "--name", "a")
    serve(one, "--tp", "1", "--name", "b", "--port", "8001")
    assert sorted(ranks(one)) == [0, 1]
    recovers(one, "a", 0)

    serve(one, "--tp", "1", "--name", "c", "--port", "8002", "--backend", "mp")
    assert sorted(ranks(one)) == [0, 1, 2]
    recovers(one, "b", 1)
    recovers(one, "c", 2)
    assert memory(one, "node1")[3] == 4 + 61169


def test_a_server_waits_while_all_gpus_are_in_use(one: Practice) -> None:
    """It says which GPU is held, and starts as soon as there are as many free as it needs."""
    trouble(one, *(f"node1:busy:{index}" for index in range(8)))
    words = ("--model", MODEL, "--tp", "1", "--pp", "1", "--skip-network-check", "--", *ON_A_CPU)
    serving = one.start("serve", *words)
    machine.await_true(
        lambda: "0 of 8 GPUs have 92% of their memory free" in one.vlaunch("status").out,
        what="the server's wait for GPU memory",
        timeout=120,
    )
    one.on("node1", "sh", "-c", "kill $(cat /etc/practice-gpus/held-0)")
    out, err = ended(serving, timeout=600)
    assert serving.returncode == 0, out + err
    golden.check(GOLDEN / "serve_waits.txt", waits(err))


def test_ray_gives_a_server_a_gpu_that_others_use(one: Practice) -> None:
    """Ray knows nothing of it: vLLM ends, and what to do is said; nothing waits for ever."""
    trouble(one, "node1:busy:0")
    words = ("--model", MODEL, "--tp", "1", "--pp", "1", "--skip-network-check", "--", *ON_A_CPU)
    ran = one.vlaunch("serve", *words, timeout=600)

    assert ran.code == 1, ran.said
    assert "node1: 61169 MiB of GPU memory used by ops" in ran.err
    assert "Free memory on device cuda:0 (19.91/79.65 GiB)" in ran.err
    assert "if another program needs that GPU, remove it" in ran.err


def waits(err: str) -> str:
    """Return what `serve` says of GPU memory, without numbers of processes."""
    lines = [f"{line}\n" for line in err.splitlines() if "memory" in line and "GPU" in line]
    return re.sub(r"pid \d+", "pid N", "".join(lines))
