"""Paths to folders of other packages: dependencies that import-linter does not see."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter import api

ROOT = Path(__file__).parents[1]
LAUNCHER = ROOT / "launcher"
PACKAGES = {path.parent.name for path in LAUNCHER.glob("*/__init__.py")}
ARCHIVES = {"vlaunch_agent": "agent", "vlaunch_batch": "batch", "vlaunch_copy": "distribute"}
_NAMED = re.compile(r"(?:^|[ /'\"=])(?:launcher[./](\w+)|(vlaunch_(?:agent|batch|copy))\.\w)")


def floors() -> dict[str, int]:
    """Return the floor of each package; those below may be imported."""
    contracts = api.read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {
        name.strip().removeprefix("launcher."): -floor
        for floor, names in enumerate(layers)
        for name in names.split("|")
    }


def named_packages(source: str) -> Iterator[str]:
    """Yield the other packages that strings and joined paths of a module name."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    folders = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and "__file__" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield from _named_by_text(node.value)
        elif isinstance(node, (ast.BinOp, ast.Call)):
            yield from _named_by_join(node, folders)


def _named_by_text(text: str) -> Iterator[str]:
    """A file of `launcher`, a pattern of its files, a module, or one in an archive."""
    for name, archive in _NAMED.findall(text):
        yield ARCHIVES.get(archive, name)
    first = text.partition("/")[0]
    if first in PACKAGES and "/" in text.strip("/") and any(LAUNCHER.glob(text.rstrip("/"))):
        yield first


def _named_by_join(node: ast.BinOp | ast.Call, folders: set[str]) -> Iterator[str]:
    """`Path(__file__).parents[1] / "lab"`, or `FOLDER.joinpath("lab")`."""
    if isinstance(node, ast.BinOp):
        start, parts = node.left, [node.right]
    elif isinstance(node.func, ast.Attribute) and node.func.attr in ("joinpath", "glob", "rglob"):
        start, parts = node.func.value, node.args
    else:
        return
    names = {part.id for part in ast.walk(start) if isinstance(part, ast.Name)}
    if "__file__" in names or names & folders:
        for part in parts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value.partition("/")[0]


def upward_paths(source: str, package: str) -> list[str]:
    """Return the packages that a module names and may not import."""
    floor = floors()
    named = set(named_packages(source)) & PACKAGES - {package}
    return sorted(name for name in named if floor[name] >= floor[package])


def test_a_path_to_another_package_counts_as_an_import() -> None:
    """It points down, or the feature registers what others need (`core/registry.py`)."""
    upward = {
        str(path.relative_to(LAUNCHER)): named
        for path in LAUNCHER.glob("*/**/*.py")
        if (named := upward_paths(path.read_text(), path.relative_to(LAUNCHER).parts[0]))
    }

    assert upward == {}


@pytest.mark.parametrize(
    ("source", "package", "named"),
    [
        ('Path(__file__).parents[1] / "lab" / "cpu_platform"', "tools", ["lab"]),
        ('ROOT = Path(__file__).parents[1]\nX = ROOT / "lab" / "x"', "tools", ["lab"]),
        ('ROOT = Path(__file__).parents[1]\nX = ROOT.joinpath("hosts/node")', "tools", ["hosts"]),
        ('files("p", "batch/driver/**/*.py")', "tools", ["batch"]),
        ('files("network/probe", "distribute/node")', "hosts", ["distribute", "network"]),
        ('import_module("launcher.export.pods")', "serving", ["export"]),
        ('ARGV = "python3 -m vlaunch_batch.batch.driver"', "tools", ["batch"]),
        ('import_module("launcher.agent.health.api")', "tools", []),
        ('files("agent/*.py", "batch/desk.py")', "batch", []),
        ('x = folder / "lab"; y = "batch/nothing.here"', "tools", []),
        ('"""Text about `launcher/lab/image.py`."""', "tools", []),
    ],
)
def test_such_paths_are_reported(source: str, package: str, named: list[str]) -> None:
    """In joined paths, patterns, modules by name and archives; not in docstrings."""
    assert upward_paths(source, package) == named
