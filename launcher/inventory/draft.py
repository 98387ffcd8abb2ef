"""An inventory between file and model: what the rules look at, and how much of a broken file can still be judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launcher.inventory import merge, words
from launcher.inventory.document import Document
from launcher.inventory.mistakes import Mistake, Where
from launcher.inventory.schema import InventoryFile

# Stand-ins for required keys whose values could not be used, so that the rest is still checked.
_STAND_INS: Mapping[str, object] = {"cluster": "x", "image": "x", "gpus": 1, "source": "/x", "target": "/x"}
_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """`broken` holds the places that have a mistake already; no rule should complain about them again."""

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
    """Validate each value by itself. With mistakes, the draft stands on what is left; it is None when too little is."""
    data: Any = document.data
    mistakes: list[Mistake] = []
    for attempt in range(_ROUNDS):
        try:
            file = InventoryFile.model_validate(data)
        except ValidationError as error:
            found = [words.mistake(one) for one in error.errors(include_url=False)]
            if attempt == 0:
                mistakes = found
            for mistake in found:
                _mend(data, mistake.where)
            continue
        broken = frozenset(mistake.where for mistake in mistakes)
        return Draft(file=file, placed=merge.place(file, folder), document=document, broken=broken), mistakes
    return None, mistakes


def _mend(data: Any, where: Where) -> None:
    """Take out the value at `where`, or put a stand-in there."""
    for at, step in enumerate(where):
        last = at == len(where) - 1
        inside = None if last else _get(data, step)
        if isinstance(inside, (dict, list)):
            data = inside
            continue
        if isinstance(data, list) and isinstance(step, int) and step < len(data):
            # A list item that is no mapping: nodes become an empty one, which the next round fills in.
            data[step] = {} if where[0] == "nodes" and len(where) <= 2 else None
            if data[step] is None:
                del data[step]
        elif isinstance(data, dict):
            _mend_key(data, str(step), where)
        return


def _mend_key(data: dict[str, object], key: str, where: Where) -> None:
    if key == "host" and where[0] == "nodes":
        data[key] = f"unreadable-{where[1]}"
    elif key in _STAND_INS and (len(where) == 1 or where[0] in ("nodes", "mounts")):
        data[key] = _STAND_INS[key]
    else:
        data.pop(key, None)


def _get(data: Any, step: str | int) -> Any:
    if isinstance(data, dict):
        return data.get(str(step))
    if isinstance(data, list) and isinstance(step, int) and step < len(data):
        return data[step]
    return None
