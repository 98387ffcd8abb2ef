"""The user's own Python files: packed on the head, and imported from a folder of its own wherever a
replica starts.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import sys
import tempfile
from typing import Any


def pack(work: str) -> dict[str, bytes]:
    """Return the files below WORK/code by their relative names: they travel with the replica, so no
    storage is shared.
    """
    root = os.path.join(work, "code")
    packed = {}
    for folder, _, names in sorted(os.walk(root)):
        for name in sorted(names):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                packed[os.path.relpath(path, root)] = file.read()
    return packed


def unpack(code: dict[str, bytes]) -> str:
    """Write packed files into a new folder, which is removed with this process, and return it."""
    root = tempfile.mkdtemp(prefix="vlaunch-code-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for name, data in code.items():
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
    return root


def load(code: dict[str, bytes], target: str) -> Any:
    """Import `module:Name` from packed files; a file that was shipped wins over an installed module
    of its name.

    Raises:
        ImportError: The module, something it imports, or the name in it is not there.
    """
    name, _, attribute = target.partition(":")
    root = unpack(code)
    sys.path.insert(0, root)
    shadowed = sys.modules.get(name)
    if (
        shadowed is not None
        and f"{name.replace('.', '/')}.py" in code
        and not str(shadowed.__file__ or "").startswith(root)
    ):
        del sys.modules[name]
    found: Any = importlib.import_module(name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ImportError(f"{name} has no `{attribute}`")
        found = getattr(found, part)
    return found
