"""Result rows as tables: what replicas and ranks send to the driver."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from launcher.batch.driver import results
from tests.batch.driver.jobs import answered, failed, job


def sent(spec: Any, *rows: dict[str, Any], **types: str) -> list[results.Part]:
    """Return rows as the driver receives them."""
    converter = pickle.loads(pickle.dumps(results.Converter(spec, types)))
    return results.unpack(results.pack(converter.convert(rows, ["a note"])))


def test_a_block_carries_answers_and_errors(tmp_path: Path) -> None:
    """Lines of JSON, with the counts of tokens for the progress; every block has one schema."""
    rows = [answered(1, answer="é", _cached=2), failed(3, "bad"), answered(2, answer="", _cached=0)]
    good, bad = sent(job(tmp_path), *rows)

    assert (good.kind, bad.kind) == ("rows", "errors")
    assert list(good.warnings) == ["a note"]
    assert good.table["row"].to_pylist() == [1, 2]
    assert [json.loads(line)["answer"] for line in good.table["_line"].to_pylist()] == ["é", ""]
    assert [good.table[name].to_pylist() for name in results.TOKEN_COLUMNS] == [
        [3, 3],
        [2, 2],
        [2, 0],
    ]
    assert json.loads(bad.table["_line"][0].as_py())["reason"] == "bad"
    assert results.count_rows([good, bad]) == 3
    assert results.pack([good]).schema == results.pack([bad]).schema
    assert results.unpack(results.pack([])) == []


def test_a_column_that_cannot_be_kept_is_reported(tmp_path: Path) -> None:
    """Once, with the answers."""
    spec = job(tmp_path, keep=None, write={"format": "parquet"})
    keep = pickle.dumps({"n": 1, "later": 2})
    (part,) = sent(spec, answered(1, _keep=keep), answered(2, _keep=keep), n="integer")

    assert part.table["_keep.n"].to_pylist() == [1, 1]
    assert [text[:25] for text in part.warnings] == ["a note", "column later is not kept:"]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_replaced_column_is_reported(tmp_path: Path, form: str) -> None:
    """A class may return any column; so may rows after the first have one."""
    spec = job(tmp_path, keep=None, mode="predict", write={"format": form})
    keep = pickle.dumps({"row": "r7", "label": "gold", "text": "x"})
    row = {**failed(1, "", _keep=keep), "label": "cat"}
    (part,) = sent(spec, row, text="text", label="text")

    assert [text.partition(":")[0] for text in part.warnings] == [
        "a note",
        "input column `label` is not in the answers",
        "input column `row` is not in the answers",
    ]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_an_answer_that_cannot_be_written_is_an_error_row(tmp_path: Path, form: str) -> None:
    """Alone, with its reason and its values."""
    rows = [answered(1), answered(2, answer="\ud800"), answered(3)]
    good, bad = sent(job(tmp_path, write={"format": form}), *rows)
    (line,) = map(json.loads, bad.table["_line"].to_pylist())

    assert good.table["row"].to_pylist() == [1, 3]
    assert (line["row"], line["stage"]) == (2, "write")
    assert "surrogate" in line["reason"]
    assert "ud800" in line["input"]


def test_a_converter_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """Every replica has one."""
    files = [f"file-{number}.jsonl" for number in range(10_000)]

    assert len(pickle.dumps(results.Converter(job(tmp_path, *files), {}))) < 5_000
