"""Room on a node's disks: for the image where it must be pulled, and for the model where another
node tells its size.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from launcher import sizes
from launcher.checks.shape import Check, Finding, Host, each, failed, passed, skipped, warned
from launcher.model import Node
from launcher.site import Site
from launcher.tools.host import HostFacts

# Room to work with: logs, what vLLM compiles, and Ray where it is put on top of the image.
_GIB = 1024**3
_ROOM = {"nvidia": 5 * _GIB, "amd": 5 * _GIB, "cpu": 1 * _GIB}
# An image that must be pulled: vllm/vllm-openai is 28.6 GB unpacked
# (https://github.com/vllm-project/vllm/pull/22377); the CPU build has no CUDA libraries, and a
# tenth of that.
_IMAGE = {"nvidia": 30 * _GIB, "amd": 30 * _GIB, "cpu": 3 * _GIB}
# Programs take a MiB, secrets a few bytes; what servers write down grows.
_STATE = 64 * 1024**2
# Free space is told in steps, so that nodes that differ by a few files are told once.
_STEPS = (1, 5, 10, 20, 50, 100, 200, 500, 1024, 2048, 5120, 10_240)


def _disk(host: Host) -> Finding:
    node, facts, room = host.node, host.facts, _ROOM[host.inventory.accelerator]
    missing, told = _model(host)
    home = str(PurePosixPath(node.hf_home).parent)
    if facts.disk_free is not None and facts.disk_free < missing + room:
        larger = "set `hf_home:` to a larger disk, or free some space there"
        why = "for the model" if missing else ""
        return _short(node, home, facts.disk_free, missing + room, why, larger)
    pulled, need = _is_pulled(facts), _docker_need(host)
    if facts.docker_disk_free is not None and facts.docker_disk_free < need:
        fix = (
            "free some space (`docker image prune -a` removes images that no container uses), "
            "or give Docker a larger disk: `data-root` in /etc/docker/daemon.json"
        )
        why = "" if pulled else "to pull the image"
        return _short(node, "Docker's own directory", facts.docker_disk_free, need, why, fix)
    if facts.disk_free is None:
        return skipped(node, "`df` gave no answer; free space is not known")
    if pulled:
        image = "the image is here"
    elif facts.docker_disk_free is not None:
        image = f"room for the image ({need / _GIB:.0f} GiB)"
    else:
        return skipped(
            node,
            "the image is not here yet, and what is free in Docker's own directory is not known",
        )
    return passed(node, f"{image}, more than {_step(facts.disk_free)} free under {home}; {told}")


def _docker_need(host: Host) -> int:
    """Return the bytes that must be free for Docker: room to work with, or for the image."""
    room = _ROOM[host.inventory.accelerator]
    return room if _is_pulled(host.facts) else max(room, _IMAGE[host.inventory.accelerator])


def _is_pulled(facts: HostFacts) -> bool:
    """True when nothing must be pulled: an image that vlaunch made of the inventory's counts."""
    return any(image is not None for image in facts.images.values()) or bool(facts.containers)


def _short(node: Node, place: str, free: int, need: int, why: str, fix: str) -> Finding:
    text = f"{free / _GIB:.1f} GiB free under {place}, {need / _GIB:.0f} GiB needed {why}".rstrip()
    return failed(node, text, fix=fix)


def _model(host: Host) -> tuple[int, str]:
    """Return the bytes of the model that a node lacks, as far as another node's files tell its
    size, with the words for it.
    """
    evidence = host.evidence
    if not evidence.model:
        return 0, "no model is named, so its size is not known"
    whole = max((sum(files.values()) for files in evidence.files.values() if files), default=0)
    missing = whole - sum((evidence.files.get(host.name) or {}).values())
    if whole and not missing:
        return 0, "the model is here"
    # A path is filled by hand, and need not be on the disk of the Hugging Face home.
    if not whole or evidence.model.startswith("/"):
        return 0, "the model's size is not known"
    return missing, f"the model needs {missing / _GIB:.0f} GiB more"


def _step(free: int) -> str:
    step = max((step for step in _STEPS if step * _GIB <= free), default=0)
    return f"{step // 1024} TiB" if step >= 1024 else f"{step} GiB"


def _state(host: Host) -> Finding:
    node, seen = host.node, host.facts.state
    folder = Site(host.inventory, host.evidence.facts).state_dir(node)
    if seen is None:
        return skipped(node, f"{folder} could not be looked at")
    elsewhere = "or set `state_dir:` in the inventory to a folder that the login may write to"
    if seen.read_only:
        fix = f"remount it (`sudo mount -o remount,rw …`), {elsewhere}"
        return failed(node, f"{folder} is on a read-only file system", fix=fix)
    if not seen.writable:
        user = host.facts.user or node.ssh.user or "the login"
        fix = f"see `ls -ld` of it and of the folders above it on {node.name}, {elsewhere}"
        return failed(node, f"{folder} cannot be written to by `{user}`", fix=fix)
    if seen.free < _STATE:
        fix = f"free some space there: `df -h` and `du -sh ~` on {node.name}, {elsewhere}"
        text = f"{seen.free / 2**20:.0f} MiB free for {folder}, {_STATE / 2**20:.0f} MiB needed"
        return failed(node, text, fix=fix)
    return passed(node, "the state directory can be written to")


STATE = Check(
    id="state-dir",
    what="the state directory can be written to",
    why="the programs and secrets that containers mount, and what servers write down, lie there",
    judge=each(_state),
    group="storage",
)


def _compiled(host: Host) -> Finding:
    """Judge where engines keep what they compile; that it is not there yet is no fault."""
    found = host.facts.compiled
    if found is None:
        return skipped(host, "the file system of `cache_dir` is not known")
    if found.remote:
        return warned(
            host,
            f"what engines compile would lie on {found.kind}, a file system over the network",
            fix=(
                f"set `cache_dir:` of {host.name}, or `state_dir:` for all of its files, to a"
                " folder on a disk of its own"
            ),
        )
    if found.size is None or found.size < sizes.MIB:
        return passed(host, f"{found.kind}, nothing compiled yet")
    return passed(host, f"{found.kind}, {sizes.told(found.size)} compiled")


COMPILED = Check(
    id="cache-dir",
    what="what engines compile is kept on each node's own disk",
    why=(
        "it is thousands of small files, for this node's GPUs alone: over a network they are slow,"
        " and nodes that share them spoil them for each other"
    ),
    judge=each(_compiled),
    group="storage",
)

DISK = Check(
    id="disk",
    what="there is room for the image, and for the model where its size is known",
    why="a full disk ends the pull, the build or the download half-way",
    judge=each(_disk),
    group="storage",
)
