"""Downloads of the wheels that an image lacks to run Ray, and of py-spy's, on the control machine.

uv resolves them for the image's Python and platform, around the packages of the image, none of
which may change; pip downloads exactly these files. The user's pip configuration applies to both:
indexes, find-links, constraints, certificates and proxies.
"""

import ast
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from uv import find_uv_bin

from launcher.core.errors import RequestError, UnreadableAnswer, VlaunchError
from launcher.tools.image import RAY_EXTRAS, ImagePython, pip_download
from launcher.tools.shipped.derived import WheelFile, WheelSet
from launcher.tools.shipped.py_spy import VERSION, Build, unpack

_UNFINISHED = ".resolving-"
_LIST = "wheels.json"  # the SHA-256 of each file of a folder
_A_DAY = 86400.0  # seconds
_SCHEME = 3  # increase it if the same inputs would resolve differently
_VERSION = re.compile(
    r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.?post\d+)?(\.?dev\d+)?(\+[A-Za-z0-9]+(\.[A-Za-z0-9]+)*)?"
)
_UV_GLIBC_MINORS = (17, 28, *range(31, 41))  # for which uv has a platform
_PIP_TO_UV = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraints",
    "trusted-host": "--allow-insecure-host",
}
_PIP_TO_ENV = {"cert": "SSL_CERT_FILE", "client-cert": "SSL_CLIENT_CERT", "proxy": "ALL_PROXY"}
_QUIET = {"NO_COLOR": "1", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
_OTHER_RAY = "choose another version as `ray:` in the inventory, or an image that has Ray in it"
# py-spy's wheels support all Pythons; glibc 2.17 is manylinux2014
_PY_SPY_PYTHON, _PY_SPY_GLIBC = "3.12", 17
_PIP_LIMITS = ("--retries", "1", "--timeout", "10")  # fail soon: a cluster works without py-spy


def resolve_wheels(
    image: ImagePython, version: str, cache: Path, *, timeout: float = 600.0
) -> WheelSet:
    """Return the wheels that add a version of Ray, with RAY_EXTRAS, to the image, from the cache if
    they are there.

    Args:
        cache: a folder of vlaunch's own; its content may be deleted at any time.
        timeout: seconds for each program that runs.

    Raises:
        RequestError: no wheel of Ray can run in such an image, or none fits its packages.
        VlaunchError: the index cannot be reached, pip failed, or it took too long.
    """
    folder = cache / cache_key(image, version)
    if (files := _load_cached(folder)) is not None:
        return WheelSet(ray=version, files=files)
    platform = _uv_platform(image)
    cache.mkdir(parents=True, exist_ok=True)
    _remove_stale(cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=_UNFINISHED) as temporary:
        work = Path(temporary)
        (work / "wheels").mkdir()
        request = f"ray[{RAY_EXTRAS}]=={version}"
        try:
            if _write_lock(request, image, platform, work, timeout):
                _download_wheels(image, work, timeout)
        except subprocess.CalledProcessError as error:
            raise _resolution_error(error, image, request) from None
        except subprocess.TimeoutExpired as error:
            raise VlaunchError(
                f"{Path(error.cmd[0]).name} timed out after {timeout:.0f} s resolving {request}",
                hint="test the package index: `python3 -m pip download --no-deps ray`",
            ) from None
        _store_wheels(work / "wheels", folder)
    return WheelSet(ray=version, files=_load_cached(folder) or ())


def cache_key(image: ImagePython, version: str) -> str:
    """Return the hash of Ray's version and extras, the image's Python and its packages."""
    python = [
        image.python,
        image.implementation,
        image.abiflags,
        image.machine,
        image.libc,
        image.libc_version,
    ]
    content = json.dumps(
        [_SCHEME, RAY_EXTRAS, version, python, sorted(image.distributions.items())]
    )
    return hashlib.sha256(content.encode()).hexdigest()


def _write_lock(
    request: str, image: ImagePython, platform: str, work: Path, timeout: float
) -> bool:
    """Write `requirements.txt`: the packages that the image lacks, with versions and hashes. Return
    False if it lacks none.

    uv takes the image's packages from a folder of their metadata, as if they were installed there,
    and queries no index for them: local versions such as `torch 2.13.0+cpu` may be on none. uv does
    not accept a version outside PEP 440, such as Debian's `1.7ubuntu1`.

    Raises RequestError if a package would replace one of the image.
    """
    site, pins, requirements = (work / name for name in ("site", "pins.txt", "requirements.in"))
    pins.write_text(_write_site(image, site))
    requirements.write_text(request)
    options, environment = _uv_settings(platform, image)

    def uv(*argv: str) -> str:
        return run_program((find_uv_bin(), "pip", *argv, *options), environment, timeout)

    site_options = ("--target", str(site), "--constraints", str(pins))
    plan = uv("install", "--dry-run", *site_options, "--requirements", str(requirements))
    missing = []
    for name, version in re.findall(r"^ \+ ([^=\s]+)==(\S+)", plan, re.MULTILINE):
        installed = image.distributions.get(name)
        if installed is None:
            missing.append(f"{name}=={version}\n")
        elif installed != version:
            raise RequestError(
                f"Ray would replace the image's {name} {installed} by {version}", hint=_OTHER_RAY
            )
    requirements.write_text("".join(missing))
    lock = str(work / "requirements.txt")
    uv("compile", "--generate-hashes", "--excludes", str(pins), str(requirements), "-o", lock)
    return bool(missing)


def _write_site(image: ImagePython, site: Path) -> str:
    """Write the metadata of the image's packages, except Ray, to a folder; return them as pins."""
    site.mkdir()
    pins = []
    for name, version in sorted(image.distributions.items()):
        if name != "ray" and _VERSION.fullmatch(version):
            info = site / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (info / "METADATA").write_text(metadata)
            pins.append(f"{name}=={version}\n")
    return "".join(pins)


def _download_wheels(image: ImagePython, work: Path, timeout: float) -> None:
    pip = pip_download(_release(image), image.machine, _glibc_minor(image))
    files = ("--dest", str(work / "wheels"), "--requirement", str(work / "requirements.txt"))
    run_program((*pip, "--require-hashes", *files), {"PIP_REQUIRE_VIRTUALENV": "0"}, timeout)


def run_program(argv: Sequence[str], environment: dict[str, str], timeout: float) -> str:
    """Run a program; return its output on both streams."""
    result = subprocess.run(
        argv,
        env={**os.environ, **_QUIET, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
        check=True,
    )
    return result.stdout


def fetch_py_spy(build: Build, cache: Path, *, timeout: float = 60.0) -> bytes:
    """Return py-spy for a machine, from its wheel in the cache, or downloaded.

    Raises VlaunchError if the download fails.
    """
    cached = cache / f"py_spy-{VERSION}-{build.machine}.whl"
    if cached.exists() and (program := _unpack_cached(cached, build)):
        return program
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".downloading-") as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"py-spy=={VERSION} --hash=sha256:{build.wheel}\n")
        pip = pip_download(_PY_SPY_PYTHON, build.machine, _PY_SPY_GLIBC)
        files = ("--require-hashes", "--requirement", str(requirements), "--dest", folder)
        try:
            run_program((*pip, *_PIP_LIMITS, *files), {"PIP_REQUIRE_VIRTUALENV": "0"}, timeout)
            (wheel,) = Path(folder).glob("*.whl")
        except (subprocess.SubprocessError, ValueError) as error:
            raise _py_spy_error(error, build) from None
        wheel.rename(cached)
    return unpack(cached.read_bytes(), build)


