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
            new_mistakes = [words.mistake(detail, root) for detail in _errors(error)]
            if attempt == 0:
                mistakes = new_mistakes
            for mistake in new_mistakes:
                _mend(data, mistake.where, stand_in)
    return None, mistakes


def _errors(error: ValidationError) -> Iterator[ErrorDetails]:
    """Pass over tuples that are called too short only because some of their items are wrong, which
    is told of each.
    """
    for detail in error.errors(include_url=False):
        if detail["type"] != "too_short" or len(detail["input"]) < detail["ctx"]["min_length"]:
            yield detail


def _mend(data: Any, yaml_path: Where, stand_in: StandIn) -> None:
    """Put a stand-in where a value could not be used, or take the value out."""
    if not yaml_path:
        return
    containers = _around(data, yaml_path)
    container, step = containers[-1], yaml_path[len(containers) - 1]
    if isinstance(container, list) and isinstance(step, str) and isinstance(containers[-2], dict):
        # The list is short for a mapping, as in `read: [a, b]`: it is taken out as a whole.
        containers.pop()
        container, step = containers[-1], yaml_path[len(containers) - 1]
    parent_path = yaml_path[: len(containers) - 1]
    if isinstance(container, dict):
        _put(container, str(step), stand_in((*parent_path, str(step))))
    elif isinstance(container, list) and isinstance(step, int) and step < len(container):
        # A list item that is no mapping is replaced as a whole; the next round fills in what it
        # needs.
        _put(container, step, stand_in((*parent_path, step)))


def _around(data: Any, yaml_path: Where) -> list[Any]:
    """Return the mappings and lists that lead to `where`, as far as there are any, from the top."""
    containers = [data]
    for step in yaml_path[:-1]:
        child = _get(containers[-1], step)
        if not isinstance(child, (dict, list)):
            break
        containers.append(child)
    return containers


def _put(container: Any, key: str | int, value: object) -> None:
    if value is not None:
        container[key] = value
    elif isinstance(container, dict):
        container.pop(key, None)
    else:
        del container[key]


def _get(data: Any, step: str | int) -> Any:
    if isinstance(data, dict):
        return data.get(str(step))
    if isinstance(data, list) and isinstance(step, int) and step < len(data):
        return data[step]
    return None
