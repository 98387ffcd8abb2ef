"""Result rows as the bytes of a file.

All answer files of a job have one schema; a row that does not fit it is told apart.
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
from .job import CACHED, Job
from .manifest import Manifest
from .places import Place

Row = dict[str, Any]
OWN = frozenset(("row", "_row", "_error", "_stage", "_raw", "_keep", "_data", CACHED))
# characters of the reason in an error row: vLLM's or a class's own words may hold a whole prompt
REASON = 2000
FLOATS, FLOAT = "f", 4  # vectors are numbers of 32 bits, of four bytes each
KIND = b"vlaunch.kind"  # in a column's metadata: how its values are brought to its type


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Bytes of a file, the numbers of its rows in order, and the rows that do not fit with the
    reasons.
    """

    data: bytes
    numbers: list[int]
    misfits: list[tuple[Row, str]]


class Encoder:
    """Encodes answers.

    A Parquet schema that follows from the class's own columns, or from the length of a model's
    vectors, is learned from the first file, and kept.
    """

    ending = "jsonl"

    def __init__(self, job: Job, manifest: Manifest, out: Place) -> None:
        self.job, self.types = job, dict(manifest.types)
        self.stored = out.child("ledger").child("schema.json")
        self.schema: Any = None
        self.left_out: set[str] = set()  # kept columns that the first rows did not have
        if job.write.format == "parquet":
            self.ending = "parquet"
            self.schema = self.known()

    def encode(self, rows: list[Row]) -> Encoded:
        """Encode rows in the order of their numbers."""
        rows = sorted(rows, key=lambda row: row["_row"])
        if self.job.write.format == "parquet" and self.schema is None:
            self.schema = self.learned(rows)
        whole = self.parquet if self.job.write.format == "parquet" else self.jsonl
        misfits: list[tuple[Row, str]] = []
        try:
            data = whole(rows)
        except Exception:  # one row spoils them all: find it
            rows, misfits = self.separated(whole, rows)
            data = whole(rows) if rows else b""
        return Encoded(data=data, numbers=[row["_row"] for row in rows], misfits=misfits)

    def separated(
        self, whole: Callable[[list[Row]], bytes], rows: list[Row]
    ) -> tuple[list[Row], list[tuple[Row, str]]]:
        """The rows that can be written, and those that cannot, with the reasons."""
        fitting, misfits = [], []
        for row in rows:
            if why := self.wrong(whole, row):
                misfits.append((row, why))
            else:
                fitting.append(row)
        return fitting, misfits

    def wrong(self, whole: Callable[[list[Row]], bytes], row: Row) -> str:
        """Why a row cannot be written; nothing if it can."""
        try:
            whole([row])
        except Exception as error:  # what a class returned may raise anything
            return str(error).strip().partition("\n")[0][:500] or type(error).__name__
        return ""

    def jsonl(self, rows: list[Row]) -> bytes:
        named = [name for name, type_ in self.job.results.items() if type_ == "vector"]
        return b"".join(
            json_line(
                {"row": 0, **kept(row), **outputs(row), **lists(row, named)} | {"row": row["_row"]}
            )
            for row in rows
        )

    def parquet(self, rows: list[Row]) -> bytes:
        import pyarrow
        import pyarrow.parquet

        keeps = (
            [kept(row) for row in rows] if self.types or self.job.keep is None else [{}] * len(rows)
        )
        names = set(self.schema.names)
        if self.job.mode == "predict":
            refuse_new_columns(rows, names)
        for keep in keeps:
            self.left_out |= keep.keys() - names
        arrays = [array(field, values(field, rows, keeps)) for field in self.schema]
        schema = pyarrow.schema([field.remove_metadata() for field in self.schema])
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(
            pyarrow.Table.from_arrays(arrays, schema=schema), sink, compression="zstd"
        )
        return bytes(sink.getvalue().to_pybytes())

    def known(self) -> Any:
        """The schema, where it follows from the job alone or an earlier run learned it; else
        None.
        """
        import pyarrow

        if self.job.mode == "predict" or "vector" in self.job.results.values():
            if not self.stored.exists():
                return None
            data = base64.b64decode(json.loads(self.stored.read())["schema"])
            return pyarrow.ipc.read_schema(pyarrow.py_buffer(data))
        made = [
            pyarrow.field(name, columns.arrow(type_)) for name, type_ in self.job.results.items()
        ]
        return self.with_kept(made)

    def learned(self, rows: list[Row]) -> Any:
        """The schema that the first rows make; it is stored, for the files to come."""
        import pyarrow

        made = [outputs(row) for row in rows]
        if self.job.mode == "predict":
            names = dict.fromkeys(name for row in made for name in row)
            fields = [inferred(name, [row.get(name) for row in made]) for name in names]
        else:
            fields = [
                vector(name, made[0])
                if type_ == "vector"
                else pyarrow.field(name, columns.arrow(type_))
                for name, type_ in self.job.results.items()
            ]
        schema = self.with_kept(fields)
        data = base64.b64encode(schema.serialize().to_pybytes()).decode()
        self.stored.write_atomic(json.dumps({"schema": data}).encode())
        return schema

    def with_kept(self, made: list[Any]) -> Any:
        """The columns in their order: the number, those that are kept, the results; of two of one
        name the result stays.
        """
        import pyarrow

        own = {"row", *(field.name for field in made)}
        keep = [
            pyarrow.field(name, columns.arrow(type_), metadata={KIND: b"kept"})
            for name, type_ in self.types.items()
            if name not in own
        ]
        made = [field for field in made if field.name != "row"]
        return pyarrow.schema([pyarrow.field("row", pyarrow.int64(), nullable=True), *keep, *made])


