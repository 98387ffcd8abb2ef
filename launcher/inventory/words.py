"""What pydantic found → what to tell the reader: plain words, the near miss of an unknown key,
never a secret.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import ErrorDetails

from launcher.core.values import Wrong
from launcher.inventory.mistakes import Mistake, Where, did_you_mean, name, shown
from launcher.inventory.schema import Section, known, sections

_KINDS = {
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


def mistake(error: ErrorDetails, root: type[Any]) -> Mistake:
    """Put one pydantic error of a file that is a `root` into words."""
    yaml_path: Where = tuple(error["loc"])
    if yaml_path and yaml_path[-1] == "[key]":
        yaml_path = yaml_path[:-1]
    kind = error["type"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return Mistake(
            where=yaml_path, text=_unknown(yaml_path, root), about_key=True, unknown=True
        )
    if kind == "missing":
        return Mistake(where=yaml_path, text=_missing(yaml_path, root), about_key=True)
    return Mistake(where=yaml_path, text=_wrong(error, yaml_path, root))


def _wrong(error: ErrorDetails, yaml_path: Where, root: type[Any]) -> str:
    context: dict[str, Any] = {key: _whole(item) for key, item in error.get("ctx", {}).items()}
    value = error["input"]
    if isinstance(wrong := context.get("error"), Wrong):
        return str(wrong) + (_but(value, yaml_path) if wrong.shown else "")
    if error["type"] == "literal_error":
        return _other_word(value, yaml_path, root)
    expected = _KINDS.get(error["type"])
    if expected is None:
        return error["msg"]
    if "secrets" in yaml_path and error["type"] == "dataclass_type":
        return (
            f"should say where the value comes from, such as {{env: {name(str(yaml_path[-1]))}}}"
            + _but(value, yaml_path)
        )
    text = f"should be {expected.format(**context)}" + _but(value, yaml_path)
    if error["type"] == "string_type" and isinstance(value, (int, float)):
        text += "; put it in quotes"
    return text


def _other_word(value: object, yaml_path: Where, root: type[Any]) -> str:
    options = _options(yaml_path, root)
    suggestion = did_you_mean(value, options) if isinstance(value, str) else ""
    return f"should be {_one_of(options)}" + _but(value, yaml_path) + suggestion


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _but(value: object, yaml_path: Where) -> str:
    """The `not …` half.

    Below `secrets` a value may be the secret itself, written in the wrong place.
    """
    if "secrets" in yaml_path and isinstance(value, (str, int, float)):
        return ", not a literal value"
    return f", not {shown(value)}"


def _missing(yaml_path: Where, root: type[Any]) -> str:
    field = known(_section(yaml_path[:-1], root)).get(str(yaml_path[-1]))
    described = (field.description or "") if field else ""
    suffix = f": {described.rstrip('.')}" if described else ""
    return f"`{yaml_path[-1]}` is missing{suffix}"


def _unknown(yaml_path: Where, root: type[Any]) -> str:
    section, key = _section(yaml_path[:-1], root), str(yaml_path[-1])
    keys = list(known(section))
    text = f"unknown key `{name(key)}`"
    owners = (
        [owner for owner in _homes(key, root) if owner not in root.entries]
        if section is root
        else []
    )
    if owners:
        return f"{text} here; it belongs under `{owners[0]}`"
    if key in known(root):
        alternatives = "".join(
            f" or in {entry}" for owner, entry in root.entries.items() if owner in _homes(key, root)
        )
        return f"{text} here; it belongs at the top level{alternatives}"
    return text + (did_you_mean(key, keys) or f"; known here: {', '.join(keys)}")


def _homes(key: str, root: type[Any]) -> Iterator[str]:
    for section_name, field in known(root).items():
        yield from (section_name for section in sections(field.annotation) if key in known(section))


def _section(yaml_path: Where, root: type[Any]) -> type[Any]:
    """Find the section that the keys at `where` belong to, by walking the schema along the path."""
    section: type[Any] = root
    steps = iter(yaml_path)
    for step in steps:
        field = known(section).get(step) if isinstance(step, str) else None
        if field is None:
            continue
        subsection = next(sections(field.annotation), None)
        if subsection is None:
            return Section  # what follows are names of the user's
        section = subsection
        if _named(field.annotation):
            next(steps, None)
    return section


def _named(annotation: Any) -> bool:
    """Tell whether a field is a mapping from names of the user's."""
    return typing.get_origin(annotation) in (dict, Mapping) or any(
        _named(inner) for inner in typing.get_args(annotation)
    )


def _options(yaml_path: Where, root: type[Any]) -> list[str]:
    """Return the words that are allowed at `where`, or in the list or mapping around it."""
    for length in range(len(yaml_path), 0, -1):
        field = known(_section(yaml_path[: length - 1], root)).get(str(yaml_path[length - 1]))
        if field is not None:
            return list(_literals(field.annotation))
    return []


def _literals(annotation: Any) -> Iterator[str]:
    if typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
        return
    for inner in typing.get_args(annotation):
        yield from _literals(inner)


def _one_of(options: list[str]) -> str:
    return f"{', '.join(options[:-1])} or {options[-1]}"
