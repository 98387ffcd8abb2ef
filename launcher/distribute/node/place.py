"""Installation of a copy: parts become files under their final names, then the links and refs of a
Hugging Face cache, and the record. The file that identifies a model comes last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import Any

from . import record
from .files import STATE, open_plain, safe_name, safe_path, state_folder
from .store import ChunkStore, discard_parts

_MARKER = "config.json"  # a folder without it does not count as a model


def check_names(request: dict[str, Any]) -> None:
    """Raise UnsafeName when a name of a request leads out of its folder."""
    for link in request.get("links", ()):
        safe_name(link[0])
        safe_name(link[1])
    for ref in request.get("refs", ()):
        safe_name(ref[0])
    if request.get("label"):
        safe_name(f"{request['label']}.json")


def install_files(store: ChunkStore, request: dict[str, Any]) -> None:
    """Install the files of a copy; raises OSError and UnsafeName.

    `links` of the request are pairs of a name and its target, `refs` pairs of a name and the file's
    text; `label` names the record.
    """
    root = store.root
    state_folder(root, "parts")
    files = range(len(store.manifest.files))
    for index in sorted(files, key=lambda index: store.manifest.files[index].name == _MARKER):
        if not store.in_place[index]:
            _install_file(store, index)
    for name, target in request.get("links", ()):
        _make_link(root, name, target)
    give_to_owner(root)
    record.write_record(root, request["label"], store.manifest, bytes(store.digests))
    for name, text in request.get("refs", ()):
        write_ref(root, name, text)
    discard_parts(root)
    give_to_owner(root, STATE, "refs")


def _install_file(store: ChunkStore, index: int) -> None:
    file, part = store.manifest.files[index], store.path(index)
    final = safe_path(store.root, file.name)
    descriptor = open_plain(part, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(descriptor, file.size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if file.mtime:
        os.utime(part, ns=(file.mtime, file.mtime))
    os.makedirs(os.path.dirname(final), exist_ok=True)
    os.replace(part, final)
    store.in_place[index] = True


def _make_link(root: str, name: str, target: str) -> None:
    """Make a relative link from one name below the folder to another; raises UnsafeName."""
    path = safe_path(root, _make_parent(root, name))
    to = os.path.relpath(os.path.join(root, safe_name(target)), os.path.dirname(path))
    with contextlib.suppress(OSError):
        if os.readlink(path) == to:
            return
    os.symlink(to, f"{path}.new")
    os.replace(f"{path}.new", path)


def _make_parent(root: str, name: str) -> str:
    """Make the parent folder of a name, and return the name; raises UnsafeName."""
    path = safe_path(root, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return name


def write_ref(root: str, name: str, commit: str) -> None:
    """Write a ref to a commit; raises OSError and UnsafeName."""
    path = safe_path(root, _make_parent(root, name))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(open_plain(f"{path}.new", flags), "w", encoding="utf-8") as file:
        file.write(commit)
    os.replace(f"{path}.new", path)


def give_to_owner(root: str, *parts: str) -> None:
    """Change the owner of root's files to that of the parent folder: of all, or below `parts`."""
    owner = os.stat(os.path.dirname(root.rstrip("/")))
    if os.geteuid() != 0 or (owner.st_uid, owner.st_gid) == (0, 0):
        return
    for top in [os.path.join(root, part) for part in parts] or [root]:
        for folder, _, names in os.walk(top):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                with contextlib.suppress(OSError):
                    os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def remove_model(root: str) -> int:
    """Remove a folder with its content, and return the freed bytes; raises OSError."""
    freed = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):
                freed += os.lstat(os.path.join(folder, name)).st_blocks * 512
    # Identifying files go first, so that a half-removed model does not count as complete.
    for first in ("refs", "snapshots", _MARKER):
        path = os.path.join(root, first)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    shutil.rmtree(root)
    return freed


def unfinished_bytes(root: str) -> int:
    """Return the bytes of an interrupted copy below a folder."""
    size = 0
    with contextlib.suppress(OSError), os.scandir(os.path.join(root, STATE, "parts")) as parts:
        for part in parts:
            size += part.stat().st_blocks * 512
    return size
