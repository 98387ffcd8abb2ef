"""`accelerator: nvidia` on hosts with stand-in GPUs: every command that comes before CUDA is the
real one's, vLLM's CPU build is what answers.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator

import pytest

from launcher.inventory.load import load
from launcher.lab import gpu_image, machine
from launcher.lab.render import MODEL
from tests.integration.conftest import VLAUNCH, Practice, ended

pytestmark = [pytest.mark.lab, pytest.mark.long]

# Pipeline stages and ranks on a CPU; `--enforce-eager` would ask for a C++ compiler.
ON_A_CPU = ("--dtype=float32", "--max-model-len=512", "-cc.mode=2", "-cc.backend=eager")


@pytest.fixture(scope="module")
def hosts(with_gpus: Practice) -> Iterator[Practice]:
    """Two hosts with eight GPUs each, and the inventory that `init` writes of them."""
    home = with_gpus.folder
    (home / ".ssh").mkdir(mode=0o700)
    (home / ".ssh/config").write_text(
        "".join(
            f"Host {host.name}\n  HostName {host.ip}\n  User root\n  IdentityFile"
            f" {with_gpus.lab.identity}\n  UserKnownHostsFile {with_gpus.lab.known_hosts}\n"
            for host in with_gpus.lab.hosts
        )
    )
    words = ("--output", str(with_gpus.inventory), "--force", "--cluster", "gpus")
    env = {"HOME": str(home), "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", "/root/.cache")}
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
        ("node1:busy:3", "gpu-memory", r"node1: 61169 MiB of GPU memory held by ops", False),
        ("node2:ecc:1", "gpu-errors", r"node2: uncorrected memory errors \(GPU 1: 2\)", False),
        ("node1:lost:3", "accelerator", r"node1: the driver has lost a GPU\n.*GPU3: 0000", True),
        ("node2:no-toolkit", "gpu-runtime", r"node2: Docker cannot hand out GPUs", True),
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
    """`check`, `up`, `serve` with a GPU in use meanwhile, `chat`, `down`."""
    check = hosts.vlaunch("check")
    assert (check.code, "FAIL" in check.out) == (0, False), check.out
    up = hosts.vlaunch("up", timeout=600)
    assert up.code == 0, up.said
    assert "node[1-2]: 8 GPUs in a container" in up.err
    assert "cluster gpus is up: 2 nodes, 16 GPUs" in up.err

    trouble(hosts, "node1:busy:3")
    serving = hosts.start("serve", "--model", MODEL, "--tp", "2", "--pp", "1", "--", *ON_A_CPU)
    machine.await_true(
        lambda: "GPU 3 has 59.7 of 79.6 GiB in use" in hosts.vlaunch("status").out,
        what="the server's wait for GPU memory",
        timeout=120,
    )
    hosts.on("node1", "sh", "-c", "kill $(cat /etc/practice-gpus/held-3)")
    out, err = ended(serving, timeout=600)
    assert serving.returncode == 0, out + err
    assert "GPU 3 has 59.7 of 79.6 GiB in use" in err
    assert "vllm-0.32.0-tp2" in out

    chat = hosts.vlaunch("chat", "--max-tokens", "4", "Hi")
    assert chat.code == 0, chat.said
    down = hosts.vlaunch("down", timeout=300)
    assert down.code == 0, down.said
    assert hosts.containers() == {}
