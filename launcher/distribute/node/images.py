"""Images of a node's Docker: `docker save` into a folder, which is copied like a model's, and
`docker load` from copied files.

The files lie below a folder that belongs to the SSH user alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
import shutil
import stat
import subprocess
import tarfile
import tempfile
from typing import IO, Any

from .files import UnsafeName, open_plain, safe_path, state_folder
from .store import ChunkStore

_EXPORTED = "image.json"  # the answer to a complete export
_BLOBS = "blobs/sha256/"  # names are digests: https://github.com/opencontainers/image-spec
_BLOCK = 2**20


class DockerCommandError(OSError):
    """Docker's command failed, or printed an invalid image."""


def create_private_folder(folder: str, top: str) -> None:
    """Make a folder below `top`, which is or becomes ours alone; raises UnsafeName and OSError."""
    os.makedirs(top, mode=0o700, exist_ok=True)
    status = os.lstat(top)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UnsafeName(f"{top} is not private to this user: another user created it")
    os.makedirs(folder, exist_ok=True)


def remove_folder(folder: str, top: str) -> None:
    """Remove a folder with its content, and empty ones above it up to `top`."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        while folder != top and folder.startswith(top):
            folder = os.path.dirname(folder)
            os.rmdir(folder)


def export_image(request: dict[str, Any]) -> dict[str, Any]:
    """Unpack the output of `docker save` into the folder `root`; returns its `files`, and the file
    names of the `layers`, in order. A complete export of the same image is reused.

    Raises DockerCommandError, UnsafeName and OSError.
    """
    root = request["root"]
    create_private_folder(root, request["top"])
    record_path = os.path.join(state_folder(root), _EXPORTED)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(record_path, encoding="utf-8") as file:
            exported = dict(json.load(file))
        files = exported["files"]
        if exported["of"] == request["of"] and files == _list_files(root):
            return exported
    remove_folder(root, root)
    create_private_folder(root, request["top"])
    disk = os.statvfs(root)
    if request["need"] > disk.f_bavail * disk.f_frsize:
        text = f"{request['need']} bytes needed, {disk.f_bavail * disk.f_frsize} free"
        raise OSError(errno.ENOSPC, text, root)
    _save_image(request["save"], root)
    exported = {"of": request["of"], "files": _list_files(root), "layers": _list_layers(root)}
    state_folder(root)
    with open(record_path, "w", encoding="utf-8") as file:
        json.dump(exported, file)
    return exported


def _save_image(argv: list[str], root: str) -> None:
    with tempfile.TemporaryFile() as errors:
        problem = ""
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        ) as process:
            stream = _require_pipe(process.stdout)
            try:
                with tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK) as tar:
                    _unpack(tar, root)
            except tarfile.TarError as error:
                problem = f"it printed no complete image: {error}"
            while stream.read(_BLOCK):  # padding: Docker must not see a closed pipe
                pass
        if process.returncode or problem:
            raise DockerCommandError(f"`docker save` failed: {_last_lines(errors) or problem}")


def _unpack(tar: tarfile.TarFile, root: str) -> None:
    """Write the files of a tar; links, which old Dockers use for equal layers, become files."""
    links = {}
    for member in tar:
        name = posixpath.normpath(member.name)
        data = tar.extractfile(member) if member.isreg() else None
        if data is not None:
            path = safe_path(root, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with open(open_plain(path, flags), "wb") as file:
                shutil.copyfileobj(data, file, _BLOCK)
        elif member.issym():
            links[name] = posixpath.join(posixpath.dirname(name), member.linkname)
    for name, target in links.items():
        os.makedirs(os.path.dirname(safe_path(root, name)), exist_ok=True)
        os.link(safe_path(root, posixpath.normpath(target)), safe_path(root, name))


def _list_files(root: str) -> list[list[Any]]:
    """Return rows of `ManifestFile`: name, bytes, time of change (0) and digest."""
    rows: list[list[Any]] = []
    state = state_folder(root)
    for folder, _, names in os.walk(root):
        for file_name in names if folder != state else ():
            path = os.path.join(folder, file_name)
            name = os.path.relpath(path, root)
            digest = file_name if name == _BLOBS + file_name else ""
            rows.append([name, os.path.getsize(path), 0, digest])
    return sorted(rows)


def _list_layers(root: str) -> list[str]:
    try:
        with open(os.path.join(root, "manifest.json"), encoding="utf-8") as file:
            (image,) = json.load(file)
        return [posixpath.normpath(str(layer)) for layer in image["Layers"]]
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DockerCommandError(f"`docker save` printed no image: {error!r:.200}") from None


def load_image(store: ChunkStore, argv: list[str]) -> None:
    """Pass the copied files to `docker load`; raises DockerCommandError and OSError."""
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=errors, stderr=errors) as process:
            stream = _require_pipe(process.stdin)
            with contextlib.suppress(BrokenPipeError):  # its exit code and output tell why
                with tarfile.open(fileobj=stream, mode="w|", bufsize=_BLOCK) as tar:
                    for index, file in enumerate(store.manifest.files):
                        _add_file(tar, file.name, file.size, store.path(index))
                stream.close()
        if process.returncode:
            raise DockerCommandError(f"`docker load` failed: {_last_lines(errors)}")


def _add_file(tar: tarfile.TarFile, name: str, size: int, path: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = size
    if size:
        with open(path, "rb") as data:
            tar.addfile(entry, data)
    else:  # an empty file has no chunks, and so no part on the disk
        tar.addfile(entry)


def _require_pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ValueError("the process was started without this pipe")
    return pipe


def _last_lines(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read()[-2000:].decode(errors="replace").strip().splitlines()
    return " ".join(lines[-3:])
