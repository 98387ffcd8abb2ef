"""Models of a node, complete or not, and the free space of its disk."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from .files import STATE
from .place import unfinished

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# The only index that vLLM reads by default; the same weights may lie there in other forms, of which
# not all were downloaded.
_INDEX = "model.safetensors.index.json"
# Folders beside a plain model's files that are not the model's.
_IGNORED_FOLDERS = (STATE, ".cache", ".git")
_DIGITS = frozenset("0123456789abcdef")


def scan_models(request: dict[str, Any]) -> dict[str, Any]:
    """Return what lies in the Hugging Face cache `hub` (all models, or `name`), at `path`, and in
    the folders of `beside` that look like models, with their files when `files` is said, and how
    much room there is at `room`.
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
            there = any(os.path.lexists(os.path.join(path, one)) for one in ("config.json", STATE))
            if there and path != request.get("path"):
                models += _scan_folder(path, request)
    return {"models": models, "free": _free_bytes(request["room"])}


def _free_bytes(path: str) -> int:
    """Return the bytes that may be written where a path lies, or will."""
    while path not in ("/", ""):
        with contextlib.suppress(OSError):
            there = os.statvfs(path)
            return there.f_bavail * there.f_frsize
        path = os.path.dirname(path)
    return 0


def _model_names(hub: str, name: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError), os.scandir(hub) as entries:
        for each in entries:
            model = each.name.startswith("models--") and each.is_dir()
            if model and (not name or each.name == cache_folder(name)):
                found.append(each.name[8:].replace("--", "/"))
    return sorted(found)


def cache_folder(name: str) -> str:
    """Return the folder of a model in a Hugging Face cache."""
    return "models--" + name.replace("/", "--")


def _scan_repo(hub: str, name: str, request: dict[str, Any]) -> dict[str, Any]:
    root = os.path.join(hub, cache_folder(name))
    refs = dict(_read_refs(root))
    revisions = []
    for commit in _list_names(os.path.join(root, "snapshots")):
        seen = _list_files(root, os.path.join("snapshots", commit))
        revisions.append(_build_revision(root, seen, commit, request))
    incomplete = [each for each in _list_names(os.path.join(root, "blobs")) if "incomplete" in each]
    return {
        "name": name,
        "root": root,
        "kind": "hub",
        "refs": refs,
        "revisions": revisions,
        "copied": os.path.isdir(os.path.join(root, STATE)),
        "unfinished": unfinished(root),
        "downloading": len(incomplete),
        "left_over": sum(_file_size(os.path.join(root, "blobs", each)) for each in incomplete),
    }


def _scan_folder(path: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    if not os.path.isdir(path):
        return []
    judged = _build_revision(path, _list_files(path, ""), "", request)
    return [
        {
            "name": path,
            "root": path,
            "kind": "plain",
            "refs": {},
            "revisions": [judged],
            "copied": os.path.isdir(os.path.join(path, STATE)),
            "unfinished": unfinished(path),
            "downloading": 0,
            "left_over": 0,
        }
    ]


def _build_revision(
    root: str, seen: list[dict[str, Any]], commit: str, request: dict[str, Any]
) -> dict[str, Any]:
    there = [each for each in seen if each["size"] >= 0]
    said = {
        "revision": commit,
        "size": sum({each["name"]: each["size"] for each in there}.values()),
        "count": len(seen),
        "used": max((each["used"] for each in there), default=0),
        "why": _incomplete_reason(root, seen, commit),
    }
    if request.get("files"):
        said["files"] = [[each[key] for key in ("name", "size", "mtime", "sum")] for each in there]
        said["links"] = [[each["link"], each["name"]] for each in there if each["link"]]
    return said


def _incomplete_reason(root: str, seen: list[dict[str, Any]], commit: str) -> str:
    """Return why a model is not whole; empty when nothing speaks against it."""
    base = f"snapshots/{commit}/" if commit else ""
    names = {(each["link"] or each["name"])[len(base) :] for each in seen if each["size"] >= 0}
    for each in seen:
        if each["size"] < 0:
            return f"{(each['link'] or each['name'])[len(base) :]} has no content"
    missing = [each for each in _indexed_files(root, base, names) if each not in names]
    if missing:
        more = f" and {len(missing) - 1} more files" if missing[1:] else ""
        return f"{missing[0]}{more} missing"
    if "config.json" not in names and not any(name.endswith(".gguf") for name in names):
        return "config.json missing"
    if not any(name.endswith(_WEIGHTS) for name in names):
        return "no weights"
    return ""


def _indexed_files(root: str, base: str, names: set[str]) -> list[str]:
    """Return the files that the model's index names."""
    wanted: set[str] = set()
    if _INDEX in names:
        path = os.path.join(root, base, _INDEX)
        with contextlib.suppress(OSError, ValueError, AttributeError), open(path, "rb") as file:
            wanted = {str(each) for each in json.load(file)["weight_map"].values()}
    return sorted(wanted)


def _list_files(root: str, below: str) -> list[dict[str, Any]]:
    """Return the files of a snapshot or folder; a link into `blobs` is the blob, with its name as
    its sum. A size of -1: its content is not there.
    """
    found = []
    blobs = os.path.realpath(os.path.join(root, "blobs"))
    for path, folders, names in os.walk(os.path.join(root, below)):
        folders[:] = sorted(each for each in folders if each not in _IGNORED_FOLDERS)
        for each in sorted(names):
            full = os.path.join(path, each)
            name = os.path.relpath(full, root)
            real = os.path.realpath(full)
            linked = bool(below) and os.path.islink(full) and os.path.dirname(real) == blobs
            link, blob = (name, os.path.basename(real)) if linked else ("", "")
            seen = {"name": f"blobs/{blob}" if linked else name, "link": link, "sum": ""}
            if len(blob) in (40, 64) and set(blob) <= _DIGITS:
                seen["sum"] = blob
            found.append({**seen, **_file_stat(full)})
    return found


def _file_stat(path: str) -> dict[str, int]:
    try:
        now = os.stat(path)
    except OSError:
        return {"size": -1, "mtime": 0, "used": 0}
    return {"size": now.st_size, "mtime": now.st_mtime_ns, "used": int(now.st_atime)}


def _read_refs(root: str) -> Iterator[tuple[str, str]]:
    base = os.path.join(root, "refs")
    for path, _, names in os.walk(base):
        for each in names:
            full = os.path.join(path, each)
            with contextlib.suppress(OSError, UnicodeDecodeError), open(full) as file:
                yield os.path.relpath(full, base), file.read(100).strip()


def _list_names(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(path))
    return []


def _file_size(path: str) -> int:
    return max(0, _file_stat(path)["size"])
