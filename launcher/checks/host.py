"""Essential checks on a node before anything is written: without these, `up` would fail later and less clearly."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import PurePosixPath

from launcher.checks.ports import PORTS
from launcher.checks.shape import Check, Evidence, Finding, each, passed, skipped
from launcher.checks.shape import failed as _fail
from launcher.model import Inventory, Node
from launcher.tools.host import HostFacts

# Room to work with: logs, what vLLM compiles, and Ray where it is put on top of the image.
_GIB = 1024**3
_ROOM = {"nvidia": 5 * _GIB, "amd": 5 * _GIB, "cpu": 1 * _GIB}
# An image that must be pulled: vllm/vllm-openai is 28.6 GB unpacked (https://github.com/vllm-project/vllm/pull/22377); the
# CPU build has no CUDA libraries, and a tenth of that.
_IMAGE = {"nvidia": 30 * _GIB, "amd": 30 * _GIB, "cpu": 3 * _GIB}
# Free space is told in steps, so that nodes that differ by a few files are told once.
_STEPS = (1, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


def _docker(inventory: Inventory, node: Node, facts: HostFacts) -> Finding | None:
    if facts.docker_version is not None:
        return None
    said = facts.said.get("docker", "") or facts.said.get("info", "")
    user = facts.user or node.ssh.user or "USER"
    lowered = said.lower()
    if "permission denied" in lowered:
        return _fail(
            node,
            f"`{user}` may not talk to Docker",
            evidence=said,
            fix=f"add `docker: [sudo, -n, docker]` to the inventory, or run `sudo usermod -aG docker {user}` on {node.name}",
        )
    if "password is required" in lowered or "a terminal is required" in lowered:
        return _fail(
            node,
            "sudo asks for a password",
            evidence=said,
            fix=f"allow it without one: `echo '{user} ALL=(root) NOPASSWD: /usr/bin/docker' | sudo tee /etc/sudoers.d/vlaunch`",
        )
    if "not found" in lowered or ("no such file" in lowered and "docker.sock" not in lowered):
        return _fail(
            node,
            f"`{node.docker[-1]}` is not installed",
            evidence=said,
            fix="install Docker Engine: https://docs.docker.com/engine/install/",
        )
    return _fail(node, "Docker does not answer", evidence=said, fix=f"run `sudo systemctl start docker` on {node.name}")


def _accelerator(inventory: Inventory, node: Node, facts: HostFacts) -> Finding | None:
    if inventory.accelerator == "cpu":
        return None
    if inventory.accelerator == "amd":
        if facts.amd_gpus is None or facts.amd_gpus < node.gpus:
            return _fail(
                node,
                f"{facts.amd_gpus or 0} AMD GPUs visible, {node.gpus} declared",
                evidence=facts.said.get("gpus", ""),
                fix="correct `gpus:` in the inventory, or load the driver: `sudo modprobe amdgpu`",
            )
        return None
    if facts.gpus is None:
        return _fail(
            node,
            "no NVIDIA GPU visible",
            evidence=facts.said.get("gpus", "`nvidia-smi` gave no GPU"),
            fix="install the driver (`nvidia-smi` must list the GPUs), or set `accelerator:` in the inventory",
        )
    if len(facts.gpus) < node.gpus:
        return _fail(
            node,
            f"{len(facts.gpus)} GPUs visible, {node.gpus} declared",
            evidence=", ".join(gpu.name for gpu in facts.gpus),
            fix=f"set `gpus: {len(facts.gpus)}` for {node.name}, or find the missing GPU: `nvidia-smi -L`",
        )
    return None


def _gpu_runtime(inventory: Inventory, node: Node, facts: HostFacts) -> Finding | None:
    if inventory.accelerator != "nvidia" or facts.docker_version is None:
        return None
    if any("nvidia" in runtime or "cdi" in runtime for runtime in facts.runtimes) or facts.toolkit:
        return None
    return _fail(
        node,
        "Docker cannot hand out GPUs: neither the NVIDIA runtime nor its hook is there",
        evidence="runtimes: " + (", ".join(facts.runtimes) or "none"),
        fix="install nvidia-container-toolkit, then run "
        "`sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker`",
    )


def _address(inventory: Inventory, node: Node, facts: HostFacts) -> Finding | None:
    if facts.addresses is None:
        return skipped(node, "`ip` is not installed; addresses were not compared")
    wanted = ipaddress.ip_address(node.ip)
    has = next((each for each in facts.addresses if ipaddress.ip_address(each.ip.split("%")[0]) == wanted), None)
    known = [f"{each.interface} {each.ip}" for each in facts.addresses if each.interface != "lo"]
    if has is None:
        return _fail(
            node,
            f"no interface carries {node.ip}",
            evidence="\n".join(known),
            fix=f"set `ip:` of {node.name} to one of its addresses (the network between the nodes)",
        )
    if node.interface and node.interface not in {each.interface for each in facts.addresses}:
        return _fail(
            node,
            f"there is no interface `{node.interface}` with an address",
            evidence="\n".join(known),
            fix=f"set `network: {{interface: {has.interface}}}` for {node.name}",
        )
    if node.interface and has.interface != node.interface:
        return _fail(
            node,
            f"{node.ip} is on `{has.interface}`, not on `{node.interface}`",
            evidence="\n".join(known),
            fix=f"set `network: {{interface: {has.interface}}}` for {node.name}, or correct its `ip:`",
        )
    if not has.up:
        return _fail(node, f"`{has.interface}` is down", fix=f"run `sudo ip link set {has.interface} up` on {node.name}")
    return None


def _disk(inventory: Inventory, evidence: Evidence) -> Sequence[Finding]:
    return [_room(inventory, evidence, node) for node in evidence.reached(inventory)]


def _room(inventory: Inventory, evidence: Evidence, node: Node) -> Finding:
    facts, room = evidence.facts[node.name], _ROOM[inventory.accelerator]
    # Also an image that vlaunch made of the inventory's counts: nothing is pulled for it.
    pulled = any(image is not None for image in facts.images.values()) or bool(facts.containers)
    missing, told = _model(evidence, node)
    home = str(PurePosixPath(node.hf_home).parent)
    if facts.disk_free is not None and facts.disk_free < missing + room:
        larger = "set `hf_home:` to a larger disk, or free some space there"
        return _short(node, home, facts.disk_free, missing + room, "for the model" if missing else "", larger)
    need = room if pulled else max(room, _IMAGE[inventory.accelerator])
    if facts.docker_disk_free is not None and facts.docker_disk_free < need:
        prune = "free some space (`docker system prune -a` removes images that no container uses), or give Docker a larger disk: "
        fix = prune + "`data-root` in /etc/docker/daemon.json"
        return _short(node, "Docker's own directory", facts.docker_disk_free, need, "" if pulled else "to pull the image", fix)
    if facts.disk_free is None:
        return skipped(node, "`df` gave no answer; free space is not known")
    if facts.docker_disk_free is None and not pulled:
        return skipped(node, "the image is not here yet, and what is free in Docker's own directory is not known")
    image = "the image is here" if pulled else f"room for the image ({need / _GIB:.0f} GiB)"
    return passed(node, f"{image}, more than {_step(facts.disk_free)} free under {home}; {told}")


def _short(node: Node, place: str, free: int, need: int, why: str, fix: str) -> Finding:
    text = f"{free / _GIB:.1f} GiB free under {place}, {need / _GIB:.0f} GiB needed {why}".rstrip()
    return _fail(node, text, fix=fix)


def _model(evidence: Evidence, node: Node) -> tuple[int, str]:
    """Return the bytes of the model that a node lacks, as far as another node's files tell its size, with the words for it."""
    sizes = [sum(files.values()) for files in evidence.files.values() if files]
    if not sizes or evidence.model.startswith("/"):
        return 0, "the model's size is not known"
    has = sum((evidence.files.get(node.name) or {}).values())
    missing = max(0, max(sizes) - has)
    return missing, f"the model needs {missing / _GIB:.0f} GiB" if missing else "the model is here"


