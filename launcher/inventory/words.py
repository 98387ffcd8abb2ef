"""What pydantic found → what to tell the reader: plain words, the near miss of an unknown key, never a secret."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from launcher.inventory.mistakes import Mistake, Where, did_you_mean, name, shown
from launcher.inventory.schema import InventoryFile, NodeSection

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "string_type": "text",
    "string_unicode": "text in valid Unicode",
    "bool_type": "true or false",
    "list_type": "a list, such as [a, b]",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "greater_than": "greater than {gt:g}",
    "too_short": "a list that is not empty",
}


def mistake(error: ErrorDetails) -> Mistake:
    """Put one pydantic error into words."""
    where: Where = tuple(error["loc"])
    if where and where[-1] == "[key]":
        where = where[:-1]
    kind = error["type"]
    if kind == "extra_forbidden":
        return Mistake(where=where, text=_unknown(where), about_key=True)
    if kind == "missing":
        return Mistake(where=where, text=_missing(where), about_key=True)
    return Mistake(where=where, text=_wrong(error, where))


def _wrong(error: ErrorDetails, where: Where) -> str:
    context: dict[str, Any] = error.get("ctx", {})
    value = error["input"]
    if error["type"] == "plainly":
        return str(context["text"])
    if error["type"] == "should":
        return str(context["text"]) + _but(value, where)
    if error["type"] == "literal_error":
        known = _options(where)
        near = did_you_mean(value, known) if isinstance(value, str) else ""
        return f"should be {_one_of(known)}" + _but(value, where) + near
    expected = _KINDS.get(error["type"])
    if expected is None:
        return error["msg"]
    if "secrets" in where and error["type"] == "model_type":
        return f"should say where the value comes from, such as {{env: {name(str(where[-1]))}}}" + _but(value, where)
    text = f"should be {expected.format(**context)}" + _but(value, where)
    if error["type"] == "string_type" and isinstance(value, (int, float)):
        text += "; put it in quotes"
    return text


def _but(value: object, where: Where) -> str:
    """The `not …` half. Below `secrets` a value may be the secret itself, written in the wrong place."""
    if "secrets" in where and isinstance(value, (str, int, float)):
        return ", not a literal value"
    return f", not {shown(value)}"


def _missing(where: Where) -> str:
    field = _section(where[:-1]).model_fields.get(str(where[-1]))
    about = f": {field.description.rstrip('.')}" if field and field.description else ""
    return f"`{where[-1]}` is missing{about}"


def _unknown(where: Where) -> str:
    section, key = _section(where[:-1]), str(where[-1])
    known = list(section.model_fields)
    text = f"unknown key `{name(key)}`"
    homes = [home for home in _homes(key) if home != "nodes"] if section is InventoryFile else []
    if homes:
        return f"{text} here; it belongs under `{homes[0]}`"
    if key in InventoryFile.model_fields:
        also = " or in a node" if key in NodeSection.model_fields else ""
        return f"{text} here; it belongs at the top level{also}"
    return text + (did_you_mean(key, known) or f"; known here: {', '.join(known)}")


def _homes(key: str) -> Iterator[str]:
    for section_name, field in InventoryFile.model_fields.items():
        yield from (section_name for section in _sections(field.annotation) if key in section.model_fields)


def _section(where: Where) -> type[BaseModel]:
    """Find the section that the keys at `where` belong to, by walking the schema along the path."""
    section: type[BaseModel] = InventoryFile
    for step in where:
        field = section.model_fields.get(step) if isinstance(step, str) else None
        if field is not None:
            section = next(_sections(field.annotation), section)
    return section


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _sections(inner)


def _options(where: Where) -> list[str]:
    field = _section(where[:-1]).model_fields[str(where[-1])]
    return list(_literals(field.annotation))


def _literals(annotation: Any) -> Iterator[str]:
    if typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
        return
    for inner in typing.get_args(annotation):
        yield from _literals(inner)


def _one_of(options: list[str]) -> str:
    return f"{', '.join(options[:-1])} or {options[-1]}"
