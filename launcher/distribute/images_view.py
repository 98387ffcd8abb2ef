"""Images on nodes as a table, and below it what room there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.app.terminal import line, make_table, plain
from launcher.core.domain import fold
from launcher.core.sizes import told
from launcher.distribute.image_store import Store
from launcher.tools.docker import Image

if TYPE_CHECKING:
    from rich.console import RenderableType

_NONE = "<none>"


def render(seen: Mapping[str, Store], remarks: Sequence[str] = ()) -> RenderableType:
    """Return the table: one row for each name, and one more for each image that it means elsewhere;
    below it those that differ, unfinished copies, and what room is left.
    """
    from rich.console import Group

    table = make_table("IMAGE", "ID", "SIZE", "LAYERS", "ON")
    rows: dict[tuple[str, str], list[tuple[str, Image]]] = {}
    for node, each in seen.items():
        for image in each.images:
            for name in image.names or (_NONE,):
                rows.setdefault((name, image.identity), []).append((node, image))
    for key in sorted(rows, key=lambda key: key[0]):
        table.add_row(*(plain(cell) for cell in _cells(key[0], rows[key])))
    return Group(
        table,
        *(line(each, "yellow") for each in _differing(list(rows))),
        *(line(each) for each in _left(seen)),
        *(line(f"{node}: {told(each.free)} free") for node, each in seen.items()),
        *(line(each, "red") for each in remarks),
    )


def _cells(name: str, found: Sequence[tuple[str, Image]]) -> tuple[str, ...]:
    image = found[0][1]
    # Docker's two kinds of stores name the same image by different digests.
    ids = dict.fromkeys(each.id.removeprefix("sha256:")[:12] for _, each in found)
    size = told(max(each.size for _, each in found))
    return (name, " ".join(ids), size, str(len(image.layers)), fold([node for node, _ in found]))


def _differing(rows: Sequence[tuple[str, str]]) -> list[str]:
    names = [name for name, _ in rows if name != _NONE]
    return [
        f"{name} is not the same image everywhere; `vlaunch image copy {name} --from NODE` mends it"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]


def _left(seen: Mapping[str, Store]) -> list[str]:
    return [
        f"{node}: {told(each.unfinished)} of unfinished copies in {each.folder}; the same command"
        " continues them"
        for node, each in seen.items()
        if each.unfinished
    ]
