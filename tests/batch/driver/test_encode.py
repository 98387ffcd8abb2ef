"""Rows as written lines and columns."""

from __future__ import annotations

import array
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from launcher.batch.driver import encode, results
from launcher.batch.driver.manifest import Manifest
from launcher.batch.driver.storage import open_location
from tests.batch.driver.jobs import failed, job


def test_long_reasons_are_cut(tmp_path: Path) -> None:
    """An error of vLLM or of a class may contain the whole prompt."""
    line = results.error_line(job(tmp_path), {**failed(3), "_error": "x" * 100_000})
    assert json.loads(line)["reason"] == "x" * 2000


def test_an_id_too_deep_for_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is an error row all the same, with its reason."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    spec = job(tmp_path, read={"id": "n"})
    monkeypatch.setattr(results, "unpack_keep", lambda row: {"n": deep})
    line = results.error_line(spec, failed(3))
    assert json.loads(line)["row"] == 3
    assert json.loads(line)["n"] == "(nested too deep to be shown)"


def embedded(number: int, *vector: float) -> dict[str, Any]:
    """Return a row with its vector, as from a replica."""
    columns = {"embedding": array.array("f", vector).tobytes(), "prompt_tokens": 3}
    return {"_row": number, "_error": "", "_stage": "", "_raw": "", "_keep": b"", **columns}


class RowEncoder(encode.Encoder):
    """An encoder of rows, which it converts as replicas do."""

    def encode_rows(self, *rows: dict[str, Any]) -> encode.Encoded:
        tables = [part.table for part in results.Converter(self.job, self.types).convert(rows)]
        self.prepare(tables)
        return self.encode("rows", tables)


def encoder(folder: Path, form: str) -> RowEncoder:
    spec = job(folder, task="embed", write={"format": form})
    (folder / "out" / "ledger").mkdir(parents=True, exist_ok=True)
    manifest = Manifest(files=(), splits=(), rows=9, digest="d1")
    return RowEncoder(spec, manifest, open_location(spec.write.path))


def test_vectors_are_lists_of_a_fixed_length_in_parquet(tmp_path: Path) -> None:
    """Float32 of the first vector's length, also in later runs; other lengths are rejected."""
    encoded = encoder(tmp_path, "parquet").encode_rows(embedded(1, 0.5, -2), embedded(0, 1, 2))
    again = encoder(tmp_path, "parquet").encode_rows(embedded(2, 1, 2, 3), embedded(3, 7, 8))
    table = pyarrow.parquet.read_table(io.BytesIO(encoded.data))

    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float32(), 2)
    assert table.to_pylist() == [
        {"row": 0, "embedding": [1.0, 2.0], "prompt_tokens": 3},
        {"row": 1, "embedding": [0.5, -2.0], "prompt_tokens": 3},
    ]
    assert pyarrow.parquet.read_table(io.BytesIO(again.data)).schema == table.schema
    (row,) = again.misfits
    assert (row["_row"], row["_stage"], again.numbers) == (2, "write", [3])
    assert "a vector of 3 numbers, not of 2" in row["_error"]


def test_vectors_are_lists_in_json(tmp_path: Path) -> None:
    """Not bytes."""
    encoded = encoder(tmp_path, "jsonl").encode_rows(embedded(1, 0.5, -2))

    assert json.loads(bytes(encoded.data)) == {
        "row": 1,
        "embedding": [0.5, -2.0],
        "prompt_tokens": 3,
    }
