"""Tables in which packages register what other packages use without importing them.

They are plain data in a package's `__init__.py`, so that reading them imports nothing else:
`EXTENSIONS` names of commands to decorators that add options of optional packages, `WORKLOADS`
kinds of jobs to modules (both: `app/registry.py`), and `NODE_PROGRAMS` names of programs for nodes
to functions that return their files. Those named `*.pyz` are mounted into all containers.
"""

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_LAUNCHER = Path(__file__).parents[1]
Files = Mapping[str, bytes]  # contents by path in an archive


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


def load(package: str, target: str) -> Any:
    """Import the `module` or `module:attribute` of a package."""
    name, _, attribute = target.partition(":")
    module = importlib.import_module(f"{package}.{name}")
    return getattr(module, attribute) if attribute else module


def program_files(name: str) -> Files:
    """Return the files of a registered program for nodes; none if its package is missing."""
    files: Files = {}
    for package, key, target in entries("NODE_PROGRAMS"):
        if key == name:
            files = load(package, target)()
    return files
