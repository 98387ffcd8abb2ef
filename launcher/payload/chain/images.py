"""A node's part in a copy of an image besides that of its bytes: Docker is asked for the image, and
given what has come.

What is on its way lies below a folder of the login's own, which nobody else may look into.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

from .archive import Image, NotAnImage, pack, split
from .files import Unsafe
from .store import Hand, Store
from .wire import HAVE

_KEPT = "image.json"  # what an image that was taken apart consists of; written last
_TELL = 1.0  # seconds
_WAIT = 1.0


VERBS = ("export", "drop")


class NotLoaded(OSError):
    """What Docker refused."""


def do(request: dict[str, Any], tell: Callable[..., None]) -> None:
    """Do what a request says, and tell what came of it."""
    if request["verb"] == "export":
        tell("exported", **export(request, tell))
    else:
        tell("dropped", bytes=drop(request["root"], request["top"]))


def own(folder: str, top: str) -> None:
    """Make a folder below `top`, which is or becomes ours alone; raises Unsafe and OSError."""
    os.makedirs(top, mode=0o700, exist_ok=True)
    there = os.lstat(top)
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid() or there.st_mode & 0o077:
        raise Unsafe(f"{top} is no folder of this login alone: somebody else made it")
    os.makedirs(folder, exist_ok=True)


def drop(folder: str, top: str) -> int:
    """Remove a folder with all that is in it, and empty ones above it up to `top`; returns how many
    bytes that frees.
    """
    freed = _size(folder)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        while folder != top and folder.startswith(top):
            folder = os.path.dirname(folder)
            os.rmdir(folder)
    return freed


def _size(folder: str) -> int:
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(path, name)).st_blocks * 512
    return size


def export(request: dict[str, Any], tell: Callable[..., None]) -> dict[str, Any]:
    """Have an image's blobs in the folder `root`, from Docker (`save`, a command), and
    return what it consists of; those that are there already stay.

    Raises NotAnImage, NotLoaded and OSError.
    """
    root = request["root"]
    own(root, request["top"])
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(os.path.join(root, _KEPT), encoding="utf-8") as file:
            kept = json.load(file)
        if kept["of"] == request["of"] and _all_there(root, Image.read(kept)):
            return dict(kept)
    drop(root, root)
    own(root, request["top"])
    room = os.statvfs(root)
    if request["need"] > room.f_bavail * room.f_frsize:
        text = f"{request['need']} bytes are needed, {room.f_bavail * room.f_frsize} are free"
        raise OSError(errno.ENOSPC, text, root)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_TELL):
            tell("progress", have=_size(root))

    threading.Thread(target=watch, daemon=True).start()
    try:
        with _opened(request) as stream:
            image = split(stream, root, request.get("name", ""))
    finally:
        over.set()
    kept = {"of": request["of"], **image.as_json()}
    with open(os.path.join(root, _KEPT), "w", encoding="utf-8") as file:
        json.dump(kept, file)
    return kept


def _all_there(root: str, image: Image) -> bool:
    wanted = {image.config: image.config_size, **{each.digest: each.size for each in image.layers}}
    return all(
        os.path.getsize(os.path.join(root, digest)) == size for digest, size in wanted.items()
    )


@contextlib.contextmanager
def _opened(request: dict[str, Any]) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as complaint:
        with subprocess.Popen(
            request["save"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaint
        ) as process:
            try:
                yield _open(process.stdout)
            except NotAnImage:
                # what it has to say, if it failed, tells more
                if process.wait() == 0:
                    raise
        if process.returncode:
            raise NotLoaded(f"`docker save` failed: {_said(complaint)}")


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ValueError("the process was started without this pipe")
    return pipe


def _write(pipe: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[pipe.write(view) :]


def _said(complaint: IO[bytes]) -> str:
    """Return the end of what a command printed."""
    complaint.seek(0)
    lines = complaint.read()[-2000:].decode(errors="replace").strip().splitlines()
    return " ".join(lines[-3:]) or "it said nothing"


class Loader:
    """Gives an image to Docker (`docker load`) while its layers still come."""

    def __init__(self, store: Store, request: dict[str, Any]) -> None:
        self._store, self._argv = store, request["load"]
        self._image, self._names = Image.read(request["image"]), request["names"]
        self._ended = threading.Event()
        self._failed: BaseException | None = None
        self._root, self._top = request["root"], request["top"]

    @property
    def failed(self) -> BaseException | None:
        """Why Docker does not have it."""
        return self._failed

    def run(self) -> None:
        """Give it all, as it comes; in a thread of its own."""
        try:
            self._load()
        # whoever waits tells of it
        except BaseException as error:
            self._failed = error
        finally:
            self._ended.set()

    def finish(self) -> None:
        """Wait until Docker has it, and remove what came; raises what `run` has met."""
        self._ended.wait()
        if self._failed is not None:
            raise self._failed
        drop(self._root, self._top)

    def _load(self) -> None:
        here = [each.name for each in self._store.manifest.files]
        with tempfile.TemporaryFile() as complaint:
            with subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=complaint,
                stderr=complaint,
                bufsize=0,
            ) as process:
                pipe = _open(process.stdin)
                with contextlib.suppress(BrokenPipeError):  # its exit code tells why
                    for piece in pack(self._image, self._names, here, self._bytes):
                        _write(pipe, piece)
                    pipe.close()
            if process.returncode:
                raise NotLoaded(f"`docker load` failed: {_said(complaint)}")

    def _bytes(self, digest: str) -> Iterator[bytes]:
        """Return a file's bytes, each chunk as soon as it is there and was compared."""
        store = self._store
        at = next(at for at, each in enumerate(store.manifest.files) if each.name == digest)
        hand = Hand(store)
        try:
            for number in store.manifest.chunks_of(at):
                ready = store.ready(number)
                with ready:
                    while store.states[number] != HAVE:
                        ready.wait(_WAIT)
                _, offset, size = store.manifest.place(number)
                data = os.pread(hand.open(at), size, offset)
                if len(data) != size:
                    raise OSError(f"{store.path(at)} has become shorter")
                yield data
        finally:
            hand.close()
