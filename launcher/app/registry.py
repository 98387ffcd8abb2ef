"""Tables by which packages register what others call by name.

They are plain data in a package's `__init__.py`, so that reading them imports nothing of what they
name: `COMMANDS` maps names to positions in `vlaunch --help` and lines of help.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

_LAUNCHER = Path(__file__).parents[1]


@cache
def entries(table: str) -> tuple[tuple[str, str, Any], ...]:
    """Return the entries of the tables of this name, as package, key and value."""
    packages = [
        importlib.import_module(f"launcher.{file.parent.name}")
        for file in sorted(_LAUNCHER.glob("*/__init__.py"))
    ]
    return tuple(
        (package.__name__, key, value)
        for package in packages
        for key, value in getattr(package, table, {}).items()
    )
