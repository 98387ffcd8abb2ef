"""Models of a node, complete or not, and the free space of its disk."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from .files import STATE
from .place import unfinished_bytes

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# The only index that vLLM reads by default; weights in other formats may be incomplete.
_INDEX = "model.safetensors.index.json"
# Subfolders of a plain model that do not belong to it.
_IGNORED_FOLDERS = (STATE, ".cache", ".git")
_DIGITS = frozenset("0123456789abcdef")


def scan_models(request: dict[str, Any]) -> dict[str, Any]:
    """Return the models in the Hugging Face cache `hub` (all, or `name`), at `path`, and in the
    subfolders of `beside` that look like models, with the free bytes at `room`. `files` adds the
    models' files.
    """
    models = []
    if request.get("hub"):
        models += [
            _scan_repo(request["hub"], name, request)
            for name in _model_names(request["hub"], request.get("name", ""))
        ]
    if request.get("path"):
        models += _scan_folder(request["path"], request)
    if request.get("beside"):
        for name in _list_names(request["beside"]):
            path = os.path.join(request["beside"], name)
            markers = [os.path.join(path, marker) for marker in ("config.json", STATE)]
            if any(map(os.path.lexists, markers)) and path != request.get("path"):
                models += _scan_folder(path, request)
    return {"models": models, "free": _free_bytes(request["room"])}


def _free_bytes(path: str) -> int:
    """Return the free bytes on the disk of a path, which need not exist yet."""
    while path not in ("/", ""):
        with contextlib.suppress(OSError):
            status = os.statvfs(path)
            return status.f_bavail * status.f_frsize
        path = os.path.dirname(path)
    return 0


def _model_names(hub: str, name: str) -> list[str]:
    models = []
    with contextlib.suppress(OSError), os.scandir(hub) as entries:
        for entry in entries:
            is_model = entry.name.startswith("models--") and entry.is_dir()
            if is_model and (not name or entry.name == cache_folder(name)):
                models.append(entry.name[8:].replace("--", "/"))
    return sorted(models)


def cache_folder(name: str) -> str:
    """Return the folder of a model in a Hugging Face cache."""
    return "models--" + name.replace("/", "--")


def _scan_repo(hub: str, name: str, request: dict[str, Any]) -> dict[str, Any]:
    root = os.path.join(hub, cache_folder(name))
    refs = dict(_read_refs(root))
    revisions = []
    for commit in _list_names(os.path.join(root, "snapshots")):
        files = _list_files(root, os.path.join("snapshots", commit))
        revisions.append(_build_revision(root, files, commit, request))
    blobs = os.path.join(root, "blobs")
    incomplete = [blob for blob in _list_names(blobs) if "incomplete" in blob]
    return {
        "name": name,
        "root": root,
        "kind": "hub",
        "refs": refs,
        "revisions": revisions,
        "copied": os.path.isdir(os.path.join(root, STATE)),
        "unfinished": unfinished_bytes(root),
        "downloading": len(incomplete),
        "left_over": sum(_file_size(os.path.join(blobs, blob)) for blob in incomplete),
    }


def _scan_folder(path: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    if not os.path.isdir(path):
        return []
    revision = _build_revision(path, _list_files(path, ""), "", request)
    return [
        {
            "name": path,
            "root": path,
            "kind": "plain",
            "refs": {},
            "revisions": [revision],
            "copied": os.path.isdir(os.path.join(path, STATE)),
            "unfinished": unfinished_bytes(path),
            "downloading": 0,
            "left_over": 0,
        }
    ]


def _build_revision(
    root: str, files: list[dict[str, Any]], commit: str, request: dict[str, Any]
) -> dict[str, Any]:
    stored = [file for file in files if file["size"] >= 0]
    revision = {
        "revision": commit,
        "size": sum({file["name"]: file["size"] for file in stored}.values()),
        "count": len(files),
        "used": max((file["used"] for file in stored), default=0),
        "why": _incomplete_reason(root, files, commit),
    }
    if request.get("files"):
        keys = ("name", "size", "mtime", "sum")
        revision["files"] = [[file[key] for key in keys] for file in stored]
        revision["links"] = [[file["link"], file["name"]] for file in stored if file["link"]]
    return revision


def _incomplete_reason(root: str, files: list[dict[str, Any]], commit: str) -> str:
    """Return why a model is incomplete; empty for a complete one."""
    base = f"snapshots/{commit}/" if commit else ""
    names = {(file["link"] or file["name"])[len(base) :] for file in files if file["size"] >= 0}
    for file in files:
        if file["size"] < 0:
            return f"{(file['link'] or file['name'])[len(base) :]} has no content"
    missing = [name for name in _indexed_files(root, base, names) if name not in names]
    if missing:
        suffix = f" and {len(missing) - 1} more files" if missing[1:] else ""
        return f"{missing[0]}{suffix} missing"
    if "config.json" not in names and not any(name.endswith(".gguf") for name in names):
        return "config.json missing"
    if not any(name.endswith(_WEIGHTS) for name in names):
        return "no weights"
    return ""


def _indexed_files(root: str, base: str, names: set[str]) -> list[str]:
    """Return the files that the model's index names."""
    indexed: set[str] = set()
    if _INDEX in names:
        path = os.path.join(root, base, _INDEX)
        with contextlib.suppress(OSError, ValueError, AttributeError), open(path, "rb") as file:
            indexed = {str(name) for name in json.load(file)["weight_map"].values()}
    return sorted(indexed)


def _list_files(root: str, below: str) -> list[dict[str, Any]]:
    """Return the files of a snapshot or folder; a link into `blobs` becomes the blob, with the
    blob's name as its digest. A size of -1 marks a broken link.
    """
    files = []
    blobs = os.path.realpath(os.path.join(root, "blobs"))
    for path, folders, names in os.walk(os.path.join(root, below)):
        folders[:] = sorted({*folders} - {*_IGNORED_FOLDERS})
        for file_name in sorted(names):
            full = os.path.join(path, file_name)
            name = os.path.relpath(full, root)
            real = os.path.realpath(full)
            linked = bool(below) and os.path.islink(full) and os.path.dirname(real) == blobs
            link, blob = (name, os.path.basename(real)) if linked else ("", "")
            file = {"name": f"blobs/{blob}" if linked else name, "link": link, "sum": ""}
            if len(blob) in (40, 64) and set(blob) <= _DIGITS:
                file["sum"] = blob
            files.append({**file, **_file_stat(full)})
    return files


def _file_stat(path: str) -> dict[str, int]:
    try:
        status = os.stat(path)
    except OSError:
        return {"size": -1, "mtime": 0, "used": 0}
    return {"size": status.st_size, "mtime": status.st_mtime_ns, "used": int(status.st_atime)}


def _read_refs(root: str) -> Iterator[tuple[str, str]]:
    base = os.path.join(root, "refs")
    for path, _, names in os.walk(base):
        for file_name in names:
            full = os.path.join(path, file_name)
            with contextlib.suppress(OSError, UnicodeDecodeError), open(full) as file:
                yield os.path.relpath(full, base), file.read(100).strip()


def _list_names(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(path))
    return []


def _file_size(path: str) -> int:
    return max(0, _file_stat(path)["size"])
