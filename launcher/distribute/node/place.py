"""The end of a copy: parts become files under their own names, links and references as Hugging
Face's cache has them, and the record. The last thing to appear is what makes a model be found.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import Any

from . import record
from .files import STATE, below, open_plain, safe, state_folder
from .store import Store, discard

_MARKER = "config.json"  # without it no model is taken for one


def check_names(request: dict[str, Any]) -> None:
    """Raise Unsafe when a name of a request leads out of its folder, before anything is written."""
    for link in request.get("links", ()):
        safe(link[0])
        safe(link[1])
    for ref in request.get("refs", ()):
        safe(ref[0])
    if request.get("label"):
        safe(f"{request['label']}.json")


def install_files(store: Store, request: dict[str, Any]) -> None:
    """Put everything in its place; raises OSError and Unsafe.

    `links` of the request are pairs of a name and what it points to, `refs` pairs of a name and the
    text of its file; `label` names the record.
    """
    root = store.root
    state_folder(root, "parts")
    files = range(len(store.manifest.files))
    for at in sorted(files, key=lambda at: store.manifest.files[at].name == _MARKER):
        if not store.whole[at]:
            _install_file(store, at)
    for name, target in request.get("links", ()):
        _make_link(root, name, target)
    give_to_owner(root)
    record.keep(root, request["label"], store.manifest, bytes(store.digests))
    for name, text in request.get("refs", ()):
        write_ref(root, name, text)
    discard(root)
    give_to_owner(root, STATE, "refs")


def _install_file(store: Store, at: int) -> None:
    file, part = store.manifest.files[at], store.path(at)
    final = below(store.root, file.name)
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
    store.whole[at] = True


def _make_link(root: str, name: str, target: str) -> None:
    """Make a relative link from one name below the folder to another; raises Unsafe."""
    path = below(root, _make_parent(root, name))
    to = os.path.relpath(os.path.join(root, safe(target)), os.path.dirname(path))
    with contextlib.suppress(OSError):
        if os.readlink(path) == to:
            return
    os.symlink(to, f"{path}.new")
    os.replace(f"{path}.new", path)


def _make_parent(root: str, name: str) -> str:
    """Make the folder that a name lies in, and return the name; raises Unsafe."""
    path = below(root, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return name


def write_ref(root: str, name: str, commit: str) -> None:
    """Write a reference to a commit; raises OSError and Unsafe."""
    path = below(root, _make_parent(root, name))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(open_plain(f"{path}.new", flags), "w", encoding="utf-8") as file:
        file.write(commit)
    os.replace(f"{path}.new", path)


def give_to_owner(root: str, *below: str) -> None:
    """Give files that root made to the owner of the folder around them: all, or those `below`."""
    owner = os.stat(os.path.dirname(root.rstrip("/")))
    if os.geteuid() != 0 or (owner.st_uid, owner.st_gid) == (0, 0):
        return
    for top in [os.path.join(root, each) for each in below] or [root]:
        for folder, _, names in os.walk(top):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                with contextlib.suppress(OSError):
                    os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def remove_model(root: str) -> int:
    """Remove a folder with all that is in it, and return how many bytes that frees; raises
    OSError.
    """
    freed = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):
                freed += os.lstat(os.path.join(folder, name)).st_blocks * 512
    # What makes it a model goes first: half of one must not pass for whole.
    for first in ("refs", "snapshots", _MARKER):
        path = os.path.join(root, first)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    shutil.rmtree(root)
    return freed


def unfinished_bytes(root: str) -> int:
    """Return how many bytes of an interrupted copy lie below a folder."""
    size = 0
    with contextlib.suppress(OSError), os.scandir(os.path.join(root, STATE, "parts")) as parts:
        for each in parts:
            size += each.stat().st_blocks * 512
    return size
