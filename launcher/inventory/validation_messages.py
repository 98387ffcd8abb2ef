"""Conversion of pydantic errors to plain messages: with similar keys, and never with a secret."""

import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import ErrorDetails

from launcher.core.values import InvalidValue
from launcher.inventory.mistakes import Mistake, YamlPath, describe_value, did_you_mean, format_key
from launcher.inventory.schema import Section, fields_of, sections_in

_EXPECTED_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "string_type": "text",
    "string_unicode": "text in valid Unicode",
    "bool_type": "true or false",
    "list_type": "a list, such as [a, b]",
    "tuple_type": "a list, such as [a, b]",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "dataclass_type": "a mapping of keys to values",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "greater_than": "greater than {gt:g}",
    "too_short": "a list that is not empty",
}


def to_mistake(error: ErrorDetails, root: type[Any]) -> Mistake:
    """Convert a pydantic error of a file of type `root`."""
    yaml_path: YamlPath = tuple(error["loc"])
    if yaml_path and yaml_path[-1] == "[key]":
        yaml_path = yaml_path[:-1]
    kind = error["type"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return Mistake(
            yaml_path=yaml_path,
            text=_describe_unknown(yaml_path, root),
            about_key=True,
            unknown=True,
        )
    if kind == "missing":
        return Mistake(yaml_path=yaml_path, text=_describe_missing(yaml_path, root), about_key=True)
    return Mistake(yaml_path=yaml_path, text=_describe_error(error, yaml_path, root))


def _describe_error(error: ErrorDetails, yaml_path: YamlPath, root: type[Any]) -> str:
    context: dict[str, Any] = {key: _to_integer(item) for key, item in error.get("ctx", {}).items()}
    value = error["input"]
    if isinstance(wrong := context.get("error"), InvalidValue):
        return str(wrong) + (_not_value(value, yaml_path) if wrong.show_value else "")
    if error["type"] == "literal_error":
        return _describe_literal_error(value, yaml_path, root)
    expected = _EXPECTED_TYPES.get(error["type"])
    if expected is None:
        return error["msg"]
    if "secrets" in yaml_path and error["type"] == "dataclass_type":
        return (
            f"should name the source of the value, such as {{env:"
            f" {format_key(str(yaml_path[-1]))}}}" + _not_value(value, yaml_path)
        )
    text = f"should be {expected.format(**context)}" + _not_value(value, yaml_path)
    if error["type"] == "string_type" and isinstance(value, (int, float)):
        text += "; put it in quotes"
    return text


def _describe_literal_error(value: object, yaml_path: YamlPath, root: type[Any]) -> str:
    options = _allowed_literals(yaml_path, root)
    suggestion = did_you_mean(value, options) if isinstance(value, str) else ""
    return f"should be {_join_options(options)}" + _not_value(value, yaml_path) + suggestion


def _to_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _not_value(value: object, yaml_path: YamlPath) -> str:
    """Return the "not …" part of a message.

    Values below `secrets` may be misplaced secrets, so they are omitted.
    """
    if "secrets" in yaml_path and isinstance(value, (str, int, float)):
        return ", not a literal value"
    return f", not {describe_value(value)}"


def _describe_missing(yaml_path: YamlPath, root: type[Any]) -> str:
    field = fields_of(_section_at(yaml_path[:-1], root)).get(str(yaml_path[-1]))
    described = (field.description or "") if field else ""
    suffix = f": {described.rstrip('.')}" if described else ""
    return f"`{yaml_path[-1]}` is missing{suffix}"


def _describe_unknown(yaml_path: YamlPath, root: type[Any]) -> str:
    section, key = _section_at(yaml_path[:-1], root), str(yaml_path[-1])
    keys = list(fields_of(section))
    text = f"unknown key `{format_key(key)}`"
    owners = (
        [owner for owner in _owners(key, root) if owner not in root.entries]
        if section is root
        else []
    )
    if owners:
        return f"{text} here; it belongs under `{owners[0]}`"
    if key in fields_of(root):
        alternatives = "".join(
            f" or in {entry}"
            for owner, entry in root.entries.items()
            if owner in _owners(key, root)
        )
        return f"{text} here; it belongs at the top level{alternatives}"
    return text + (did_you_mean(key, keys) or f"; valid keys: {', '.join(keys)}")


def _owners(key: str, root: type[Any]) -> Iterator[str]:
    for section_name, field in fields_of(root).items():
        yield from (
            section_name for section in sections_in(field.annotation) if key in fields_of(section)
        )


def _section_at(yaml_path: YamlPath, root: type[Any]) -> type[Any]:
    section: type[Any] = root
    steps = iter(yaml_path)
    for step in steps:
        field = fields_of(section).get(step) if isinstance(step, str) else None
        if field is None:
            continue
        subsection = next(sections_in(field.annotation), None)
        if subsection is None:
            return Section  # the rest are user-defined keys
        section = subsection
        if _has_user_keys(field.annotation):
            next(steps, None)
    return section


def _has_user_keys(annotation: Any) -> bool:
    """Return whether a field is a mapping with user-defined keys."""
    return typing.get_origin(annotation) in (dict, Mapping) or any(
        _has_user_keys(inner) for inner in typing.get_args(annotation)
    )


def _allowed_literals(yaml_path: YamlPath, root: type[Any]) -> list[str]:
    """Return the literals allowed at a path, or in the nearest enclosing list or mapping."""
    for length in range(len(yaml_path), 0, -1):
        field = fields_of(_section_at(yaml_path[: length - 1], root)).get(
            str(yaml_path[length - 1])
        )
        if field is not None:
            return list(_literals(field.annotation))
    return []


def _literals(annotation: Any) -> Iterator[str]:
    if typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
        return
    for inner in typing.get_args(annotation):
        yield from _literals(inner)


def _join_options(options: list[str]) -> str:
    return f"{', '.join(options[:-1])} or {options[-1]}"
