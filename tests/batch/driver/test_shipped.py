"""Users' code as it was shipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher.batch.driver import shipped


def test_shipped_files_win_over_installed_modules_of_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class comes from the file that was shipped, with the modules beside it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = tmp_path / "code"
    code.mkdir()
    (code / "colorsys.py").write_text("from shades import SHADE\nclass Mine:\n    shade = SHADE\n")
    (code / "shades.py").write_text("SHADE = 'teal'\n")
    packed = shipped.pack(str(tmp_path))
    assert sorted(packed) == ["colorsys.py", "shades.py"]
    import colorsys  # the installed one is loaded already

    assert not hasattr(colorsys, "Mine")
    monkeypatch.delitem(sys.modules, "shades", raising=False)
    monkeypatch.setitem(sys.modules, "colorsys", colorsys)
    assert shipped.load(packed, "colorsys:Mine").shade == "teal"


def test_a_name_that_the_file_lacks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In words that the failure's hint fits to."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ImportError, match="my_model has no `Nope`"):
        shipped.load({"my_model.py": b"class Mine: pass\n"}, "my_model:Nope")
