"""Shared memory: whether Ray's object store fits into it."""

from __future__ import annotations

from launcher.checks.shape import Check, Finding, Host, each, failed, passed, skipped

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


def _shm(host: Host) -> Finding:
    wanted = host.inventory.ray.object_store
    memory = host.survey.memory if host.survey is not None else None
    if memory is None and wanted is None:
        return skipped(host, "the node's memory is not known, and so neither is Ray's object store")
    size, whose, larger = _shared(host)
    if size is None:
        return skipped(host, "the size of /dev/shm is not known")
    store = object_store(wanted, memory or 0, size)
    there = _free(host, size)
    if store < there:
        return passed(host, f"/dev/shm of {_gib(size)} holds Ray's object store of {_gib(store)}")
    smaller = max(int(there * 0.5) // 1024**2, 75)
    return failed(
        host,
        f"Ray's object store of {_gib(store)} does not fit: {whose} has {_gib(size)}, {_gib(there)}"
        " of it free",
        fix=(
            f"set `ray: {{object_store: {smaller}MiB}}` in the inventory, or make it larger:"
            f" {larger.format(store * 2 // 1024**3 + 1)}"
        ),
    )


def _shared(host: Host) -> tuple[int | None, str, str]:
    """Return the bytes of the container's shared memory, whose it is, and how to make it larger:
    `{}` stands for GiB.
    """
    survey, shm = host.survey, host.inventory.shm
    if shm == "private":
        memory = survey.memory if survey is not None else None
        whose = "the container's /dev/shm, half of the memory,"
        return memory and memory // 2, whose, "give `shm:` a size"
    if shm == "host":
        larger = f"`sudo mount -o remount,size={{}}G /dev/shm` on {host.name}"
        return survey.shm if survey is not None else None, "the host's /dev/shm", larger
    return shm, "`shm:`", "raise `shm:`"


def _free(host: Host, size: int) -> int:
    """Return the bytes of the shared memory that are free for this cluster."""
    survey = host.survey
    if host.inventory.shm != "host" or survey is None or survey.shm_free is None:
        return size
    # While the cluster runs, what is taken is its own.
    running = any(container.running for container in host.facts.containers)
    return size if running else survey.shm_free


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
