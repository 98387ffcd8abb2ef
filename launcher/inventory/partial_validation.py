"""Value-by-value validation of a file, so that rules can check the valid part."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from launcher.inventory import validation_messages
from launcher.inventory.mistakes import Mistake, YamlPath
from launcher.inventory.schema import type_adapter

_ROUNDS = 6
_File = TypeVar("_File")
StandIn = Callable[[YamlPath], object]


def validate_parts(
    data: Any, root: type[_File], stand_in: StandIn
) -> tuple[_File | None, list[Mistake]]:
    """Validate each value on its own; the file is None if too little is valid.

    Args:
        data: the file's mapping; repaired in place.
        root: the type of the file.
        stand_in: returns the replacement for an invalid value, or None to remove it.
    """
    mistakes: list[Mistake] = []
    for attempt in range(_ROUNDS):
        try:
            return type_adapter(root).validate_python(data), mistakes
        except ValidationError as error:
            new_mistakes = [
                validation_messages.to_mistake(detail, root) for detail in _relevant_errors(error)
            ]
            if attempt == 0:
                mistakes = new_mistakes
            for mistake in new_mistakes:
                _repair(data, mistake.yaml_path, stand_in)
    return None, mistakes


def _relevant_errors(error: ValidationError) -> Iterator[ErrorDetails]:
    """Skip "too short" errors of tuples with invalid items: each item has its own error."""
    for detail in error.errors(include_url=False):
        if detail["type"] != "too_short" or len(detail["input"]) < detail["ctx"]["min_length"]:
            yield detail


def _repair(data: Any, yaml_path: YamlPath, stand_in: StandIn) -> None:
    if not yaml_path:
        return
    containers = _enclosing_values(data, yaml_path)
    container, step = containers[-1], yaml_path[len(containers) - 1]
    if isinstance(container, list) and isinstance(step, str) and isinstance(containers[-2], dict):
        # The list is a short form of a mapping, as in `read: [a, b]`: remove all of it.
        containers.pop()
        container, step = containers[-1], yaml_path[len(containers) - 1]
    parent_path = yaml_path[: len(containers) - 1]
    if isinstance(container, dict):
        _set_or_delete(container, str(step), stand_in((*parent_path, str(step))))
    elif isinstance(container, list) and isinstance(step, int) and step < len(container):
        # Replace an item that is not a mapping; the next round adds its required keys.
        _set_or_delete(container, step, stand_in((*parent_path, step)))


def _enclosing_values(data: Any, yaml_path: YamlPath) -> list[Any]:
    """Return the mappings and lists on the way to a path, as far as they exist, from the top."""
    containers = [data]
    for step in yaml_path[:-1]:
        child = _get_item(containers[-1], step)
        if not isinstance(child, (dict, list)):
            break
        containers.append(child)
    return containers


def _set_or_delete(container: Any, key: str | int, value: object) -> None:
    if value is not None:
        container[key] = value
    elif isinstance(container, dict):
        container.pop(key, None)
    else:
        del container[key]


def _get_item(data: Any, step: str | int) -> Any:
    if isinstance(data, dict):
        return data.get(str(step))
    if isinstance(data, list) and isinstance(step, int) and step < len(data):
        return data[step]
    return None
