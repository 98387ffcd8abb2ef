"""Result rows as the bytes of a file.

All answer files of a job have one schema; rows that do not fit it are returned separately.
"""

from __future__ import annotations

import base64
import json
import pickle
from array import array as array_of
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import columns
from .job import CACHED_TOKENS, Job
from .manifest import Manifest
from .openai_format import response
from .storage import Location

Row = dict[str, Any]
INTERNAL_COLUMNS = frozenset(
    ("row", "_row", "_error", "_stage", "_raw", "_keep", "_data", CACHED_TOKENS)
)
# characters of an error row's reason, which may quote a whole prompt
MAX_REASON = 2000
FLOATS, FLOAT = "f", 4  # vectors are float32
KIND = b"vlaunch.kind"  # metadata key of a column: selects its converter


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Bytes of a file, its row numbers in order, and the rejected rows with reasons."""

    data: bytes
    numbers: list[int]
    misfits: list[tuple[Row, str]]


class Encoder:
    """Encoder of answer files.

    A Parquet schema that depends on a class's own columns or a model's vector length is learned
    from the first file and stored.
    """

    ending = "jsonl"

    def __init__(self, job: Job, manifest: Manifest, out: Location) -> None:
        self.job, self.types = job, dict(manifest.types)
        self.stored = out.child("ledger").child("schema.json")
        self.schema: Any = None
        self.skipped_columns: set[str] = set()  # columns missing from the first rows
        if job.write.format == "parquet":
            self.ending = "parquet"
            self.schema = self.initial_schema()

    def encode(self, rows: list[Row]) -> Encoded:
        """Encode rows in order of their numbers."""
        rows = sorted(rows, key=lambda row: row["_row"])
        if self.job.write.format == "parquet" and self.schema is None:
            self.schema = self.learn_schema(rows)
        encoders = {"parquet": self.parquet, "jsonl": self.jsonl, "openai": self.openai}
        encode = encoders[self.job.write.format]
        misfits: list[tuple[Row, str]] = []
        try:
            data = encode(rows)
        except Exception:  # one invalid row fails the batch: find it
            rows, misfits = self.separate_misfits(encode, rows)
            data = encode(rows) if rows else b""
        return Encoded(data=data, numbers=[row["_row"] for row in rows], misfits=misfits)

    def separate_misfits(
        self, encode: Callable[[list[Row]], bytes], rows: list[Row]
    ) -> tuple[list[Row], list[tuple[Row, str]]]:
        """Return the writable rows, and the others with reasons."""
        fitting, misfits = [], []
        for row in rows:
            if reason := self.reject_reason(encode, row):
                misfits.append((row, reason))
            else:
                fitting.append(row)
        return fitting, misfits

    def reject_reason(self, encode: Callable[[list[Row]], bytes], row: Row) -> str:
        """Return the reason against writing a row; empty if it can be written."""
        try:
            encode([row])
        except Exception as error:  # a class's values may raise anything
            return str(error).strip().partition("\n")[0][:500] or type(error).__name__
        return ""

    def jsonl(self, rows: list[Row]) -> bytes:
        named = [name for name, type_ in self.job.results.items() if type_ == "vector"]
        return b"".join(
            json_line(
                {"row": 0, **unpack_keep(row), **output_columns(row), **decode_vectors(row, named)}
                | {"row": row["_row"]}
            )
            for row in rows
        )

    def openai(self, rows: list[Row]) -> bytes:
        return b"".join(
            response.response_line(
                self.job.digest, row["_row"], unpack_keep(row)["custom_id"], row["response"]
            )
            for row in rows
        )

    def parquet(self, rows: list[Row]) -> bytes:
        import pyarrow
        import pyarrow.parquet

        keeps = (
            [unpack_keep(row) for row in rows]
            if self.types or self.job.keep is None
            else [{}] * len(rows)
        )
        names = set(self.schema.names)
        if self.job.mode == "predict":
            refuse_new_columns(rows, names)
        for keep in keeps:
            self.skipped_columns |= keep.keys() - names
        arrays = [arrow_array(field, column_values(field, rows, keeps)) for field in self.schema]
        schema = pyarrow.schema([field.remove_metadata() for field in self.schema])
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(
            pyarrow.Table.from_arrays(arrays, schema=schema), sink, compression="zstd"
        )
        return bytes(sink.getvalue().to_pybytes())

    def initial_schema(self) -> Any:
        """Return the schema that follows from the job or an earlier run; None if unknown."""
        import pyarrow

        if self.job.mode == "predict" or "vector" in self.job.results.values():
            if not self.stored.exists():
                return None
            data = base64.b64decode(json.loads(self.stored.read())["schema"])
            return pyarrow.ipc.read_schema(pyarrow.py_buffer(data))
        fields = [
            pyarrow.field(name, columns.arrow_type(type_))
            for name, type_ in self.job.results.items()
        ]
        return self.full_schema(fields)

    def learn_schema(self, rows: list[Row]) -> Any:
        """Infer the schema from the first rows and store it for later files."""
        import pyarrow

        results = [output_columns(row) for row in rows]
        if self.job.mode == "predict":
            names = dict.fromkeys(name for row in results for name in row)
            fields = [infer_field(name, [row.get(name) for row in results]) for name in names]
        else:
            fields = [
                vector_field(name, results[0])
                if type_ == "vector"
                else pyarrow.field(name, columns.arrow_type(type_))
                for name, type_ in self.job.results.items()
            ]
        schema = self.full_schema(fields)
        data = base64.b64encode(schema.serialize().to_pybytes()).decode()
        self.stored.write_atomic(json.dumps({"schema": data}).encode())
        return schema

    def full_schema(self, fields: list[Any]) -> Any:
        """Return the columns in order: row number, input columns, results; a result replaces an
        input column of its name.
        """
        import pyarrow

        result_names = {"row", *(field.name for field in fields)}
        keep = [
            pyarrow.field(name, columns.arrow_type(type_), metadata={KIND: b"kept"})
            for name, type_ in self.types.items()
            if name not in result_names
        ]
        fields = [field for field in fields if field.name != "row"]
        return pyarrow.schema(
            [pyarrow.field("row", pyarrow.int64(), nullable=True), *keep, *fields]
        )


def refuse_new_columns(rows: list[Row], names: set[str]) -> None:
    """Raise ValueError if a row has an own column that is not in `names`."""
    for row in rows:
        if extra := row.keys() - names - INTERNAL_COLUMNS:
            raise ValueError(f"column {min(extra)} is new: the first file has no such column")


def vector_field(name: str, row: Row) -> Any:
    """Return the field for vectors of this row's length."""
    import pyarrow

    size = len(row[name]) // FLOAT
    return pyarrow.field(name, pyarrow.list_(pyarrow.float32(), size), metadata={KIND: b"vector"})


