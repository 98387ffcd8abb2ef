"""An inventory between file and model: what the rules look at, and how much of a broken file can
still be judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.inventory import merge
from launcher.inventory.document import Document
from launcher.inventory.mistakes import Mistake, Where
from launcher.inventory.partial_validation import validated
from launcher.inventory.schema import InventoryFile

# Stand-ins for required keys whose values could not be used, so that the rest is still checked.
_STAND_INS: Mapping[str, object] = {
    "cluster": "x",
    "image": "x",
    "gpus": 1,
    "source": "/x",
    "target": "/x",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """`broken` holds the places that have a mistake already; no rule should complain about them
    again.
    """

    file: InventoryFile
    placed: list[merge.Placed]
    document: Document
    broken: frozenset[Where]

    def line(self, *path: str | int) -> int:
        """Return the line where `where` is written."""
        return self.document.line(path)

    def written(self, *path: str | int) -> bool:
        """Return whether the file says something at `where`."""
        return path in self.document.lines

    def sound(self, *path: str | int) -> bool:
        """Return whether `where` and what is around it was read without a mistake."""
        return not any(path[:length] in self.broken for length in range(1, len(path) + 1))


def draft(document: Document, folder: Path) -> tuple[Draft | None, list[Mistake]]:
    """Validate each value by itself.

    With mistakes, the draft stands on what is left; it is None when too little is.
    """
    file, mistakes = validated(document.data, InventoryFile, _stand_in)
    if file is None:
        return None, mistakes
    broken = frozenset(mistake.where for mistake in mistakes)
    return Draft(
        file=file, placed=merge.place(file, folder), document=document, broken=broken
    ), mistakes


def _stand_in(yaml_path: Where) -> object:
    key, section = yaml_path[-1], yaml_path[0]
    if isinstance(key, int):
        # What is not taken out leaves the items behind it at their places, which later mistakes
        # name.
        return {} if section in ("nodes", "mounts") and len(yaml_path) == 2 else None
    if key == "host" and section == "nodes":
        return f"unreadable-{yaml_path[1]}"
    return _STAND_INS.get(key) if len(yaml_path) == 1 or section in ("nodes", "mounts") else None
