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

    def line(self, *where: str | int) -> int:
        """Return the line where `where` is written."""
        return self.document.line(where)

    def written(self, *where: str | int) -> bool:
        """Return whether the file says something at `where`."""
        return where in self.document.lines

    def sound(self, *where: str | int) -> bool:
        """Return whether `where` and what is around it was read without a mistake."""
        return not any(where[:length] in self.broken for length in range(1, len(where) + 1))


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


def _stand_in(where: Where) -> object:
    key, home = where[-1], where[0]
    if isinstance(key, int):
        # What is not taken out leaves the items behind it at their places, which later mistakes
        # name.
        return {} if home in ("nodes", "mounts") and len(where) == 2 else None
    if key == "host" and home == "nodes":
        return f"unreadable-{where[1]}"
    return _STAND_INS.get(key) if len(where) == 1 or home in ("nodes", "mounts") else None
