"""Paths of a job: on this machine, the nodes or an object store; local ones checked against bounds.

A job file may come from another person. Its local paths must lead, links included, into the file's
folder or an allowed one; paths in flags are the user's own and may lead anywhere.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.batch.checked_job import Source
from launcher.core import secret_patterns
from launcher.inventory.mistakes import describe_value

NODES = "nodes:"
SCHEMES = ("s3", "gs", "hdfs")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_MAGIC = re.compile(r"[*?\[]")


class PathError(Exception):
    """An invalid path; the text completes `path: …`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathBounds:
    """Base folder of relative paths, and the folders that paths must lead into (None: anywhere)."""

    folder: Path
    inside: tuple[Path, ...] | None = None

    def resolve(self, text: str) -> Path:
        """Return the resolved path of `text`; raises PathError outside the bounds."""
        try:
            path = (
                self.folder / (Path(text).expanduser() if text.startswith("~/") else Path(text))
            ).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise PathError(f"cannot be followed: {_error_reason(error)}") from error
        return self.check_inside(path, text)

    def check_inside(self, path: Path, text: str) -> Path:
        """Return the resolved `path`, written as `text`; raises PathError outside the bounds."""
        if self.inside is not None and not any(path.is_relative_to(root) for root in self.inside):
            trusted = quote_path(path if path.is_dir() else path.parent)
            raise PathError(
                f"{describe_value(text)} leads to {quote_path(path)}, outside the job's folder; if"
                f" you trust this job, add `--allow {trusted}`"
            )
        return path


def job_bounds(path: Path, allow: Sequence[Path]) -> PathBounds:
    """Return the bounds of the job file at `path`."""
    folder = path.parent.absolute()
    return PathBounds(folder=folder, inside=tuple(root.resolve() for root in (folder, *allow)))


def quote_path(path: Path) -> str:
    """Return a path in full, printable on one line and quoted for a shell."""
    text = str(path)
    return shlex.quote(text) if text.isprintable() else json.dumps(text)


def parse_source(text: str, within: PathBounds) -> Source:
    """Return the source of rows; raises PathError. A local path may be a pattern."""
    if (remote := _parse_elsewhere(text)) is not None:
        return remote
    fixed, pattern = split_pattern(text, within)
    root = within.resolve(fixed)
    return Source(where="control", text=str(root / pattern if pattern else root), shown=text)


def parse_target(text: str, within: PathBounds) -> Source:
    """Return the target of answers, a folder that may not exist yet; raises PathError."""
    if re.search(r"\.(?:parquet|pq|jsonl|ndjson|json|csv)/?$", text, re.IGNORECASE):
        raise PathError(
            f"should be a folder, since answers are written as several files, not"
            f" {describe_value(text)}"
        )
    if (remote := _parse_elsewhere(text)) is not None:
        if _MAGIC.search(
            remote.text.partition("?")[0] if remote.where == "remote" else remote.text
        ):
            raise PathError(f"should be a folder, not the pattern {describe_value(text)}")
        return remote
    path = within.resolve(text)
    if path.exists() and not path.is_dir():
        raise PathError(f"should be a folder; {describe_value(text)} is a file")
    if path == within.folder.resolve():
        raise PathError(
            "should be a folder of its own, such as out/, not the folder that relative paths"
            " start at"
        )
    return Source(where="control", text=str(path), shown=text)


def split_pattern(text: str, within: PathBounds) -> tuple[str, str]:
    """Split a path at its first wildcard; an existing file of that name is no pattern."""
    if not _MAGIC.search(text):
        return text, ""
    try:
        if (within.folder / text).exists():
            return text, ""
    except OSError:  # reported when it is resolved
        return text, ""
    parts = Path(text).parts
    for index, part in enumerate(parts):
        # A folder's real name may contain wildcard characters.
        if _MAGIC.search(part) and not (within.folder / Path(*parts[: index + 1])).exists():
            if parts.count("**") > 1:
                raise PathError(f"should have `**` once, not {describe_value(text)}")
            if ".." in parts[index:]:
                raise PathError(
                    f"should be a pattern without `..` behind it, not {describe_value(text)}"
                )
            return str(Path(*parts[:index])), str(Path(*parts[index:]))
    return text, ""


def _parse_elsewhere(text: str) -> Source | None:
    if text.startswith(NODES):
        return Source(where="nodes", text=_node_path(text.removeprefix(NODES)), shown=text)
    match = _SCHEME.fullmatch(text)
    if match is None:
        return None
    return Source(where="remote", text=_remote_address(text, match[1], match[2]), shown=text)


def _node_path(path: str) -> str:
    if not path.startswith("/") or path.startswith("//") or ".." in path.split("/"):
        raise PathError(
            f"should be an absolute path without `..` after `nodes:`, not {describe_value(path)}"
        )
    return path.rstrip("/") or "/"


def _remote_address(text: str, scheme: str, rest: str) -> str:
    if scheme == "file":
        raise PathError("should be the path itself for this machine, or nodes:/path for the nodes")
    if scheme not in SCHEMES:
        raise PathError(f"should start with s3://, gs:// or hdfs://, not with {scheme}://")
    address = rest.partition("?")[0]
    host = address.partition("/")[0]
    secret = secret_patterns.ADDRESS_OPTION.search(rest) or secret_patterns.VALUE.search(rest)
    if secret or ":" in host.rpartition("@")[0]:
        raise PathError(
            "should not hold a key; give it to the containers with `secrets` in the inventory"
        )
    if not host.rpartition("@")[2] or ".." in address.split("/"):
        raise PathError(
            f"should be an address without `..`, such as s3://bucket/folder, not"
            f" {describe_value(text)}"
        )
    return text


def _error_reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or "it is a loop of symbolic links").lower()
