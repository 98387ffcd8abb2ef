"""The file that `vlaunch collect` writes: an archive that is there whole or not at all, and that
only its owner may read.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import RequestError
from launcher.secret_patterns import clean

_NAME = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/){0,3}[A-Za-z0-9_-][A-Za-z0-9._-]*")


class Bundle:
    """An archive that is being written. Every text goes through redaction on its way in."""

    def __init__(self, archive: tarfile.TarFile, root: str) -> None:
        self._archive, self._root, self._at = archive, root, int(time.time())
        self.sizes: dict[str, int] = {}

    def add(self, name: str, text: str) -> None:
        """Add one file."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a name of ours: {name!r}")
        data = clean(text).encode("utf-8", "replace")
        entry = tarfile.TarInfo(f"{self._root}/{name}")
        entry.size, entry.mode, entry.mtime = len(data), 0o600, self._at
        self._archive.addfile(entry, io.BytesIO(data))
        self.sizes[name] = len(data)


def target(option: str | None, cluster: str) -> Path:
    """Return where the bundle goes: as asked, else a new name in the current folder; raises
    RequestError when it cannot.
    """
    path = Path(
        option or f"vlaunch-{cluster}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.tar.gz"
    )
    if not path.parent.is_dir():
        raise RequestError(
            f"`{path.parent}` is not a folder",
            hint="name a file in a folder that is there: `-o FILE.tar.gz`",
        )
    if os.path.lexists(path):
        raise RequestError(f"`{path}` is there already", hint="name another one: `-o FILE.tar.gz`")
    return path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Bundle]:
    """Write a bundle beside its place, and put it there when all of it is on the disk; after an
    error nothing is left.
    """
    try:
        # mkstemp: mode 0600, and a name that nobody else has.
        descriptor, part = tempfile.mkstemp(prefix=".vlaunch-", dir=path.parent)
    except OSError as error:
        raise RequestError(
            f"`{path.parent}` cannot be written to: {(error.strerror or str(error)).lower()}"
        ) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz") as archive:
                yield Bundle(
                    archive,
                    path.name.removesuffix(".gz").removesuffix(".tar").lstrip(".") or "bundle",
                )
            file.flush()
            os.fsync(file.fileno())
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
