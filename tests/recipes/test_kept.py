"""The copy of recipes that this machine keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.errors import RequestError
from launcher.recipes import kept, source
from tests.recipes import acme


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A copy of our recipes."""
    path = tmp_path / "deep" / kept.FILE
    kept.write(path, source.library(source.local(acme.FOLDER), "acme", 1_790_000_000.5))
    return path


def test_what_is_kept_is_what_was_taken(path: Path) -> None:
    """Files, list, source and time; nothing else is left behind."""
    found, own = kept.load(path), acme.library()

    assert (found.files, found.entries) == (own.files, own.entries)
    assert (found.origin.taken, found.origin.digest) == (1_790_000_000.5, own.origin.digest)
    assert [each.name for each in path.parent.iterdir()] == [kept.FILE]


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _other_word(text: str) -> str:
    return text.replace("--max-num-seqs", "--max-num-seq5", 1)


def _other_figure(text: str) -> str:
    return text.replace("131072", "131073", 1)


def _other_list(text: str) -> str:
    return text.replace('"version": "0.11.0"', '"version": "0.11.1"', 1)


def _without_sum(text: str) -> str:
    said = json.loads(text)
    del said["sum"]
    return json.dumps(said)


def _later_form(text: str) -> str:
    return text.replace('"form": 1', '"form": 2', 1)


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        _other_word,
        _other_figure,
        _other_list,
        _without_sum,
        _later_form,
        lambda _: "",
        lambda _: "[]",
    ],
)
def test_damage_is_noticed(path: Path, damage: object) -> None:
    """Of any kind; the way out is named."""
    assert callable(damage)
    path.write_text(damage(path.read_text()))

    with pytest.raises(RequestError, match="damaged") as error:
        kept.load(path)
    assert "vlaunch recipes update" in error.value.hint


def test_nothing_is_kept(tmp_path: Path) -> None:
    """Then it is said how to take them, with internet and without."""
    with pytest.raises(RequestError, match="no recipes are kept") as error:
        kept.load(tmp_path / kept.FILE)
    assert "`--from` a folder or an archive" in error.value.hint
    with pytest.raises(RequestError, match="cannot be read"):
        kept.load(tmp_path)
