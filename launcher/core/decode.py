"""Strict decoding of JSON from nodes, containers and files into dataclasses.

Types are strict (a number is not text, a bool is not a number) and fields without a default are
required. Unknown fields are ignored, because newer versions may write them. The markers
`Validator`, `Default` and `DROP_INVALID` in a field's type add constraints or relax them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, cast

from launcher.core import untrusted
from launcher.core.errors import UnreadableAnswer

# pydantic is imported on use: most commands only need the types.
if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
    from pydantic_core import CoreSchema

_T = TypeVar("_T")
_LIMIT: Final = 2**62  # for counts, offsets and exit codes


@dataclass(frozen=True)
class Validator:
    """Field type marker: validate or convert a value of the right type; ValueError rejects it."""

    function: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Run after pydantic's own type check."""
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.function, handler(kind))


@dataclass(frozen=True)
class Default:
    """Field type marker: the value that replaces a missing or invalid one."""

    default: Any

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Catch the rejections of the preceding types and markers."""
        from pydantic_core import core_schema

        return core_schema.with_default_schema(
            handler(kind), default=self.default, on_error="default"
        )


@dataclass(frozen=True)
class _DropInvalid:
    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.with_default_schema(handler(kind), on_error="omit")


# Marker in the item type of a collection: drop invalid items.
DROP_INVALID: Final = _DropInvalid()


def matches(pattern: str) -> Validator:
    """Return a marker for text that fully matches a pattern."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError("unexpected format")
        return text

    return Validator(check)


def truncate(most: int) -> Validator:
    """Return a marker that cuts text to `most` characters."""
    return Validator(lambda text: text[:most])


def in_range(least: float, most: float) -> Validator:
    """Return a marker for a number in [least, most)."""

    def check(number: float) -> float:
        if not least <= number < most:
            raise ValueError("a number is out of range")
        return number

    return Validator(check)


# Text with long lines truncated, and numbers in a safe range.
Text = Annotated[str, Validator(untrusted.truncate)]
Integer = Annotated[int, in_range(-_LIMIT, _LIMIT)]
Number = Annotated[float, in_range(-_LIMIT, _LIMIT)]


def parse_json(shape: type[_T], text: str, source: str, *, forbid_unknown: bool = False) -> _T:
    """Parse JSON into `shape`; `forbid_unknown` rejects fields that `shape` does not define.

    Raises:
        UnreadableAnswer: naming `source` and the invalid field.
    """
    try:
        value = untrusted.loads(text)
    except ValueError as error:
        raise UnreadableAnswer(
            f"{source} cannot be read: {error}", evidence=untrusted.excerpt(text)
        ) from None
    return validate(shape, value, source, forbid_unknown=forbid_unknown)


def validate(shape: type[_T], value: object, source: str, *, forbid_unknown: bool = False) -> _T:
    """Convert a value that `untrusted.loads` returned into `shape`; see `parse_json`."""
    from pydantic import ValidationError

    adapter: TypeAdapter[tuple[_T]] = _type_adapter(cast("Any", shape), forbid_unknown)
    try:
        # JSON text, because strict validation of Python objects takes no list for a tuple.
        (instance,) = adapter.validate_json(json.dumps([value]))
    except ValidationError as error:
        raise UnreadableAnswer(
            f"{source} cannot be read: {_describe_error(error)}", evidence=untrusted.excerpt(value)
        ) from None
    return instance


@cache
def _type_adapter(shape: Any, forbid_unknown: bool) -> TypeAdapter[Any]:
    """Return a shape's validator, in a tuple: only items take an outer configuration."""
    from pydantic import ConfigDict, TypeAdapter

    wrapper: Any = GenericAlias(tuple, (shape,))
    config = ConfigDict(strict=True, extra="forbid" if forbid_unknown else "ignore")
    return TypeAdapter(wrapper, config=config)


def _describe_error(error: ValidationError) -> str:
    """Describe the first invalid field and its value, escaped: nodes may choose field names."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = repr(".".join(str(part) for part in first["loc"][1:]))[1:-1][:80]
    if first["type"] == "missing":
        return f"`{field}` is missing"
    return f"{f'`{field}`' if field else 'it'} cannot be {first['input']!r:.80}"
