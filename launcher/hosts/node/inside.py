"""Prints what a container that will serve sees, as one JSON object.

Standard library only, for any Python from 3.6 on, because it runs with what the image has; the
versions of packages are read from their metadata, for importing torch alone takes seconds.
"""

import glob
import json
import os
import platform
import resource

LIBRARIES = "/usr/lib/*-linux-gnu /lib/*-linux-gnu /usr/lib64 /lib64 /usr/lib /lib /usr/local/lib"
IPC_LOCK = 14  # its bit in CapEff (include/uapi/linux/capability.h)


def ray() -> str:
    """Return the version of Ray, or nothing."""
    try:
        from importlib import metadata

        return metadata.version("ray")
    except Exception:  # whatever is wrong with an image's packages
        return ""


def ipc_lock() -> "bool | None":
    """Return whether memory may be locked, by what the kernel says of this process."""
    try:
        with open("/proc/self/status") as file:
            bits = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        return None
    return bool(int(bits, 16) >> IPC_LOCK & 1)


def names(folder: str) -> "list[str]":
    """Return the names in a folder, none where there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def verbs() -> str:
    """Return where the library is that NCCL needs for RDMA."""
    library_path = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for folder in [*library_path, *LIBRARIES.split(), "/opt/conda/lib"]:
        matches = sorted(glob.glob(os.path.join(folder, "libibverbs.so*")))
        if matches:
            return matches[0]
    return ""


def main() -> None:
    """Print it."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    view = {
        "memlock": None if soft == resource.RLIM_INFINITY else soft,
        "memlock_unlimited": soft == resource.RLIM_INFINITY,
        "ipc_lock": ipc_lock(),
        "infiniband": names("/dev/infiniband"),
        "imex": names("/dev/nvidia-caps-imex-channels"),
        "libibverbs": verbs(),
        "python": platform.python_version(),
        "ray": ray(),
    }
    print(json.dumps(view))


if __name__ == "__main__":
    main()
