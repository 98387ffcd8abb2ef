"""Secrets as a table, without their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.app.terminal import make_table, plain_text, text_line
from launcher.cluster.secret_files import SecretFile
from launcher.core import sizes
from launcher.core.domain import fold

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_secrets(
    rows: Sequence[Mapping[str, str]],
    files: Mapping[str, Sequence[SecretFile]],
    remarks: Sequence[str],
    all_nodes: str,
) -> RenderableType:
    """Return the table; below it the directories with their modes, and `remarks`.

    `all_nodes` is the folded names of all nodes.
    """
    from rich.console import Group

    table = make_table("NAME", "SOURCE", "USED BY", "ON NODES", "WHERE")
    for name in ("MODE", "AGE", "EXPIRES"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(plain_text(cell) for cell in _secret_cells(row, files, all_nodes)))
    return Group(
        table,
        *(text_line(text) for text in _directory_lines(files)),
        *(text_line(text, "red") for text in remarks),
    )


def _secret_cells(
    row: Mapping[str, str], files: Mapping[str, Sequence[SecretFile]], all_nodes: str
) -> tuple[str, ...]:
    """Return a secret's row: the facts from the inventory, and its files on the nodes."""
    cells = (row["name"], row["source"], row["used_by"])
    holders = [
        (node, file)
        for node, node_files in files.items()
        for file in node_files
        if file.name == row["name"]
    ]
    if not holders:
        return (*cells, "-", "-", "-", "-", "-")
    nodes = fold(list(dict.fromkeys(node for node, _ in holders)))
    return (
        *cells,
        f"all ({nodes})" if nodes == all_nodes else nodes,
        _join_unique(file.place for _, file in holders),
        _join_unique(file.mode for _, file in holders),
        sizes.format_duration(max(file.age for _, file in holders)),
        row.get("ends") or "-",
    )


def _join_unique(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values))) or "-"


def _directory_lines(files: Mapping[str, Sequence[SecretFile]]) -> list[str]:
    """Describe the directories, with their nodes and modes."""
    folders: dict[tuple[str, str], list[str]] = {}
    for node, node_files in files.items():
        for file in node_files:
            if not file.name:
                folders.setdefault((file.path, file.mode), []).append(node)
    return [f"{path} on {fold(nodes)}: mode {mode}" for (path, mode), nodes in folders.items()]
