"""Prints what a container that will serve sees, as one JSON object.

Standard library only, for any Python from 3.6 on, because it runs with what the image has; the
versions of packages are read from their metadata, for importing torch alone takes seconds.
"""

import glob
import json
import os
import platform
import resource

try:
    from importlib import metadata
except ImportError:
    metadata = None

LIBRARIES = "/usr/lib/*-linux-gnu /lib/*-linux-gnu /usr/lib64 /lib64 /usr/lib /lib /usr/local/lib"
WANTED = ("NCCL_", "RCCL_", "GLOO_", "UCX_", "TP_")


def version(*names):
    """Return the version of the first of these packages that is there."""
    for name in names:
        try:
            return metadata.version(name)
        except Exception:  # noqa: S112 - whatever is wrong with an image's packages
            continue
    return ""


def status(key):
    """Return a word from what the kernel says of this process."""
    try:
        with open("/proc/self/status") as file:
            return next((line.split()[1] for line in file if line.startswith(key + ":")), "0")
    except OSError:
        return "0"


def names(folder):
    """Return the names in a folder, none where there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def verbs():
    """Return where the library is that NCCL needs for RDMA."""
    own = [each for each in os.environ.get("LD_LIBRARY_PATH", "").split(":") if each]
    for folder in [*own, *LIBRARIES.split(), "/opt/conda/lib"]:
        found = sorted(glob.glob(os.path.join(folder, "libibverbs.so*")))
        if found:
            return found[0]
    return ""


def shm():
    """Return the size of /dev/shm."""
    try:
        found = os.statvfs("/dev/shm")
        return found.f_frsize * found.f_blocks
    except OSError:
        return None


def main():
    """Print it."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    said = {
        "memlock": None if soft == resource.RLIM_INFINITY else soft,
        "capeff": status("CapEff"),
        "infiniband": names("/dev/infiniband"),
        "imex": names("/dev/nvidia-caps-imex-channels"),
        "libibverbs": verbs(),
        "shm": shm(),
        "python": platform.python_version(),
        "ray": version("ray"),
        "torch": version("torch"),
        "nccl": version("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
        "cuda": os.environ.get("CUDA_VERSION", ""),
        "env": {
            key: value
            for key, value in os.environ.items()
            if key.startswith(WANTED) or key == "VLLM_HOST_IP"
        },
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
