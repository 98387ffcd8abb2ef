"""Recipes of vLLM's repository: in a folder, in an archive, or in the newest release on the package
index. Archives are read where they are; nothing in them is unpacked or executed.
"""

import ast
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import requests

from launcher.core.errors import RequestError, VlaunchError
from launcher.recipes.library import version_numbers

# In a checkout, a source distribution, or the folder `recipes` itself (or vllm-project/recipes).
_RECIPE = re.compile(r"(?:recipes/)?models/([^/]+/[^/]+)\.yaml")
_VERSION_FILE = "PKG-INFO"  # of a source distribution
_RELEASE = re.compile(r"vllm-(\d+(?:\.\d+)+)\.tar\.gz")
_INDEX = "https://pypi.org/simple"
_JSON = "application/vnd.pypi.simple.v1+json"  # PEP 691
_TIMEOUT = 60.0  # seconds without an answer of the index
_MAX_BYTES = 1 << 20  # of a file
_HINT = "name a checkout or a source distribution of vLLM: `--source vllm-0.33.0.tar.gz`"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSource:
    """Texts of recipes by name (ORG/MODEL); `version` is vLLM's, empty if unknown."""

    origin: str
    version: str
    texts: dict[str, str]


def read_source(path: Path) -> RecipeSource:
    """Read the recipes of a folder or an archive; raises RequestError if it has none."""
    version, texts = "", {}
    try:
        for name, data in _folder_files(path) if path.is_dir() else _archive_files(path):
            text = data.decode()
            if match := _RECIPE.fullmatch(name):
                texts[match[1]] = text
            elif line := re.search(r"^Version: (\S+)", text, re.M):
                version = line[1]
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist", hint=_HINT) from None
    except (OSError, ValueError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as why:
        reason = str(why).partition("\n")[0].rstrip(":")
        raise RequestError(f"cannot read {path}", evidence=reason, hint=_HINT) from None
    if not texts:
        raise RequestError(
            f"{path} has no recipes",
            evidence="no file matches recipes/models/ORG/MODEL.yaml",
            hint=_HINT,
        )
    label = f"vLLM {version}" if version else str(path)
    return RecipeSource(origin=label, version=version, texts=dict(sorted(texts.items())))


@contextmanager
def newest_release() -> Iterator[Path]:
    """Download the newest source distribution of vLLM from pip's index, for the time of a block.

    Raises VlaunchError if that fails.
    """
    try:
        settings = _pip_settings()
        verify = settings.get("cert", True)
        index = str(settings.get("index-url", _INDEX)).rstrip("/")
        with requests.Session() as session, tempfile.TemporaryDirectory() as folder:
            page = session.get(
                f"{index}/vllm/", headers={"Accept": _JSON}, timeout=_TIMEOUT, verify=verify
            )
            page.raise_for_status()
            file = _newest_file(page.json()["files"])
            path = Path(folder) / file["filename"]
            url = requests.compat.urljoin(page.url, file["url"])
            with session.get(url, stream=True, timeout=_TIMEOUT, verify=verify) as answer:
                answer.raise_for_status()
                _save(answer, path, file["hashes"]["sha256"])
            yield path
    except (requests.RequestException, LookupError, TypeError, ValueError) as why:
        raise VlaunchError(
            "cannot download vLLM's source distribution from the package index",
            evidence=str(why),
            hint=f"download it by hand, then {_HINT}",
        ) from None


def _newest_file(files: Any) -> Any:
    """Return the newest source distribution of an index page; pre-releases do not match."""
    releases = [
        (version_numbers(match[1]), file)
        for file in files
        if (match := _RELEASE.fullmatch(file["filename"])) and not file.get("yanked")
    ]
    if not releases:
        raise LookupError("the index has no source distribution of vLLM")
    return max(releases, key=lambda release: release[0])[1]


def _save(answer: requests.Response, path: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in answer.iter_content(1 << 20):
            file.write(chunk)
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise ValueError(f"{path.name} has another hash than the index states")


def _pip_settings() -> dict[str, Any]:
    """Return the user's settings of pip; variables override files."""
    output = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    settings: dict[str, Any] = {}
    for section in ("global.", ":env:."):
        for line in output.splitlines():
            name, equals, value = line.partition("=")
            if equals and name.startswith(section):
                settings[name.removeprefix(section)] = ast.literal_eval(value)
    return settings


def _folder_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the relevant files of a folder, with their paths in it."""
    for pattern in (_VERSION_FILE, "recipes/models/*/*.yaml", "models/*/*.yaml"):
        for path in folder.glob(pattern):
            with path.open("rb") as file:
                yield str(path.relative_to(folder)), _read_limited(file, path.name)


def _archive_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the relevant files of an archive, with their paths in its top folder."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in filter(_is_relevant, archive.namelist()):
                with archive.open(name) as file:
                    yield _inner_path(name), _read_limited(file, name)
        return
    with tarfile.open(path) as tar:
        for member in tar:
            relevant = member.isfile() and _is_relevant(member.name)
            if relevant and (opened := tar.extractfile(member)) is not None:
                yield _inner_path(member.name), _read_limited(opened, member.name)


def _is_relevant(name: str) -> bool:
    inner = _inner_path(name)
    return inner == _VERSION_FILE or _RECIPE.fullmatch(inner) is not None


def _inner_path(name: str) -> str:
    return name.partition("/")[2]


def _read_limited(file: IO[bytes], name: str) -> bytes:
    data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{name} is larger than {_MAX_BYTES >> 20} MiB")
    return data
