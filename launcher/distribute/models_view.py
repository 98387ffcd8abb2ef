"""Models on nodes as a table, and below it what is not whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from launcher.app.terminal import line, make_table, plain
from launcher.core.domain import fold
from launcher.core.sizes import told
from launcher.distribute.chain import Model, Revision, Seen

if TYPE_CHECKING:
    from rich.console import RenderableType


def render(seen: Mapping[str, Seen], remarks: Sequence[str] = ()) -> RenderableType:
    """Return the table: one row for each model in each revision; below it why one is not whole,
    what unfinished copies and downloads hold, and how much room is left.
    """
    from rich.console import Group

    table = make_table("MODEL", "REVISION", "SIZE", "WHOLE ON", "IN PART ON")
    table.add_column("LAST USED", no_wrap=True)
    rows: dict[tuple[str, str], list[tuple[str, Model, Revision]]] = {}
    for node, each in seen.items():
        for model in each.models:
            for revision in model.revisions:
                found = rows.setdefault((model.name, revision.revision), [])
                found.append((node, model, revision))
    for key in sorted(rows):
        table.add_row(*(plain(cell) for cell in _cells(*key, rows[key])))
    room = [f"{node}: {told(each.free)} free" for node, each in seen.items()]
    return Group(
        table,
        *(line(each) for each in _remarks(seen)),
        *(line(each) for each in room),
        *(line(each, "red") for each in remarks),
    )


def _cells(
    name: str, revision: str, found: Sequence[tuple[str, Model, Revision]]
) -> tuple[str, ...]:
    whole = [node for node, model, each in found if not each.why and not model.unfinished]
    part = [node for node, _, _ in found if node not in whole]
    used = max(each.used for _, _, each in found)
    return (
        name,
        revision[:12] or "-",
        told(max(each.size for _, _, each in found)),
        fold(whole) if whole else "-",
        fold(part) if part else "-",
        datetime.fromtimestamp(used).strftime("%Y-%m-%d %H:%M") if used > 0 else "-",
    )


def _remarks(seen: Mapping[str, Seen]) -> list[str]:
    """Say what is not whole, equal words of several nodes once."""
    said: dict[str, list[str]] = {}
    for node, each in seen.items():
        for model in each.models:
            for text in _troubles(model):
                said.setdefault(text, []).append(node)
    return [f"{fold(nodes)}: {text}" for text, nodes in said.items()]


def _troubles(model: Model) -> list[str]:
    said = [f"{model.name}: {each.why}" for each in model.revisions if each.why]
    if model.unfinished:
        said.append(
            f"{model.name}: a copy is unfinished, {told(model.unfinished)} so far; the same"
            f" `vlaunch model copy {model.name}` goes on with it"
        )
    if model.downloading:
        said.append(
            f"{model.name}: {told(model.left_over)} of downloads that run or were interrupted"
        )
    return said
