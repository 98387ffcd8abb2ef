"""Secrets as a table: everything about them but their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.app.terminal import line, make_table, plain
from launcher.cluster.secret_files import SecretFile
from launcher.core import sizes
from launcher.core.domain import fold

if TYPE_CHECKING:
    from rich.console import RenderableType


def render(
    rows: Sequence[Mapping[str, str]],
    files: Mapping[str, Sequence[SecretFile]],
    remarks: Sequence[str],
    every: str,
) -> RenderableType:
    """Return the table; below it the directories with their modes, and `remarks`.

    `every` is all nodes, folded.
    """
    from rich.console import Group

    table = make_table("NAME", "SOURCE", "USED BY", "ON NODES", "WHERE")
    for name in ("MODE", "AGE", "ENDS"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(plain(cell) for cell in _cells(row, files, every)))
    return Group(
        table,
        *(line(each) for each in _folders(files)),
        *(line(each, "red") for each in remarks),
    )


def _cells(
    row: Mapping[str, str], files: Mapping[str, Sequence[SecretFile]], every: str
) -> tuple[str, ...]:
    """Return a secret's row: what the inventory says of it, and its files on the nodes."""
    known = (row["name"], row["source"], row["used_by"])
    there = [
        (node, each) for node, found in files.items() for each in found if each.name == row["name"]
    ]
    if not there:
        return (*known, "-", "-", "-", "-", "-")
    nodes = fold(list(dict.fromkeys(node for node, _ in there)))
    return (
        *known,
        f"all ({nodes})" if nodes == every else nodes,
        _listed(each.place for _, each in there),
        _listed(each.mode for _, each in there),
        sizes.duration(max(each.age for _, each in there)),
        row.get("ends") or "-",
    )


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(set(words))) or "-"


def _folders(files: Mapping[str, Sequence[SecretFile]]) -> list[str]:
    """Say which directories there are, on which nodes, with which mode."""
    folders: dict[tuple[str, str], list[str]] = {}
    for node, found in files.items():
        for each in found:
            if not each.name:
                folders.setdefault((each.path, each.mode), []).append(node)
    return [f"{path} on {fold(nodes)}: mode {mode}" for (path, mode), nodes in folders.items()]
