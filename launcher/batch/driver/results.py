"""Result rows as Arrow tables, converted where they are answered: the driver only sorts, encodes
and writes them.
"""

from __future__ import annotations

import json
import pickle
from array import array as array_of
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from . import columns
from .job import CACHED_TOKENS, Job, thin_job
from .lines import EXCERPT_LENGTH
from .openai_format import response

Row = dict[str, Any]
Item = TypeVar("Item")
Converted = TypeVar("Converted")
INTERNAL_COLUMNS = frozenset(
    ("row", "_row", "_error", "_stage", "_raw", "_keep", "_data", CACHED_TOKENS)
)
TOKEN_COLUMNS = ("prompt_tokens", "output_tokens", CACHED_TOKENS)
LINE = "_line"  # column with the rows' lines of JSON
KEPT = "_keep."  # prefix of input columns
WARNINGS = b"vlaunch.warnings"  # metadata key of a table: texts for the progress, as JSON
SKIPPED = "column {} is not kept: the first rows lack it; name it under `keep`"
KIND = b"vlaunch.kind"  # metadata key of a column: selects its converter
PICKLED = {KIND: b"pickled"}  # of a column whose values have no Arrow type of their own
FLOATS, FLOAT = "f", 4  # vectors are float32
# characters of an error row's reason, which may quote a whole prompt
MAX_REASON = 2000


class Part(NamedTuple):
    """Answers with the same columns (`rows`), or error rows (`errors`)."""

    kind: str
    table: Any


class Converter:
    """Converter of a job's result rows, which travels with its replicas.

    Answers become lines of JSON or, for Parquet, typed columns; error rows become lines.
    """

    def __init__(self, job: Job, types: Mapping[str, str]) -> None:
        self.job, self.types = thin_job(job), dict(types)
        self.vectors = [name for name, type_ in job.results.items() if type_ == "vector"]

    def convert(self, rows: Sequence[Row], warnings: Iterable[str] = ()) -> list[Part]:
        """Return rows as tables; answers that cannot be written become error rows."""
        import pyarrow

        failed = [row for row in rows if row["_error"]]
        parts = []
        for _, answers in groupby((row for row in rows if not row["_error"]), key=dict.keys):
            table, misfits = convert_fitting(self.to_table, list(answers))
            failed += [misfit_row(row, reason) for row, reason in misfits]
            parts += [Part("rows", table)] if table is not None else []
        if failed:
            lines = [error_line(self.job, row) for row in failed]
            table = pyarrow.table({"row": [row["_row"] for row in failed], LINE: line_array(lines)})
            parts.append(Part("errors", table))
        return [Part(kind, with_warnings(table, warnings)) for kind, table in parts]

    def to_table(self, rows: list[Row]) -> Any:
        """Return answers with the same columns as a table; raises for a value that cannot be
        written.
        """
        import pyarrow

        numbers = pyarrow.array([row["_row"] for row in rows], pyarrow.int64())
        table = pyarrow.table({"row": numbers})
        if self.job.write.format == "parquet":
            table = self.add_columns(table, rows)
        else:
            lines = line_array([self.answer_line(row) for row in rows])
            table = table.append_column(LINE, lines)
        if self.job.mode != "predict":  # a class's columns may have the same names
            for name in TOKEN_COLUMNS:
                if name not in table.column_names:
                    counts = [row.get(name) or 0 for row in rows]
                    table = table.append_column(name, pyarrow.array(counts, pyarrow.int64()))
        return table

    def add_columns(self, table: Any, rows: list[Row]) -> Any:
        """Add the rows' input columns and results to a table."""
        import pyarrow

        if self.types or self.job.keep is None:
            keeps = [unpack_keep(row) for row in rows]
            for name, type_ in self.types.items():
                values = [keep.get(name) for keep in keeps]
                table = table.append_column(
                    KEPT + name, to_array(name, values, columns.arrow_type(type_))
                )
            written = {*self.types, *self.job.results, *rows[0]}
            table = with_warnings(table, map(SKIPPED.format, set().union(*keeps) - written))
        if self.job.mode != "predict":
            for name, type_ in self.job.results.items():
                kind = pyarrow.binary() if type_ == "vector" else columns.arrow_type(type_)
                table = table.append_column(
                    name, to_array(name, [row.get(name) for row in rows], kind)
                )
            return table
        for name in output_columns(rows[0]):
            table = table.append_column(*inferred_column(name, [row[name] for row in rows]))
        return table

    def answer_line(self, row: Row) -> bytes:
        """Return an answer as a line of JSON."""
        number, keep = row["_row"], unpack_keep(row)
        if self.job.write.format == "openai":
            return response.response_line(
                self.job.digest, number, keep["custom_id"], row["response"]
            )
        vectors = {name: array_of(FLOATS, row[name]).tolist() for name in self.vectors}
        return json_line(
            {"row": number, **keep, **output_columns(row), **vectors} | {"row": number}
        )


