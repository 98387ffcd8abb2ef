"""Sources of vLLM and Ray from the package index: downloaded, unpacked, never executed.

uv resolves the address and hash of a file from metadata alone, where `pip download` would run the
`setup.py` of a source distribution. The user's configuration of uv and pip applies.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import requests
from uv import find_uv_bin

from launcher.core.errors import VlaunchError
from launcher.upstream.entries import parse_version

# For which wheels are chosen; their Python files are the same everywhere.
_PYTHON, _PLATFORM = "3.12", "x86_64-manylinux_2_35"
_KEPT = re.compile(
    r"(?:vllm|ray)/(?!.*\bthirdparty_files/|rllib/|tune/|train/).*\.py|rust/.*\.rs|recipes/models/[^/]+/[^/]+\.yaml|csrc/cpu/.*\.py"
    r"|nvidia/nccl/lib/libnccl\.so\.2|ray/_raylet\.so|ray/core/src/ray/(?:gcs/gcs_server|raylet/raylet)"
)
_FILE = re.compile(r'\burl = "([^"]+)".*?\bsha256 = "([0-9a-f]{64})"')
_TIMEOUT = 600.0  # seconds


def list_releases(package: str) -> list[str]:
    """Return the versions of a package in the index, without pre-releases."""
    output = _run(sys.executable, "-m", "pip", "index", "versions", "--json", package)
    return list(json.loads(output)["versions"])


def downloaded_releases(package: str, folder: Path) -> list[str]:
    """Return the versions of a package in the folder."""
    archives = (path.name.removesuffix(".tar.gz") for path in _archives(package, folder))
    return [name.split("-")[1] for name in archives]


def newest_minors(versions: Iterable[str], count: int) -> list[str]:
    """Return the newest release of each of the newest minor versions, the oldest first."""
    newest: dict[tuple[int, ...], str] = {}
    for version in sorted(versions, key=parse_version):
        newest[parse_version(version)[:2]] = version
    return list(newest.values())[-count:]


def fetch_source(package: str, version: str, folder: Path, *, offline: bool) -> Path:
    """Return the folder with the source of a version, downloaded and unpacked if necessary."""
    unpacked = folder / f"{package}-{version}"
    if unpacked.is_dir():
        return unpacked
    folder.mkdir(parents=True, exist_ok=True)
    archive = next(iter(_archives(package, folder, version)), None)
    if archive is None:
        if offline:
            raise VlaunchError(
                f"{package} {version} is not in {folder}",
                hint="run `make contract` with access to a package index",
            )
        archive = _download(package, version, folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as temporary:
        work = Path(temporary) / "source"
        for name, data in _members(archive):
            path = work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        work.rename(unpacked)
    return unpacked


def _archives(package: str, folder: Path, version: str = "*") -> list[Path]:
    name = package.replace("-", "_")
    return [*folder.glob(f"{name}-{version}.tar.gz"), *folder.glob(f"{name}-{version}-*.whl")]


def _download(package: str, version: str, folder: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".downloading-") as temporary:
        request = Path(temporary) / "request.in"
        request.write_text(f"{package}=={version}\n")
        target = ("--python-version", _PYTHON, "--python-platform", _PLATFORM)
        lock = _run(
            *(find_uv_bin(), "pip", "compile", "--quiet", "--no-deps", "--no-python-downloads"),
            *("--format", "pylock.toml", *target, str(request)),
        )
        url, digest = _choose_file(lock, package, version)
        partial = Path(temporary) / url.rpartition("/")[2]
        actual = hashlib.sha256()
        with requests.get(url, stream=True, timeout=60) as answer, partial.open("wb") as file:
            answer.raise_for_status()
            for chunk in answer.iter_content(1 << 20):
                file.write(chunk)
                actual.update(chunk)
        if actual.hexdigest() != digest:
            raise VlaunchError(f"{url} has another hash than the index states", evidence=digest)
        return Path(shutil.move(partial, folder / partial.name))


def _choose_file(lock: str, package: str, version: str) -> tuple[str, str]:
    """Return address and SHA-256 of the source distribution, or else the wheel, from a lock."""
    files = [match.groups() for match in _FILE.finditer(lock)]
    sources = [file for file in files if file[0].endswith(".tar.gz")]
    wheels = [file for file in files if re.search("-(?:cp312|abi3|none)-", file[0])]
    if not (sources or wheels):
        raise VlaunchError(f"the index has no file of {package} {version}", evidence=lock)
    address, digest = (sources or wheels)[0]
    return str(address), str(digest)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the relevant files of an archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if _is_kept(name):
                    yield name, wheel.read(name)
        return
    with tarfile.open(archive) as source:
        for member in source:
            name = member.name.partition("/")[2]
            file = source.extractfile(member) if member.isfile() and _is_kept(name) else None
            if file is not None:
                yield name, file.read()


def _is_kept(name: str) -> bool:
    return ".." not in Path(name).parts and _KEPT.fullmatch(name) is not None


def _run(*argv: str) -> str:
    result = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if result.returncode:
        raise VlaunchError(f"`{' '.join(argv[:4])} …` failed", evidence=result.stderr)
    return result.stdout