def refuse_new_columns(rows: list[Row], names: set[str]) -> None:
    """Raise ValueError if a row has a column of the class's own that is not among these names."""
    for row in rows:
        if extra := row.keys() - names - OWN:
            raise ValueError(f"column {min(extra)} is new: the rows of the first file lack it")


def vector(name: str, row: Row) -> Any:
    """The column of vectors that are as long as this row's."""
    import pyarrow

    size = len(row[name]) // FLOAT
    return pyarrow.field(name, pyarrow.list_(pyarrow.float32(), size), metadata={KIND: b"vector"})


def values(field: Any, rows: list[Row], keeps: list[Row]) -> list[Any]:
    """A column's values, one for each row, in the form in which its type takes them."""
    if field.name == "row":
        return [row["_row"] for row in rows]
    kind = (field.metadata or {}).get(KIND, b"").decode()
    if kind == "kept":
        return [keep.get(field.name) for keep in keeps]
    found = [row.get(field.name) for row in rows]
    change = CHANGES.get(kind)
    if change is None:
        return found
    return [None if value is None else change(value) for value in found]


def array(field: Any, found: list[Any]) -> Any:
    """A column as Arrow's array; raises ValueError if a value is not of its type."""
    import pyarrow

    try:
        if (field.metadata or {}).get(KIND) == b"vector":
            return vectors(field.type, found)
        return pyarrow.array(found, type=field.type)
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"column {field.name} does not hold {field.type} as before: {error}"
        ) from error


def vectors(kind: Any, found: list[Any]) -> Any:
    """Vectors, each the bytes of its numbers, as Arrow's array; raises ValueError if one is longer
    or shorter.
    """
    import pyarrow

    lengths = {len(each) // FLOAT for each in found} - {kind.list_size}
    if lengths:
        raise ValueError(f"a vector of {min(lengths)} numbers, not of {kind.list_size}")
    data = pyarrow.py_buffer(b"".join(found))
    numbers = pyarrow.Array.from_buffers(kind.value_type, len(found) * kind.list_size, [None, data])
    return pyarrow.FixedSizeListArray.from_arrays(numbers, kind.list_size)


def inferred(name: str, values: list[Any]) -> Any:
    """The column that holds these values: Arrow's own type for plain values and lists of them, JSON
    for the rest.
    """
    import pyarrow

    types = pyarrow.types
    try:
        found = pyarrow.array(values).type
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):
        return pyarrow.field(name, pyarrow.string(), metadata={KIND: b"json"})
    inner = found
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner = inner.value_type
    if types.is_null(found):
        return pyarrow.field(name, pyarrow.string(), metadata={KIND: b"any"})
    if types.is_nested(inner) or types.is_null(inner):
        return pyarrow.field(name, pyarrow.string(), metadata={KIND: b"json"})
    return pyarrow.field(name, found)


CHANGES: dict[str, Callable[[Any], Any]] = {"json": columns.to_json, "any": columns.as_any}


def kept(row: Row) -> Row:
    # pickled by this job's own readers
    return pickle.loads(row["_keep"]) if row["_keep"] else {}  # noqa: S301


def outputs(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in OWN}


def lists(row: Row, named: list[str]) -> Row:
    """Return a row's vectors as lists of numbers."""
    return {name: array_of(FLOATS, row[name]).tolist() for name in named}


def json_line(values: Row) -> bytes:
    """One line of JSON; NaN and infinities become null, for which JSON has no words."""
    try:
        said = json.dumps(values, ensure_ascii=False, allow_nan=False, default=columns.plain)
    except ValueError:
        said = columns.to_json(values)
    return said.encode() + b"\n"


def error_lines(job: Job, rows: list[Row]) -> bytes:
    """Error rows as lines of JSON."""
    lines = []
    for row in rows:
        id_ = {job.read.id: kept(row).get(job.read.id)} if job.read.id else {}
        said = {
            "row": row["_row"],
            **id_,
            "reason": row["_error"][:REASON],
            "stage": row.get("_stage") or "inference",
        }
        line = {**said, "input": row.get("_raw") or ""}
        try:
            lines.append(json_line(line))
        # half a surrogate pair, or an id that JSON has no form for
        except (TypeError, ValueError, RecursionError):
            safe = {
                name: None if value is None else readable(value) for name, value in line.items()
            }
            lines.append(json_line({**safe, "row": row["_row"]}))
    return b"".join(lines)


def readable(value: Any) -> str:
    try:
        return str(value).encode("utf-8", "backslashreplace").decode()
    except RecursionError:
        return "(nested too deep to be shown)"
