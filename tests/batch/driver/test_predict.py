"""Stages of users' code: rows in, rows out, with all fields for the sink. Ray Data itself runs in
the lab.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.batch.driver import predict


def row(number: int, error: str = "", stage: str = "") -> dict[str, Any]:
    data = b"" if error else pickle.dumps({"n": number})
    return {
        "_row": number,
        "_error": error,
        "_stage": stage,
        "_raw": "raw" if error else "",
        "_keep": b"kept",
        "_data": data,
    }


def test_an_answered_row_has_no_input() -> None:
    """`_raw` is only for error rows; copied columns stay."""
    result = predict.with_answer(row(3), {"score": 0.5})
    assert result == {
        "_row": 3,
        "_error": "",
        "_stage": "",
        "_raw": "",
        "_keep": b"kept",
        "score": 0.5,
    }


def test_a_failed_row_names_its_stage() -> None:
    """This one, or an earlier one with its reason."""
    assert predict.with_answer(row(3), "ValueError: no")["_stage"] == "inference"
    assert predict.with_answer(row(3, "not JSON", "read"), "not JSON")["_stage"] == "read"
    assert predict.with_columns(row(3), "ValueError: no")["_stage"] == "preprocess"


def test_a_failed_row_shows_its_input() -> None:
    """As read, even if an earlier function has changed its columns."""
    assert predict.with_answer(row(3), "ValueError: no")["_raw"] == '{"n": 3}'
    assert (
        predict.with_answer(predict.with_columns(row(3), {"m": 4}), "ValueError: no")["_raw"]
        == '{"n": 3}'
    )
    assert predict.with_answer(row(3, "not JSON", "read"), "not JSON")["_raw"] == "raw"


def test_a_user_column_cannot_replace_a_row_number() -> None:
    """For any result of a class, the row keeps its number and its error."""
    result = predict.with_answer(row(3), {"_row": 99, "_error": "mine", "x": 1})
    assert (result["_row"], result["_error"], result["x"]) == (3, "", 1)


def test_prepared_rows_have_the_functions_columns() -> None:
    """Instead of the row's own."""
    assert pickle.loads(predict.with_columns(row(3), {"n": 4, "m": 5})["_data"]) == {"n": 4, "m": 5}


def test_rows_that_failed_before_never_reach_the_code() -> None:
    """Their reason is unchanged."""

    def code(_: Any) -> Any:
        raise AssertionError("called without rows")

    assert predict.answer_rows([row(0, "not JSON", "read")], code, []) == ["not JSON"]


def test_shipped_files_win_over_installed_modules_of_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class comes from the shipped file, with the modules beside it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = tmp_path / "code"
    code.mkdir()
    (code / "colorsys.py").write_text("from shades import SHADE\nclass Mine:\n    shade = SHADE\n")
    (code / "shades.py").write_text("SHADE = 'teal'\n")
    packed = predict.pack_code(str(tmp_path))
    assert sorted(packed) == ["colorsys.py", "shades.py"]
    import colorsys  # the installed one is loaded already

    assert not hasattr(colorsys, "Mine")
    monkeypatch.delitem(sys.modules, "shades", raising=False)
    monkeypatch.setitem(sys.modules, "colorsys", colorsys)
    assert predict.load_target(packed, "colorsys:Mine").shade == "teal"


def test_a_missing_name_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a form that the failure's hint recognizes."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ImportError, match="my_model has no `Nope`"):
        predict.load_target({"my_model.py": b"class Mine: pass\n"}, "my_model:Nope")
