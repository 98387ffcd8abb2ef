"""Result rows as Arrow tables, converted where they are answered: the driver only sorts, encodes
and writes them.
"""

from __future__ import annotations

import json
import pickle
from array import array as array_of
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..job import CACHED_TOKENS, PlacedJob
from . import columns
from .job_file import thin_job
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
SKIPPED = "column {} is not kept: the first rows lack it; name it under `keep`"
REPLACED = (
    "input column `{}` is not in the answers: a result has this name;"
    " rename it in the input to keep it"
)
FLOATS, FLOAT = "f", 4  # vectors are float32
# characters of an error row's reason, which may quote a whole prompt
MAX_REASON = 2000


class Part(NamedTuple):
    """Answers with the same columns (`rows`), or error rows (`errors`)."""

    kind: str
    table: Any
    warnings: Iterable[str] = ()  # for the progress


class Converter:
    """Converter of a job's result rows, which travels with its replicas.

    Answers become lines of JSON or, for Parquet, typed columns; error rows become lines.
    """

    def __init__(self, job: PlacedJob, types: Mapping[str, str]) -> None:
        self.job, self.types = thin_job(job), dict(types)
        self.vectors = [name for name, type_ in job.results.items() if type_ == "vector"]
        self.skipped: set[str] = set()  # input columns missing from the first rows
        self.replaced: set[str] = set()  # input columns with the name of a result

    def convert(self, rows: Sequence[Row], warnings: Iterable[str] = ()) -> list[Part]:
        """Return rows as tables; answers that cannot be written become error rows."""
        import pyarrow

        failed = [row for row in rows if row["_error"]]
        tables = []
        for _, answers in groupby((row for row in rows if not row["_error"]), key=dict.keys):
            table, misfits = convert_fitting(self.to_table, list(answers))
            failed += [misfit_row(row, reason) for row, reason in misfits]
            tables += [] if table is None else [("rows", table)]
        if failed:
            lines = line_array([error_line(self.job, row) for row in failed])
            errors = pyarrow.table({"row": [row["_row"] for row in failed], LINE: lines})
            tables.append(("errors", errors))
        notes = {*map(SKIPPED.format, self.skipped), *map(REPLACED.format, self.replaced)}
        texts = sorted({*warnings, *notes})
        return [Part(kind, table, texts) for kind, table in tables]

    def to_table(self, rows: list[Row]) -> Any:
        """Return answers with the same columns as a table; raises for a value that cannot be
        written.
        """
        import pyarrow

        table = {"row": pyarrow.array([row["_row"] for row in rows], pyarrow.int64())}
        if self.job.write.format == "parquet":
            table |= self.kept_columns(rows) | self.result_columns(rows)
        else:
            table[LINE] = line_array([self.answer_line(row) for row in rows])
        if self.job.mode != "predict":  # a class's columns may have the same names
            for name in TOKEN_COLUMNS:
                counts = [row.get(name) or 0 for row in rows]
                table.setdefault(name, pyarrow.array(counts, pyarrow.int64()))
        return pyarrow.table(table)

    def kept_columns(self, rows: list[Row]) -> dict[str, Any]:
        """Return the rows' input columns as arrays."""
        if not self.types and self.job.keep is not None:
            return {}
        keeps = [unpack_keep(row) for row in rows]
        names = set().union(*keeps)
        self.skipped |= names - {*self.types, *self.job.results, *rows[0], "row"}
        self.replaced |= names & {"row", *output_columns(rows[0])}
        return {
            KEPT + name: to_array(
                name, [keep.get(name) for keep in keeps], columns.arrow_type(type_)
            )
            for name, type_ in self.types.items()
        }

    def result_columns(self, rows: list[Row]) -> dict[str, Any]:
        """Return the rows' results as arrays; vectors stay bytes."""
        if self.job.mode == "predict":
            names = output_columns(rows[0])
            return {name: inferred_array([row[name] for row in rows]) for name in names}
        return {
            name: to_array(name, [row.get(name) for row in rows], columns.arrow_type(type_))
            for name, type_ in self.job.results.items()
        }

    def answer_line(self, row: Row) -> bytes:
        """Return an answer as a line of JSON."""
        number, keep = row["_row"], unpack_keep(row)
        if self.job.write.format == "openai":
            return response.response_line(
                self.job.digest, number, keep["custom_id"], row["response"]
            )
        vectors = {name: array_of(FLOATS, row[name]).tolist() for name in self.vectors}
        results = {**output_columns(row), **vectors, "row": number}
        self.replaced |= keep.keys() & results.keys()
        return json_line({"row": number, **keep, **results})


def replaced_columns(job: PlacedJob, names: Iterable[str]) -> list[str]:
    """Return the input columns that results of a known name replace."""
    if job.keep is not None or job.write.format == "openai":
        return []
    return sorted({"row", *(job.results if job.mode != "predict" else ())}.intersection(names))


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

    block = [
        {"kind": kind, "warnings": warnings, "data": dump_table(table)}
        for kind, table, warnings in parts
    ]
    texts = pyarrow.list_(pyarrow.string())
    fields = {"kind": pyarrow.string(), "warnings": texts, "data": pyarrow.large_binary()}
    return pyarrow.Table.from_pylist(block, pyarrow.schema(fields))


def dump_table(table: Any) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def unpack(block: Any) -> list[Part]:
    """Return the tables of a block, without copies."""
    import pyarrow

    streams = [
        data.slice(start, end - start)
        for starts, data in map(value_buffers, block["data"].chunks)
        for start, end in pairwise(starts.tolist())
    ]
    tables = [pyarrow.ipc.open_stream(stream).read_all() for stream in streams]
    kinds, warnings = block["kind"].to_pylist(), block["warnings"].to_pylist()
    return list(map(Part, kinds, tables, warnings))


def value_buffers(array: Any) -> tuple[Any, Any]:
    """Return the offsets of bytes in an array, and the buffer that holds them without gaps."""
    import pyarrow

    _, offsets, data = array.buffers()
    starts = np.frombuffer(offsets, np.int64 if array.type == pyarrow.large_binary() else np.int32)
    return starts[array.offset : array.offset + len(array) + 1], data


def count_rows(parts: Iterable[Part]) -> int:
    """Return the number of rows in tables."""
    return sum(part.table.num_rows for part in parts)


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


def inferred_array(values: list[Any]) -> Any:
    """Return a class's column as an Arrow array, of pickled values if they have no plain type."""
    import pyarrow

    type_ = infer_type(values)
    if type_ is None:
        values = [pickle.dumps(value, pickle.HIGHEST_PROTOCOL) for value in values]
        type_ = pyarrow.large_binary()  # which Arrow never infers
    return pyarrow.array(values, type_)


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


def error_line(job: PlacedJob, row: Row) -> bytes:
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
