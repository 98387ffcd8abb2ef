"""Find the wheels that an image lacks to run Ray, with the control machine's own pip and pip
configuration.

Nothing the image has may change, so each of its distributions is offered to pip as the only
candidate of its name: an empty stand-in wheel, pinned by a constraint. pip then finds what fits
around them, or says which requirement cannot be met. Indexes are never asked about names the image
has, so they need not know its local versions (`torch 2.13.0+cpu`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
import time
from pathlib import Path

from launcher.errors import RequestError, VlaunchError
from launcher.remote import pip
from launcher.tools import purewheel
from launcher.tools.derived import WheelFile, WheelSet
from launcher.tools.image import RAY_EXTRAS, ImagePython, normalise

_UNFINISHED = ".resolving-"
_A_DAY = 86400.0  # seconds
_SCHEME = 2  # raise it when the same inputs would be resolved differently
_VERSION = re.compile(
    r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.?post\d+)?(\.?dev\d+)?(\+[A-Za-z0-9]+(\.[A-Za-z0-9]+)*)?"
)


def resolve(
    image: ImagePython,
    version: str,
    cache: Path,
    *,
    timeout: float = 600.0,
    progress: pip.Progress = lambda _: None,
) -> WheelSet:
    """Return the wheels that give the image Ray of a version, with RAY_EXTRAS, from the cache when
    they are there.

    Args:
        cache: a folder of our own; its content may be deleted at any time.
        timeout: seconds for resolving and downloading together.
        progress: told what is being fetched, one line at a time.

    Raises:
        RequestError: no wheel of Ray can fit the image, or its packages conflict with what this Ray
            requires.
        VlaunchError: pip found nothing, failed, or took too long.
    """
    entry = cache / "resolutions" / f"{key(image, version)}.json"
    known = _recall(entry, cache)
    if known is not None:
        return WheelSet(ray=version, files=known)
    cache.mkdir(parents=True, exist_ok=True)
    _sweep(cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=_UNFINISHED) as folder:
        work = Path(folder)
        got = work / "got"
        constraints = _stand_ins(image, work)
        pip.download(
            f"ray[{RAY_EXTRAS}]=={version}",
            image,
            constraints,
            got,
            timeout=timeout,
            progress=progress,
        )
        files = tuple(
            _keep(path, cache) for path in sorted(got.glob("*.whl")) if _is_new(path, image)
        )
    _remember(entry, files)
    return WheelSet(ray=version, files=files)


def key(image: ImagePython, version: str) -> str:
    """Return the hash of all that decides a resolution: Ray's version and extras, the image's
    Python and its distributions.
    """
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


def _sweep(cache: Path) -> None:
    """Remove what killed runs left behind; a younger folder may be another run at work."""
    for folder in cache.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(FileNotFoundError):  # that run has just ended
            if time.time() - folder.stat().st_mtime > _A_DAY:
                shutil.rmtree(folder, ignore_errors=True)


def _recall(entry: Path, cache: Path) -> tuple[WheelFile, ...] | None:
    """Return what an earlier resolution found, or None when it is not known or not whole any
    more.
    """
    try:
        rows = json.loads(entry.read_text())
        files = tuple(
            WheelFile(name=name, sha256=digest, path=_home(cache, name, digest))
            for name, digest in rows
        )
        whole = all(_digest(file.path) == file.sha256 for file in files)
    except (OSError, ValueError, TypeError):
        return None
    return files if whole else None


def _remember(entry: Path, files: tuple[WheelFile, ...]) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
        json.dump([[wheel.name, wheel.sha256] for wheel in files], file)
    os.replace(file.name, entry)  # noqa: PTH105 - whole or not at all


def _stand_ins(image: ImagePython, work: Path) -> Path:
    """Write an empty wheel per distribution of the image; return the constraints file that pins pip
    to them.
    """
    folder = work / "image"
    folder.mkdir()
    lines = []
    for name, version in sorted(image.distributions.items()):
        if _VERSION.fullmatch(version) and name != "ray":
            file, data = purewheel.build(name, version)
            (folder / file).write_bytes(data)
            lines.append(f"{name} @ {(folder / file).as_uri()}\n")
    path = work / "constraints.txt"
    path.write_text("".join(lines))
    return path


def _is_new(path: Path, image: ImagePython) -> bool:
    """True for a wheel the image lacks.

    Raises:
        RequestError: it would replace what the image has, possible only where pip cannot read the
            image's version.
    """
    name, version = path.name.split("-")[:2]
    there = image.distributions.get(normalise(name))
    if there is None or there == version:
        return there is None
    raise RequestError(
        f"Ray would replace the image's {normalise(name)} {there} by {version}",
        hint="choose another version as `ray:` in the inventory, or an image that has Ray in it",
    )


def _keep(path: Path, cache: Path) -> WheelFile:
    """Move a downloaded wheel to its place in the cache, which its own hash names.

    Raises:
        VlaunchError: an earlier wheel of this name had another hash: an index never does that.
    """
    digest = _digest(path)
    earlier = {wheel.parent for wheel in (cache / "wheels").glob(f"*/{path.name}")}
    if known := sorted(folder for folder in earlier if folder.name != digest):
        raise VlaunchError(
            f"{path.name} is another file than before: whoever offers it has changed it",
            evidence=[f"sha256 now: {digest}", f"sha256 before: {known[0].name}"],
            hint="find out why; if you have built it anew yourself, forget the earlier one:"
            f" `rm -r {shlex.quote(str(known[0]))}`",
        )
    home = _home(cache, path.name, digest)
    home.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, home)
    return WheelFile(name=path.name, sha256=digest, path=home)


def _home(cache: Path, name: str, digest: str) -> Path:
    return cache / "wheels" / digest / name


def _digest(path: Path) -> str:
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            whole.update(block)
    return whole.hexdigest()
