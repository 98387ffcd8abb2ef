"""One writer at a time below a folder: two nodes that see the same file system, or two operators,
must not write the same parts.

A file that only one can make says who writes, and is touched while it does. Locks of the kernel
would not do: on some shared file systems each node is given its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import time

from .files import STATE

_RENEW = 2.0  # seconds
_STALE = 8.0  # seconds without a touch, after which a writer counts as dead


class Taken(OSError):
    """Somebody else writes there: another copy, or, with `shared`, another node of this one."""

    def __init__(self, node: str, *, shared: bool) -> None:
        super().__init__(f"another copy writes there just now, from {node}")
        self.node, self.shared = node, shared


class Claim:
    """The right to write below `root` for a node of the copy `copy`; raises Taken and OSError."""

    def __init__(self, root: str, copy: str, node: str) -> None:
        self._path = os.path.join(root, STATE, "writer")
        self._text = json.dumps({"copy": copy, "node": node})
        self._renewed = time.monotonic()
        until = time.monotonic() + 2 * _STALE
        while not self._make():
            said, age = self._read()
            if said.get("copy") == copy:
                raise Taken(str(said.get("node")), shared=True)
            if age > _STALE:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
            elif time.monotonic() > until:
                raise Taken(str(said.get("node", "somewhere")), shared=False)
            else:
                time.sleep(0.2)

    def renew(self) -> None:
        """Say that the writer lives; to be called often."""
        if time.monotonic() - self._renewed >= _RENEW:
            self._renewed = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def release(self) -> None:
        """Let others write."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _make(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(self._text)
        return True

    def _read(self) -> tuple[dict[str, object], float]:
        """Return what the writer said, and for how many seconds it has been silent by the clock of
        the file system.
        """
        now = f"{self._path}.{os.getpid()}-{time.monotonic_ns()}"
        said: object = {}
        age = 0.0
        with contextlib.suppress(OSError, ValueError):
            with open(now, "w"):
                pass
            age = os.stat(now).st_mtime - os.stat(self._path).st_mtime
            with open(self._path, encoding="utf-8") as file:
                said = json.load(file)
        with contextlib.suppress(OSError):
            os.unlink(now)
        return said if isinstance(said, dict) else {}, age
