"""Rows as the lines and columns that are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.payload.batch import encode
from tests.payload.batch.jobs import failed, job


def test_a_reason_without_end_is_cut(tmp_path: Path) -> None:
    """What vLLM or a class says of a row may hold all of its prompt."""
    (line,) = encode.error_lines(
        job(tmp_path), [{**failed(3), "_error": "x" * 100_000}]
    ).splitlines()
    assert json.loads(line)["reason"] == "x" * 2000


def test_an_id_nested_too_deep_for_json_costs_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is an error row all the same, with its reason."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    asked = job(tmp_path, read={"id": "n"})
    monkeypatch.setattr(encode, "kept", lambda row: {"n": deep})
    (line,) = encode.error_lines(asked, [failed(3)]).splitlines()
    assert json.loads(line)["row"] == 3
    assert json.loads(line)["n"] == "(nested too deep to be shown)"
