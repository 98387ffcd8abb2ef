"""One reader for what nodes, containers and files say: JSON in, a dataclass out, or one error that
says whose answer it was and which field misfits.

The dataclass is the form: kinds are strict (a number is no text, and a bool no number), a field
without a default must be there, and fields that it does not have are passed over, for a newer
version may have written them. What else a value must be, and where a reader is lenient, stands in
the field's type: `Then`, `Or` and `DROPPED`.
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

# pydantic is imported where something is read: most commands only need the shapes.
if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
    from pydantic_core import CoreSchema

_Shape = TypeVar("_Shape")
_MOST: Final = 2**62  # of a count, an offset, an exit code


@dataclass(frozen=True)
class Then:
    """In a field's type: what becomes of a value of the right kind; ValueError refuses it."""

    change: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Run after pydantic's own check of the kind."""
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.change, handler(kind))


@dataclass(frozen=True)
class Or:
    """In a field's type: what stands in for a value that misfits, or is not there."""

    default: Any

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Catch what the types and markers before this one refuse."""
        from pydantic_core import core_schema

        return core_schema.with_default_schema(
            handler(kind), default=self.default, on_error="default"
        )


@dataclass(frozen=True)
class _Dropped:
    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.with_default_schema(handler(kind), on_error="omit")


# In the type of the items of a collection: one that misfits is left out.
DROPPED: Final = _Dropped()


def matches(pattern: str) -> Then:
    """Return the marker of a text that must match a pattern as a whole."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError("it has another form")
        return text

    return Then(check)


def shortened(most: int) -> Then:
    """Return the marker of a text of which only the beginning is kept."""
    return Then(lambda text: text[:most])


def within(least: float, most: float) -> Then:
    """Return the marker of a number that must be at least `least`, and less than `most`."""

    def check(number: float) -> float:
        if not least <= number < most:
            raise ValueError("it is too small or too large")
        return number

    return Then(check)


# A text whose lines are cut where they are too long to be looked at, and numbers that somebody can
# count with.
Text = Annotated[str, Then(untrusted.cut)]
Whole = Annotated[int, within(-_MOST, _MOST)]
Number = Annotated[float, within(-_MOST, _MOST)]


def read(shape: type[_Shape], text: str, source: str, *, forbid_unknown: bool = False) -> _Shape:
    """Read JSON as a node or a file has it; `closed` refuses fields that the shape does not have.

    Raises:
        UnreadableAnswer: `whose` answer it was, and which field misfits.
    """
    try:
        value = untrusted.loads(text)
    except ValueError as error:
        raise UnreadableAnswer(
            f"{source} cannot be read: {error}", evidence=untrusted.shown(text)
        ) from None
    return fit(shape, value, source, forbid_unknown=forbid_unknown)


def fit(shape: type[_Shape], value: object, source: str, *, forbid_unknown: bool = False) -> _Shape:
    """Like `read`, for what `untrusted.loads` has returned."""
    from pydantic import ValidationError

    adapter: TypeAdapter[tuple[_Shape]] = _adapter(cast("Any", shape), forbid_unknown)
    try:
        # As text, where an array is a tuple and an object a dataclass even for a strict reader.
        (instance,) = adapter.validate_json(json.dumps([value]))
    except ValidationError as error:
        raise UnreadableAnswer(
            f"{source} cannot be read: {_misfit(error)}", evidence=untrusted.shown(value)
        ) from None
    return instance


@cache
def _adapter(shape: Any, forbid_unknown: bool) -> TypeAdapter[Any]:
    """Return the reader of a shape; within a tuple, for only there a plain dataclass takes a
    configuration that is not its own.
    """
    from pydantic import ConfigDict, TypeAdapter

    wrapper: Any = GenericAlias(tuple, (shape,))
    config = ConfigDict(strict=True, extra="forbid" if forbid_unknown else "ignore")
    return TypeAdapter(wrapper, config=config)


def _misfit(error: ValidationError) -> str:
    """Say which field it is, and what stands there; a field's name may be a node's own word."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = repr(".".join(str(part) for part in first["loc"][1:]))[1:-1][:80]
    if first["type"] == "missing":
        return f"`{field}` is missing"
    return f"{f'`{field}`' if field else 'it'} cannot be {first['input']!r:.80}"