def _uv_settings(platform: str, image: ImagePython) -> tuple[list[str], dict[str, str]]:
    """Return options and variables for uv, with the user's pip configuration."""
    output = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    entries = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    settings: dict[str, str] = {}
    for section in ("global", "download", ":env:"):  # the later ones win, as in pip
        for name in (*_PIP_TO_UV, *_PIP_TO_ENV, "no-index"):
            if value := entries.get(f"{section}.{name}"):
                settings[name] = str(ast.literal_eval(value))
    options = ["--python-platform", platform, "--python-version", _release(image)]
    options += ["--python", sys.executable, "--no-python-downloads", "--only-binary", ":all:"]
    options += ["--index-strategy", "unsafe-best-match", "--no-config", "--no-progress"]
    for name, option in _PIP_TO_UV.items():
        options += [arg for value in settings.get(name, "").split() for arg in (option, value)]
    if settings.get("no-index", "0").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    return options, {
        variable: settings[name] for name, variable in _PIP_TO_ENV.items() if name in settings
    }


def _uv_platform(image: ImagePython) -> str:
    """Return uv's name of the image's platform.

    Raises RequestError unless it is CPython with glibc on x86_64 or aarch64, the only platforms of
    Ray's Linux wheels.
    """
    system = (image.implementation, image.abiflags, image.libc)
    if system != ("cpython", "", "glibc") or image.machine not in ("x86_64", "aarch64"):
        raise RequestError(
            f"Ray cannot be added to this image: it runs {image.implementation} on {image.machine}"
            f" with {image.libc or 'a C library other than glibc'}",
            hint="choose an image with glibc on x86_64 or aarch64, or one that has Ray in it",
        )
    glibc = _glibc_minor(image)
    minor = max(minor for minor in _UV_GLIBC_MINORS if minor <= max(glibc, _UV_GLIBC_MINORS[0]))
    return f"{image.machine}-manylinux_2_{minor}"