def _step(free: int) -> str:
    step = max((each for each in _STEPS if each * _GIB <= free), default=0)
    return f"{step} GiB" if step < 1000 else f"{step // 1000} TiB" if step else "0 GiB"


def _rdma(inventory: Inventory, node: Node, facts: HostFacts) -> Finding | None:
    if inventory.fabric == "ethernet" or facts.infiniband:
        return None
    return _fail(
        node,
        "no /dev/infiniband, though the inventory says " + inventory.fabric,
        evidence=facts.said.get("infiniband", ""),
        fix="load the drivers (`sudo modprobe mlx5_ib ib_uverbs`), or set `network: {fabric: ethernet}`",
    )


def cpu_has_none(inventory: Inventory) -> str:
    """Say why nothing about accelerators is asked of a cluster of CPUs."""
    return "accelerator: cpu has no device and no driver" if inventory.accelerator == "cpu" else ""


def not_nvidia(inventory: Inventory) -> str:
    """Say why nothing about NVIDIA GPUs is asked."""
    return "" if inventory.accelerator == "nvidia" else f"accelerator: {inventory.accelerator} has no NVIDIA driver"


def no_rdma(inventory: Inventory) -> str:
    """Say why nothing about RDMA is asked."""
    return "network: fabric is ethernet, which promises no RDMA" if inventory.fabric == "ethernet" else ""


CHECKS = (
    Check(
        id="docker",
        what="Docker answers",
        why="every part of the cluster is a container",
        judge=each(_docker),
        group="docker",
        needs=("sudo",),
    ),
    Check(
        id="accelerator",
        what="the declared accelerators are there",
        why="Ray and vLLM place one rank per accelerator; a missing one makes them wait half an hour and then fail",
        judge=each(_accelerator),
        spared=cpu_has_none,
        group="accelerator",
    ),
    Check(
        id="gpu-runtime",
        what="Docker can hand out GPUs",
        why="without it containers do not start: could not select device driver",
        judge=each(_gpu_runtime),
        spared=not_nvidia,
        group="docker",
        needs=("docker",),
    ),
    Check(
        id="address",
        what="the declared address is on the declared interface",
        why="Ray, NCCL and Gloo bind to it; a wrong one hangs the start without a message",
        judge=each(_address),
        group="network",
    ),
    Check(
        id="rdma-devices",
        what="RDMA devices are there",
        why="without them NCCL silently falls back to TCP",
        judge=each(_rdma),
        spared=no_rdma,
        group="rdma",
    ),
    PORTS,
    Check(
        id="disk",
        what="there is room for the image, and for the model where its size is known",
        why="a full disk ends the pull, the build or the download half-way",
        judge=_disk,
        group="storage",
    ),
)