def column_values(field: Any, rows: list[Row], keeps: list[Row]) -> list[Any]:
    """Return a column's values, one per row, converted to its type."""
    if field.name == "row":
        return [row["_row"] for row in rows]
    kind = (field.metadata or {}).get(KIND, b"").decode()
    if kind == "kept":
        return [keep.get(field.name) for keep in keeps]
    column = [row.get(field.name) for row in rows]
    change = CONVERTERS.get(kind)
    if change is None:
        return column
    return [None if value is None else change(value) for value in column]


def arrow_array(field: Any, column: list[Any]) -> Any:
    """Return a column as an Arrow array; raises ValueError for a value of another type."""
    import pyarrow

    try:
        if (field.metadata or {}).get(KIND) == b"vector":
            return vector_array(field.type, column)
        return pyarrow.array(column, type=field.type)
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"column {field.name} does not hold {field.type} as before: {error}"
        ) from error


def vector_array(kind: Any, vectors: list[Any]) -> Any:
    """Return vectors, as bytes of float32, as an Arrow array; raises ValueError for unequal
    lengths.
    """
    import pyarrow

    lengths = {len(vector) // FLOAT for vector in vectors} - {kind.list_size}
    if lengths:
        raise ValueError(f"a vector of {min(lengths)} numbers, not of {kind.list_size}")
    data = pyarrow.py_buffer(b"".join(vectors))
    numbers = pyarrow.Array.from_buffers(
        kind.value_type, len(vectors) * kind.list_size, [None, data]
    )
    return pyarrow.FixedSizeListArray.from_arrays(numbers, kind.list_size)


def infer_field(name: str, values: list[Any]) -> Any:
    """Return the field for these values: an Arrow type for plain values and lists of them, else
    JSON.
    """
    import pyarrow

    types = pyarrow.types
    try:
        type_ = pyarrow.array(values).type
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):
        return pyarrow.field(name, pyarrow.string(), metadata={KIND: b"json"})
    inner = type_
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner = inner.value_type
    if types.is_null(type_):
        return pyarrow.field(name, pyarrow.string(), metadata={KIND: b"any"})
    if types.is_nested(inner) or types.is_null(inner):
        return pyarrow.field(name, pyarrow.string(), metadata={KIND: b"json"})
    return pyarrow.field(name, type_)


CONVERTERS: dict[str, Callable[[Any], Any]] = {"json": columns.to_json, "any": columns.as_any}


def unpack_keep(row: Row) -> Row:
    # pickled by this job's own readers
    return pickle.loads(row["_keep"]) if row["_keep"] else {}  # noqa: S301


def output_columns(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in INTERNAL_COLUMNS}


def decode_vectors(row: Row, named: list[str]) -> Row:
    """Return a row's vectors as lists of numbers."""
    return {name: array_of(FLOATS, row[name]).tolist() for name in named}


def json_line(values: Row) -> bytes:
    """Return a line of JSON, with null for NaN and infinities."""
    try:
        line = json.dumps(values, ensure_ascii=False, allow_nan=False, default=columns.json_default)
    except ValueError:
        line = columns.to_json(values)
    return line.encode() + b"\n"


def error_lines(job: Job, rows: list[Row]) -> bytes:
    """Return error rows as lines of JSON."""
    if job.write.format == "openai":
        return b"".join(
            response.error_line(
                job.digest, row["_row"], unpack_keep(row).get("custom_id"), row["_error"]
            )
            for row in rows
        )
    lines = []
    for row in rows:
        id_ = {job.read.id: unpack_keep(row).get(job.read.id)} if job.read.id else {}
        fields = {
            "row": row["_row"],
            **id_,
            "reason": row["_error"][:MAX_REASON],
            "stage": row.get("_stage") or "inference",
        }
        line = {**fields, "input": row.get("_raw") or ""}
        try:
            lines.append(json_line(line))
        # half a surrogate pair, or an id without a JSON form
        except (TypeError, ValueError, RecursionError):
            safe = {
                name: None if value is None else to_readable(value) for name, value in line.items()
            }
            lines.append(json_line({**safe, "row": row["_row"]}))
    return b"".join(lines)


def to_readable(value: Any) -> str:
    try:
        return str(value).encode("utf-8", "backslashreplace").decode()
    except RecursionError:
        return "(nested too deep to be shown)"
