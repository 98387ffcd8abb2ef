"""Shared memory: whether Ray's object store fits into it."""

from __future__ import annotations

from launcher.checks.shape import Check, Finding, each, failed, passed, skipped, survey_of
from launcher.model import Inventory, Node
from launcher.tools.host import HostFacts

# Ray's defaults: three tenths of the free memory, at most 200 GB and 0.95 of /dev/shm, but 10 GB
# even where /dev/shm is smaller (DEFAULT_OBJECT_STORE_MEMORY_PROPORTION,
# DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES, REQUIRE_SHM_SIZE_THRESHOLD in Ray's source).
_SHARE, _MOST, _LEAST_CAP, _ROOM = 0.3, 200 * 10**9, 10**10, 0.95


def object_store(wanted: int | None, memory: int, shm: int) -> int:
    """Return the bytes that Ray's object store takes on a node with so much memory and shared
    memory.
    """
    if wanted is not None:
        return wanted
    return int(min(memory * _SHARE, _MOST, max(_LEAST_CAP, shm * _ROOM)))


def _shm(inventory: Inventory, node: Node, facts: HostFacts) -> Finding:
    survey = survey_of(facts)
    memory = survey.memory if survey is not None else None
    size: int | None
    if inventory.shm == "private":
        size, whose, larger = (
            memory and memory // 2,
            "the container's /dev/shm, half of the memory,",
            "give `shm:` a size",
        )
    elif inventory.shm == "host":
        size, whose = survey.shm if survey is not None else None, "the host's /dev/shm"
        larger = f"`sudo mount -o remount,size={{}}G /dev/shm` on {node.name}"
    else:
        size, whose, larger = inventory.shm, "`shm:`", "raise `shm:`"
    if memory is None and inventory.ray.object_store is None:
        return skipped(node, "the node's memory is not known, and so neither is Ray's object store")
    if size is None:
        return skipped(node, "the size of /dev/shm is not known")
    store = object_store(inventory.ray.object_store, memory or 0, size)
    free = survey.shm_free if survey is not None and inventory.shm == "host" else None
    # While the cluster runs, what is taken is its own.
    running = any(container.running for container in facts.containers)
    there = size if free is None or running else free
    if store < there:
        return passed(node, f"/dev/shm of {_gib(size)} holds Ray's object store of {_gib(store)}")
    fix = (
        f"set `ray: {{object_store: {max(int(there * 0.5) // 1024**2, 75)}MiB}}` in the inventory,"
        " or make it larger: "
    )
    fix += larger.format(store * 2 // 1024**3 + 1)
    return failed(
        node,
        f"Ray's object store of {_gib(store)} does not fit: {whose} has {_gib(size)}, {_gib(there)}"
        " of it free",
        fix=fix,
    )


def _gib(size: int) -> str:
    return f"{size / 1024**3:.1f} GiB"


CHECKS = (
    Check(
        id="shm",
        what="shared memory holds Ray's object store",
        why="Ray falls back to files in /tmp otherwise, or does not start at all",
        judge=each(_shm),
        group="memory",
    ),
)
