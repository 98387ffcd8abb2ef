"""Secrets as a table: everything about them but their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.model import fold
from launcher.plan import howfar
from launcher.tools import symptoms
from launcher.tools.secret_files import SecretFile

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text


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
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("NAME", "SOURCE", "USED BY", "ON NODES", "WHERE"):
        table.add_column(name, overflow="fold")
    for name in ("MODE", "AGE"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        there = [
            (node, each)
            for node, found in files.items()
            for each in found
            if each.name == row["name"]
        ]
        nodes = fold(list(dict.fromkeys(node for node, _ in there))) if there else "-"
        modes = ", ".join(sorted({each.mode for _, each in there})) or "-"
        oldest = howfar.duration(max(each.age for _, each in there)) if there else "-"
        places = ", ".join(sorted({each.place for _, each in there})) or "-"
        cells = (
            row["name"],
            row["source"],
            row["used_by"],
            f"all ({nodes})" if nodes == every else nodes,
            places,
            modes,
            oldest,
        )
        table.add_row(*(_plain(cell) for cell in cells))
    folders: dict[tuple[str, str], list[str]] = {}
    for node, found in files.items():
        for each in found:
            if not each.name:
                folders.setdefault((each.path, each.mode), []).append(node)
    told = [f"{path} on {fold(nodes)}: mode {mode}" for (path, mode), nodes in folders.items()]
    return Group(
        table, *(_plain(line) for line in told), *(_plain(line, "red") for line in remarks)
    )


def _plain(words: str, style: str = "") -> Text:
    """Return words as they are: neither rich's markup nor a terminal's codes."""
    from rich.text import Text

    return Text(symptoms.brief(words), style=style)
