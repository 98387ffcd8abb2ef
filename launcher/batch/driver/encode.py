"""Tables of result rows as the bytes of a file.

All answer files of a job have one schema; rows that do not fit it are returned separately.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..job import PlacedJob
from . import columns
from .manifest import Manifest
from .results import (
    FLOAT,
    INTERNAL_COLUMNS,
    KEPT,
    LINE,
    Row,
    convert_fitting,
    infer_type,
    misfit_row,
    to_array,
    value_buffers,
)
from .storage import Location

KIND = b"vlaunch.kind"  # metadata key of a column: selects its converter


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Bytes of a file, its row numbers in order, and error rows of the rejected answers."""

    data: Any  # bytes, or a view of them
    numbers: list[int]
    misfits: list[Row]


class Encoder:
    """Encoder of files; several threads may encode at once.

    A Parquet schema that depends on a class's own columns or a model's vector length is learned
    from the first file and stored.
    """

    ending = "jsonl"

    def __init__(self, job: PlacedJob, manifest: Manifest, out: Location) -> None:
        self.job, self.types = job, dict(manifest.types)
        self.stored = out.child("ledger").child("schema.json")
        self.schema: Any = None
        if job.write.format == "parquet":
            self.ending = "parquet"
            self.schema = self.initial_schema()

    def prepare(self, tables: Sequence[Any]) -> None:
        """Learn the schema from the first file of answers, before it is encoded."""
        if self.ending == "parquet" and self.schema is None:
            self.schema = self.learn_schema(tables)

    def encode(self, kind: str, tables: list[Any]) -> Encoded:
        """Encode rows in order of their numbers."""
        import pyarrow.parquet

        if kind == "errors" or self.ending == "jsonl":
            table = sort_rows([table.select(["row", LINE]) for table in tables])
            return Encoded(data=join_lines(table[LINE]), numbers=row_numbers(table), misfits=[])
        fitting, others = convert_fitting(self.cast, tables)
        rows = [table.slice(index, 1) for table, _ in others for index in range(table.num_rows)]
        fitting_rows, misfits = convert_fitting(self.cast, rows)
        errors = [misfit_row(unpack_row(row), reason) for row, reason in misfits]
        fitted = [table for table in (fitting, fitting_rows) if table is not None]
        if not fitted:
            return Encoded(data=b"", numbers=[], misfits=errors)
        table, sink = sort_rows(fitted), pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(table, sink, compression="zstd")
        data, numbers = memoryview(sink.getvalue()), row_numbers(table)
        return Encoded(data=data, numbers=numbers, misfits=errors)

    def cast(self, tables: Sequence[Any]) -> Any:
        """Return tables as one with the schema; raises ValueError for a value that does not fit."""
        import pyarrow

        if any(table.schema != tables[0].schema for table in tables):
            return pyarrow.concat_tables([self.cast([table]) for table in tables])
        table = pyarrow.concat_tables(tables)
        names = set(self.schema.names)
        if self.job.mode == "predict" and (
            extra := set(filter(is_result, table.column_names)) - names
        ):
            raise ValueError(f"column {min(extra)} is new: the first file has no such column")
        arrays = [cast_column(field, table) for field in self.schema]
        schema = pyarrow.schema([field.remove_metadata() for field in self.schema])
        return pyarrow.Table.from_arrays(arrays, schema=schema)

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

    def learn_schema(self, tables: Sequence[Any]) -> Any:
        """Infer the schema from the first rows and store it for later files."""
        import pyarrow

        if schema := self.initial_schema():  # of another run, which has taken over the output
            return schema
        if self.job.mode == "predict":
            names = dict.fromkeys(name for table in tables for name in table.column_names)
            fields = [infer_field(name, tables) for name in names if is_result(name)]
        else:
            fields = [
                vector_field(name, tables[0])
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
        return pyarrow.schema(
            [pyarrow.field("row", pyarrow.int64(), nullable=True), *keep, *fields]
        )


def sort_rows(tables: Sequence[Any]) -> Any:
    """Return tables of one schema as one in order of the row numbers."""
    import pyarrow

    return pyarrow.concat_tables(tables).sort_by("row")


def row_numbers(table: Any) -> list[int]:
    numbers: list[int] = table["row"].to_numpy().tolist()
    return numbers


def join_lines(lines: Any) -> memoryview:
    """Return a column of lines as bytes: they follow each other in memory."""
    parts = [
        memoryview(data)[starts[0] : starts[-1]]
        for starts, data in map(value_buffers, lines.chunks)
    ]
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def is_result(name: str) -> bool:
    return name not in INTERNAL_COLUMNS and not name.startswith(KEPT)


def vector_field(name: str, table: Any) -> Any:
    """Return the field for vectors of the length of a table's first one."""
    import pyarrow

    size = len(table[name][0].as_buffer()) // FLOAT
    return pyarrow.field(name, pyarrow.list_(pyarrow.float32(), size), metadata={KIND: b"vector"})


def infer_field(name: str, tables: Sequence[Any]) -> Any:
    """Return the field for a class's column: an Arrow type for plain values and lists of them, else
    JSON.
    """
    import pyarrow

    types = {table[name].type for table in tables if name in table.column_names}
    types -= {pyarrow.null()}
    type_ = types.pop() if len(types) == 1 else pyarrow.null()
    if types or type_ == pyarrow.large_binary():
        type_ = infer_type([value for table in tables for value in python_values(name, table)])
    if type_ is None or pyarrow.types.is_null(type_):
        kind = b"json" if type_ is None else b"any"
        return pyarrow.field(name, pyarrow.string(), metadata={KIND: kind})
    return pyarrow.field(name, type_)


def python_values(name: str, table: Any) -> list[Any]:
    """Return a class's column as it was returned."""
    import pyarrow

    if name not in table.column_names:
        return [None] * table.num_rows
    values: list[Any] = table[name].to_pylist()
    if table[name].type == pyarrow.large_binary():
        return [pickle.loads(value) for value in values]  # noqa: S301 - by our own replica
    return values


def cast_column(field: Any, table: Any) -> Any:
    """Return a table's column as an Arrow array of the field; raises ValueError if it does not
    fit.
    """
    import pyarrow

    kind = (field.metadata or {}).get(KIND, b"").decode()
    name = KEPT + field.name if kind == "kept" else field.name
    if name not in table.column_names:
        return pyarrow.nulls(table.num_rows, field.type)
    column = table[name]
    if kind == "vector":
        return vector_array(field.type, column)
    if pyarrow.types.is_null(column.type):
        return column.cast(field.type)
    change = CONVERTERS.get(kind)
    if change is None and column.type == field.type:
        return column
    values = python_values(name, table)
    if change is not None:
        values = [None if value is None else change(value) for value in values]
    return to_array(field.name, values, field.type)


def vector_array(kind: Any, vectors: Any) -> Any:
    """Return vectors, as bytes of float32, as an Arrow array without copies; raises ValueError for
    unequal lengths.
    """
    import pyarrow

    arrays = []
    for starts, data in map(value_buffers, vectors.chunks):
        lengths = np.diff(starts) // FLOAT
        if (wrong := lengths[lengths != kind.list_size]).size:
            raise ValueError(f"a vector of {wrong[0]} numbers, not of {kind.list_size}")
        count, offset = len(lengths) * kind.list_size, starts[0] // FLOAT
        numbers = pyarrow.Array.from_buffers(kind.value_type, count, [None, data], offset=offset)
        arrays.append(pyarrow.FixedSizeListArray.from_arrays(numbers, kind.list_size))
    return pyarrow.chunked_array(arrays, kind)


CONVERTERS: dict[str, Callable[[Any], Any]] = {"json": columns.to_json, "any": columns.as_any}


def unpack_row(table: Any) -> Row:
    """Return the only row of a table as a result row."""
    values = {name: python_values(name, table)[0] for name in table.column_names}
    keep = {
        name.removeprefix(KEPT): value for name, value in values.items() if name.startswith(KEPT)
    }
    row = {name: value for name, value in values.items() if is_result(name)}
    return {**row, "_row": values["row"], "_keep": pickle.dumps(keep)}
