"""`make exports`: what a cell of its table means."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import exports


@pytest.mark.processes
def test_a_checker_reads_a_copy_beside_the_file(tmp_path: Path) -> None:
    """It passes what is good and refuses what is broken, and nothing stays."""
    (tmp_path / "a.txt").write_text("good\n")
    checker = exports.Checker(
        name="grep", kind="kubernetes", argv=("grep", "-q", "good"), reads="*.txt", broken=("g", "")
    )

    assert exports.accepts(checker, tmp_path, str)
    assert not exports.accepts(checker, tmp_path, lambda text: text.replace(*checker.broken, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_checker_that_is_not_here_says_what_would_bring_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a short table is not taken for a good one."""
    monkeypatch.setattr(exports, "CRDS", "")
    missing = {checker.name: checker.missing for checker in exports.checkers() if checker.missing}

    assert "VLAUNCH_CRDS" in missing["CRDs"]


@pytest.mark.processes
@pytest.mark.parametrize("kind", exports.KINDS)
def test_what_is_broken_is_in_every_export(kind: str, tmp_path: Path) -> None:
    """A replacement that finds nothing would make no broken copy."""
    named = f"{exports.KUBERNETES}{kind}"
    assert exports.export(named, "cpu", tmp_path) == ""
    text = (tmp_path / "export.yaml").read_text()
    broken = {
        checker.name: checker.broken for checker in exports.checkers() if checker.kind == named
    }

    assert set(broken) == {"CRDs", "kubernetes-validate"}
    assert [name for name, change in broken.items() if text.replace(*change, 1) == text] == []
