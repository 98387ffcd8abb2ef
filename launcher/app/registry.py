"""Tables by which packages register what others call by name.

They are plain data in a package's `__init__.py`, so that reading them imports nothing of what they
name: `COMMANDS` maps names to positions in `vlaunch --help` and lines of help,
`EXTENSIONS` names of commands to decorators that add options of optional packages, `WORKLOADS`
kinds of jobs to modules (`launcher.app.workloads`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
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


def load(package: str, target: str) -> Any:
    """Import what `module` or `module:attribute` names in a package."""
    name, _, attribute = target.partition(":")
    module = importlib.import_module(f"{package}.{name}")
    return getattr(module, attribute) if attribute else module


def extended(command: str) -> Callable[[F], F]:
    """Add the options that optional packages register for a command, by their decorators."""

    def add(function: F) -> F:
        for package, name, target in entries("EXTENSIONS"):
            if name == command:
                function = load(package, target)(function)
        return function

    return add
