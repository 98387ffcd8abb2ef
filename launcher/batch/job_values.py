"""Types of the values in a job file: patterns, bounds and short forms."""

import re
from typing import Annotated, Any, Literal

from ..core.values import (
    Bounds,
    Converter,
    EngineArg,
    Pattern,
    bare_error,
    is_whole_number,
    to_json_value,
    value_error,
)

MAX_REPLICAS = 4096
_LONGEST_TEMPLATE = 256 * 1024
# No line ends, cursor movement or text direction changes: paths and columns are displayed.
_SHOWN = r"[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]"
Mode = Literal["engine", "predict", "data-parallel"]
Format = Literal["text", "jsonl", "csv", "parquet"]
OutputFormat = Literal["parquet", "jsonl", "openai"]
Task = Literal["generate", "embed", "score"]
RowKind = Literal["generate", "embed", "score", "request"]  # a task, or requests for vLLM's API
Order = Literal["prefix", "given"]
ColumnType = Literal["text", "integer", "number", "boolean", "json"]


def _check_template(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise value_error("should be a template that is not empty")
    if isinstance(value, str) and len(value) > _LONGEST_TEMPLATE:
        raise bare_error(f"should be at most {_LONGEST_TEMPLATE // 1024} KiB long")
    return value


def _as_list(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _parse_replicas(value: object) -> tuple[int, int]:
    """Parse `2`, `1-4` and `[1, 4]`."""
    numbers: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value, value]
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,6})(?: ?- ?([0-9]{1,6}))?", value.strip())
        numbers = [int(match[1]), int(match[2] or match[1])] if match else []
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


def _check_single_answer(value: object) -> object:
    if value != 1 or isinstance(value, bool):
        raise bare_error(
            "should be left out: each row has exactly one answer; repeat the row in"
            " the input for more answers"
        )
    return value


def _parse_keep(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        return value
    for column in value:
        if not isinstance(column, str):
            raise bare_error(
                "should be a list of columns, or a mapping from each column to its type"
            )
        if value.count(column) > 1:
            raise value_error("should name each column once")
    return dict.fromkeys(value)


def _lower_case(value: object) -> object:
    return value.lower().replace("_", "-") if isinstance(value, str) else value


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
Template = Annotated[str, Converter(_check_template, str)]
Items = Converter(_as_list, str | list[str])  # a list that may be written as one of its items
Texts = Annotated[tuple[str, ...], Bounds(min_length=1), Items]
Text = Annotated[str, Bounds(min_length=1)]
JsonMapping = Annotated[dict[str, Any], Converter(to_json_value, dict[str, Any])]
EngineArgs = Annotated[dict[EngineArg, Any], Converter(to_json_value, dict[EngineArg, Any])]
Rows = Annotated[int, Bounds(ge=1, le=1_000_000)]
Tokens = Annotated[int, Bounds(ge=0, le=10_000_000)]
Seconds = Annotated[float, Bounds(gt=0, le=7 * 24 * 3600)]
Claim = Annotated[float, Bounds(ge=0, le=1024)]
ParallelSize = Annotated[int, Bounds(ge=1, le=1024)]
Penalty = Annotated[float, Bounds(ge=-2, le=2)]
Replicas = Annotated[tuple[int, int], Converter(_parse_replicas, int | str | list[int])]
_Placements = Literal["pack", "strict-pack", "spread", "strict-spread"]
Placement = Annotated[_Placements, Converter(_lower_case, _Placements)]
SingleAnswer = Annotated[int, Converter(_check_single_answer, int)]
Keep = Annotated[
    dict[Column, ColumnType | None],
    Converter(_parse_keep, list[str] | dict[str, ColumnType | None]),
]
