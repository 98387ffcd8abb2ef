"""Validating a file value by value, and how much of a broken one can still be judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from launcher.inventory import words
from launcher.inventory.mistakes import Mistake, Where
from launcher.inventory.schema import reader

_ROUNDS = 6
_File = TypeVar("_File")
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
            return reader(root).validate_python(data), mistakes
        except ValidationError as error:
            found = [words.mistake(one, root) for one in _errors(error)]
            if attempt == 0:
                mistakes = found
            for mistake in found:
                _mend(data, mistake.where, stand_in)
    return None, mistakes


def _errors(error: ValidationError) -> Iterator[ErrorDetails]:
    """Pass over tuples that are called too short only because some of their items are wrong, which
    is told of each.
    """
    for one in error.errors(include_url=False):
        if one["type"] != "too_short" or len(one["input"]) < one["ctx"]["min_length"]:
            yield one


def _mend(data: Any, where: Where, stand_in: StandIn) -> None:
    """Put a stand-in where a value could not be used, or take the value out."""
    if not where:
        return
    around = _around(data, where)
    inside, step = around[-1], where[len(around) - 1]
    if isinstance(inside, list) and isinstance(step, str) and isinstance(around[-2], dict):
        # The list is short for a mapping, as in `read: [a, b]`: it is taken out as a whole.
        around.pop()
        inside, step = around[-1], where[len(around) - 1]
    home = where[: len(around) - 1]
    if isinstance(inside, dict):
        _put(inside, str(step), stand_in((*home, str(step))))
    elif isinstance(inside, list) and isinstance(step, int) and step < len(inside):
        # A list item that is no mapping is replaced as a whole; the next round fills in what it
        # needs.
        _put(inside, step, stand_in((*home, step)))


def _around(data: Any, where: Where) -> list[Any]:
    """Return the mappings and lists that lead to `where`, as far as there are any, from the top."""
    around = [data]
    for step in where[:-1]:
        inside = _get(around[-1], step)
        if not isinstance(inside, (dict, list)):
            break
        around.append(inside)
    return around


def _put(inside: Any, key: str | int, value: object) -> None:
    if value is not None:
        inside[key] = value
    elif isinstance(inside, dict):
        inside.pop(key, None)
    else:
        del inside[key]


def _get(data: Any, step: str | int) -> Any:
    if isinstance(data, dict):
        return data.get(str(step))
    if isinstance(data, list) and isinstance(step, int) and step < len(data):
        return data[step]
    return None