def convert_fitting(
    convert: Callable[[list[Item]], Converted], items: list[Item]
) -> tuple[Converted | None, list[tuple[Item, str]]]:
    """Convert the items that can be converted; return also the others with reasons."""
    try:
        return (convert(items) if items else None), []
    except Exception:  # one invalid row fails the batch: find it
        fitting, misfits = [], []
    for item in items:
        try:
            convert([item])
        except Exception as error:  # a class's values may raise anything
            reason = str(error).strip().partition("\n")[0][:500] or type(error).__name__
            misfits.append((item, reason))
        else:
            fitting.append(item)
    return (convert(fitting) if fitting else None), misfits


def pack(parts: Iterable[Part]) -> Any:
    """Return tables as a block of Ray Data: one row each, for its blocks have one schema."""
    import pyarrow

    kinds, data = [], []
    for kind, table in parts:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        kinds.append(kind)
        data.append(sink.getvalue().to_pybytes())
    return pyarrow.table({"kind": kinds, "data": pyarrow.array(data, pyarrow.large_binary())})


def unpack(block: Any) -> list[Part]:
    """Return the tables of a block, without copies."""
    import pyarrow

    return [
        Part(kind, pyarrow.ipc.open_stream(data.as_buffer()).read_all())
        for kind, data in zip(block["kind"].to_pylist(), block["data"], strict=True)
    ]


def count_rows(parts: Iterable[Part]) -> int:
    """Return the number of rows in tables."""
    return sum(part.table.num_rows for part in parts)


def with_warnings(table: Any, warnings: Iterable[str]) -> Any:
    """Return a table with further warnings."""
    texts = sorted({*table_warnings(table), *warnings})
    return table.replace_schema_metadata({WARNINGS: json.dumps(texts)}) if texts else table


def table_warnings(table: Any) -> list[str]:
    return list(json.loads((table.schema.metadata or {}).get(WARNINGS, b"[]")))


def to_array(name: str, values: list[Any], type_: Any) -> Any:
    """Return a column as an Arrow array; raises ValueError for a value of another type."""
    import pyarrow

    try:
        return pyarrow.array(values, type_)
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"column {name} does not hold {type_} as before: {error}") from error


def line_array(lines: list[bytes]) -> Any:
    import pyarrow

    return pyarrow.array(lines, pyarrow.large_binary())


def inferred_column(name: str, values: list[Any]) -> tuple[Any, Any]:
    """Return a class's column: field and array."""
    import pyarrow

    type_ = infer_type(values)
    if type_ is not None:
        return pyarrow.field(name, type_), pyarrow.array(values, type_)
    field = pyarrow.field(name, pyarrow.large_binary(), metadata=PICKLED)
    pickled = [pickle.dumps(value, pickle.HIGHEST_PROTOCOL) for value in values]
    return field, pyarrow.array(pickled, field.type)


def infer_type(values: list[Any]) -> Any:
    """Return the Arrow type of plain values and lists of them, or of None only; None for others."""
    import pyarrow

    types = pyarrow.types
    try:
        type_ = pyarrow.array(values).type
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):
        return None
    inner = type_
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner = inner.value_type
    nested = types.is_nested(inner) or (types.is_null(inner) and inner != type_)
    return None if nested else type_


def unpack_keep(row: Row) -> Row:
    # pickled by this job's own readers
    return pickle.loads(row["_keep"]) if row["_keep"] else {}  # noqa: S301


def output_columns(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in INTERNAL_COLUMNS}


def answer_excerpt(row: Row) -> str:
    """Return an unwritable answer as shown in an error row."""
    return (
        str({**unpack_keep(row), **output_columns(row)})[:EXCERPT_LENGTH]
        .encode("utf-8", "backslashreplace")
        .decode()[:EXCERPT_LENGTH]
    )


def misfit_row(row: Row, reason: str) -> Row:
    """Return the error row of an answer that cannot be written."""
    raw = row.get("_raw") or answer_excerpt(row)
    return {**row, "_error": reason, "_stage": "write", "_raw": raw}


def json_line(values: Row) -> bytes:
    """Return a line of JSON, with null for NaN and infinities."""
    try:
        line = json.dumps(values, ensure_ascii=False, allow_nan=False, default=columns.json_default)
    except ValueError:
        line = columns.to_json(values)
    return line.encode() + b"\n"


def error_line(job: Job, row: Row) -> bytes:
    """Return an error row as a line of JSON."""
    number, keep = row["_row"], unpack_keep(row)
    if job.write.format == "openai":
        return response.error_line(job.digest, number, keep.get("custom_id"), row["_error"])
    line = {
        "row": number,
        **({job.read.id: keep.get(job.read.id)} if job.read.id else {}),
        "reason": row["_error"][:MAX_REASON],
        "stage": row.get("_stage") or "inference",
        "input": row.get("_raw") or "",
    }
    try:
        return json_line(line)
    # half a surrogate pair, or an id without a JSON form
    except (TypeError, ValueError, RecursionError):
        safe = {name: None if value is None else to_readable(value) for name, value in line.items()}
        return json_line({**safe, "row": number})


def to_readable(value: Any) -> str:
    try:
        return str(value).encode("utf-8", "backslashreplace").decode()
    except RecursionError:
        return "(nested too deep to be shown)"
