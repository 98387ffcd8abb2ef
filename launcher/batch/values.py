"""Types of single values in a job file: validation and short forms."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from launcher.batch.driver.job import ColumnType
from launcher.core.values import (
    Pattern,
    bare_error,
    is_whole_number,
    to_json_value,
    value_error,
)

MAX_REPLICAS = 4096
_LONGEST_TEMPLATE = 256 * 1024
_RANGE = re.compile(r"([0-9]{1,6})(?: ?- ?([0-9]{1,6}))?")

# No line ends, cursor movement or text direction changes: paths and columns are displayed.
_SHOWN = r"[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]"

Column = Annotated[str, Pattern(rf"{_SHOWN}{{1,255}}", "the name of a column, on one line")]
AdapterName = Annotated[
    str, Pattern(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", "a name: letters, digits, `.`, `_` and `-`")
]
JobPath = Annotated[
    str,
    Pattern(
        rf"{_SHOWN}+",
        "a path on this machine, a path on the nodes as nodes:/path, or s3://…, gs://… or hdfs://…",
    ),
]
LocalPath = Annotated[str, Pattern(rf"{_SHOWN}+", "a path on this machine, on one line")]
Target = Annotated[
    str,
    Pattern(
        r"(?:[^:\x00-\x1f\x7f]+\.py"
        r"|[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*):[A-Za-z_][A-Za-z0-9_]*",
        "FILE.py:NAME or MODULE:NAME",
    ),
]


def _check_template(value: str) -> str:
    if not value.strip():
        raise value_error("should be a template that is not empty")
    if len(value) > _LONGEST_TEMPLATE:
        raise bare_error(f"should be at most {_LONGEST_TEMPLATE // 1024} KiB long")
    return value


Template = Annotated[str, AfterValidator(_check_template)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


# A list that may be written as one of its items.
_ListOrItem = BeforeValidator(_as_list, json_schema_input_type=str | list[str])
JobPaths = Annotated[list[JobPath], _ListOrItem]
Texts = Annotated[list[str], _ListOrItem]


def _parse_replicas(value: object) -> tuple[int, int]:
    numbers = _least_and_most(value)
    if len(numbers) != 2 or not all(map(is_whole_number, numbers)):
        raise value_error(
            "should be a whole number such as 2, or minimum and maximum such as [1, 4]"
        )
    minimum, maximum = numbers
    if not 1 <= minimum <= MAX_REPLICAS or not 1 <= maximum <= MAX_REPLICAS:
        raise bare_error(f"should be at least 1 and at most {MAX_REPLICAS}")
    if minimum > maximum:
        raise bare_error(
            f"should have the minimum first: {maximum} to {minimum}, not {minimum} to {maximum}"
        )
    return minimum, maximum


def _least_and_most(value: object) -> list[Any]:
    """Parse `2`, `1-4` and `[1, 4]` to two numbers."""
    if isinstance(value, str) and (match := _RANGE.fullmatch(value.strip())):
        return [int(match[1]), int(match[2] or match[1])]
    return list(value) if isinstance(value, (list, tuple)) else [value, value]


Replicas = Annotated[
    Any, BeforeValidator(_parse_replicas, json_schema_input_type=int | str | list[int])
]


Placement = Literal["pack", "strict-pack", "spread", "strict-spread"]


def placement(value: Any) -> Any:
    """Return Ray's spelling, `STRICT_PACK`, as in a job file; other values unchanged."""
    return value.lower().replace("_", "-") if isinstance(value, str) else value


PlacementValue = BeforeValidator(placement)


def _check_single_answer(value: object) -> object:
    if value != 1 or isinstance(value, bool):
        raise bare_error(
            "should be left out: each row has exactly one answer; repeat the row in"
            " the input for more answers"
        )
    return value


SingleAnswer = Annotated[int, BeforeValidator(_check_single_answer)]


def _parse_keep(value: object) -> object:
    if not isinstance(value, list):
        return value
    for column in value:
        if not isinstance(column, str):
            raise bare_error(
                "should be a list of columns, or a mapping from each column to its type"
            )
        if value.count(column) > 1:
            raise value_error("should name each column once")
    return dict.fromkeys(value)


KeepColumns = BeforeValidator(
    _parse_keep, json_schema_input_type=list[str] | dict[str, ColumnType | None]
)


Plain = BeforeValidator(to_json_value)