def _glibc_minor(image: ImagePython) -> int:
    """Return 31 for glibc 2.31; raises UnreadableAnswer."""
    match = re.fullmatch(r"2\.([0-9]{1,3})", image.libc_version)
    if match is None:
        raise UnreadableAnswer("cannot read the image's glibc version", evidence=image.libc_version)
    return int(match[1])


def _release(image: ImagePython) -> str:
    """Return the Python version without a suffix such as `rc1`, which uv and pip refuse."""
    match = re.match(r"\d+\.\d+\.\d+", image.python)
    return match[0] if match else image.python


def _resolution_error(
    error: subprocess.CalledProcessError, image: ImagePython, request: str
) -> VlaunchError:
    lines = [line.strip() for line in error.stdout.splitlines() if line.strip()]
    evidence = [line for line in lines if not line.startswith(("warning:", "Using "))][-8:]
    target = f"for Python {image.python} on {image.machine}"
    tags = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
    platforms = " ".join(f"--platform {tag}_{image.machine}" for tag in tags)
    offline_hint = (
        "vlaunch uses this machine's pip configuration; without an index, run on a machine that"
        " has one\n`pip download --only-binary :all:"
        f" --python-version {_release(image)} {platforms} --dest wheels '{request}'`,\n"
        "copy the folder here, and set `PIP_FIND_LINKS` to it and `PIP_NO_INDEX=1`"
    )
    if "No solution found" in error.stdout:
        return RequestError(
            f"no wheels of {request} fit the packages of the image {target}",
            evidence=evidence,
            hint=f"{_OTHER_RAY}\n{offline_hint}",
        )
    return VlaunchError(f"cannot download {request} {target}", evidence=evidence, hint=offline_hint)


def _remove_stale(cache: Path) -> None:
    """Remove leftovers of killed runs; a folder younger than a day may belong to another run."""
    for folder in cache.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(FileNotFoundError):  # that run has just ended
            if time.time() - folder.stat().st_mtime > _A_DAY:
                shutil.rmtree(folder, ignore_errors=True)


def _load_cached(folder: Path) -> tuple[WheelFile, ...] | None:
    """Return the files of an earlier resolution; None if any is missing or damaged."""
    try:
        files = tuple(
            WheelFile(name=name, sha256=digest, path=folder / name)
            for name, digest in json.loads((folder / _LIST).read_text()).items()
        )
        complete = all(_hash_file(file.path) == file.sha256 for file in files)
    except (OSError, ValueError, AttributeError):
        return None
    return files if complete else None


def _store_wheels(downloaded: Path, folder: Path) -> None:
    """Move downloaded wheels into the cache, with a list of their hashes.

    Raises VlaunchError if an earlier wheel of the same name had another hash: an index never
    changes one.
    """
    digests = {path.name: _hash_file(path) for path in sorted(downloaded.glob("*.whl"))}
    for earlier in folder.parent.glob(f"*/{_LIST}"):
        with contextlib.suppress(ValueError, AttributeError):  # damaged
            for name, digest in json.loads(earlier.read_text()).items():
                if digests.get(name, digest) != digest:
                    raise VlaunchError(
                        f"{name} has a different hash than at its first download",
                        evidence=[f"sha256 now: {digests[name]}", f"sha256 before: {digest}"],
                        hint="find out why; if you rebuilt it yourself, remove the earlier one:"
                        f" `rm -r {shlex.quote(str(earlier.parent))}`",
                    )
    (downloaded / _LIST).write_text(json.dumps(digests))
    shutil.rmtree(folder, ignore_errors=True)
    downloaded.rename(folder)


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _unpack_cached(wheel: Path, build: Build) -> bytes | None:
    try:
        return unpack(wheel.read_bytes(), build)
    except (OSError, VlaunchError):  # damaged
        return None


def _py_spy_error(error: Exception, build: Build) -> VlaunchError:
    output = error.stdout if isinstance(error, subprocess.CalledProcessError) else ""
    lines = [line.strip() for line in (output or "").splitlines() if line.strip()]
    return VlaunchError(
        f"cannot download py-spy {VERSION} for {build.machine}",
        evidence=lines[-2:],
        hint="if this machine has no index, run `pip download --no-deps --platform"
        f" manylinux2014_{build.machine} --dest wheels py-spy=={VERSION}` on one that has, copy the"
        " folder here, and set `PIP_FIND_LINKS` to it and `PIP_NO_INDEX=1`",
    )
