"""Validating a file value by value, and how much of a broken one can still be judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError

from launcher.inventory import words
from launcher.inventory.mistakes import Mistake, Where
from launcher.inventory.schema import Section

_ROUNDS = 6
_File = TypeVar("_File", bound=Section)
StandIn = Callable[[Where], object]


def validated(
    data: Any, root: type[_File], stand_in: StandIn
) -> tuple[_File | None, list[Mistake]]:
    """Validate each value by itself.

    With mistakes, the file stands on what is left; it is None when too little is.

    Args:
        data: the file's mapping; it is mended in place.
        root: what the file should be.
        stand_in: returns what to put at a place whose value could not be used, None to take it out.
    """
    mistakes: list[Mistake] = []
    for attempt in range(_ROUNDS):
        try:
            return root.model_validate(data), mistakes
        except ValidationError as error:
            found = [words.mistake(one, root) for one in error.errors(include_url=False)]
            if attempt == 0:
                mistakes = found
            for mistake in found:
                _mend(data, mistake.where, stand_in)
    return None, mistakes


def _mend(data: Any, where: Where, stand_in: StandIn) -> None:
    around: Any = None
    for at, step in enumerate(where):
        last = at == len(where) - 1
        inside = None if last else _get(data, step)
        if isinstance(inside, (dict, list)):
            data, around = inside, data
            continue
        if isinstance(data, list) and isinstance(step, str) and isinstance(around, dict):
            # The list is short for a mapping, as in `read: [a, b]`: it is taken out as a whole.
            data, at, step = around, at - 1, where[at - 1]  # noqa: PLW2901 - one step back
        if isinstance(data, list) and isinstance(step, int) and step < len(data):
            # A list item that is no mapping is replaced as a whole; the next round fills in what it
            # needs.
            value = stand_in(where[: at + 1])
            if value is None:
                del data[step]
            else:
                data[step] = value
        elif isinstance(data, dict):
            value = stand_in((*where[:at], str(step)))
            if value is None:
                data.pop(str(step), None)
            else:
                data[str(step)] = value
        return


def _get(data: Any, step: str | int) -> Any:
    if isinstance(data, dict):
        return data.get(str(step))
    if isinstance(data, list) and isinstance(step, int) and step < len(data):
        return data[step]
    return None
