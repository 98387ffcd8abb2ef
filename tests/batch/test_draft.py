"""A job's own Python code."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.batch import draft
from launcher.batch.job_paths import PathBounds, PathError
from tests.batch.conftest import Mistakes


def _target(folder: Path, written: str) -> tuple[str, dict[str, Path]]:
    return draft.code_target(written, PathBounds(folder=folder, inside=(folder,)))


def test_a_file_is_shipped_and_its_module_is_named(folder: Path) -> None:
    """From any folder, under its own name."""
    (folder / "sub").mkdir()
    (folder / "sub" / "theirs.py").write_text("from x import Theirs\n")

    assert _target(folder, "mine.py:Mine") == ("mine:Mine", {"mine.py": folder / "mine.py"})
    assert _target(folder, "sub/theirs.py:Theirs") == (
        "theirs:Theirs",
        {"theirs.py": folder / "sub" / "theirs.py"},
    )


def test_a_module_is_not_shipped(folder: Path) -> None:
    """It is in the image, or in `files`."""
    assert _target(folder, "package.module:Class") == ("package.module:Class", {})


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("none.py:Mine", "no such file: HERE/none.py"),
        ("mine.py:Mien", '"mine.py" has no `Mien`; did you mean `Mine`?'),
        (
            "my-file.py:Mine",
            'should be a file whose name is a Python name, such as my_model.py, not "my-file.py"',
        ),
        ("json.py:Mine", "should have another file name: `json` is the name of an existing module"),
        (
            "torch.py:Mine",
            "should have another file name: `torch` is the name of an existing module",
        ),
    ],
)
def test_unimportable_targets_are_reported(folder: Path, written: str, expected: str) -> None:
    """Before any transfer."""
    for name in ("my-file.py", "json.py", "torch.py"):
        (folder / name).write_text("class Mine: ...\n")

    with pytest.raises(PathError) as caught:
        _target(folder, written)
    assert str(caught.value).replace(str(folder), "HERE") == expected


@pytest.mark.parametrize(
    "text",
    [
        "class Mine[T]: ...",
        "from x import *",
        "import Mine",
        "Mine = make()",
        "if x:\n    Mine = 1",
        "(((",
        "\0",
        "'\\d'; Mine = 1",
    ],
)
def test_possibly_valid_targets_pass(folder: Path, text: str) -> None:
    """A newer Python accepts more syntax, and names can be created dynamically."""
    (folder / "other.py").write_text(text)

    assert _target(folder, "other.py:Mine")[0] == "other:Mine"


def test_names_of_files_and_folders_stay(folder: Path) -> None:
    """A package stays a package; Python's caches are omitted."""
    for name in (
        "pkg/__init__.py",
        "pkg/a/b.py",
        "pkg/__pycache__/b.pyc",
        "pkg/.git/x",
        "notes.txt",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    within = PathBounds(folder=folder, inside=(folder,))

    assert draft.code_files("notes.txt", within) == {"notes.txt": folder / "notes.txt"}
    assert sorted(draft.code_files("pkg", within)) == ["pkg/__init__.py", "pkg/a/b.py"]
    assert sorted(draft.code_files("pkg/a", within)) == ["a/b.py"]


def test_an_unsafe_name_is_rejected(folder: Path) -> None:
    """Names occur in commands and messages."""
    (folder / "pkg").mkdir()
    (folder / "pkg" / "a\nb.py").write_text("")

    with pytest.raises(PathError, match="should have a plain name there"):
        draft.code_files("pkg", PathBounds(folder=folder))


def test_an_empty_code_folder_is_reported(folder: Path) -> None:
    """It is probably a mistake."""
    (folder / "empty").mkdir()

    with pytest.raises(PathError, match="contains no files"):
        draft.code_files("empty", PathBounds(folder=folder))


def test_two_files_with_the_same_name_are_rejected(mistakes: Mistakes, folder: Path) -> None:
    """One would replace the other."""
    (folder / "sub").mkdir()
    (folder / "sub" / "mine.py").write_text("")

    assert mistakes("predict: {class: 'mine.py:Mine', files: [sub/mine.py]}", model=None) == [
        '3: predict.files[0]: should not ship another file as "mine.py": HERE/mine.py has that name'
        " already"
    ]
    assert (
        mistakes(
            "preprocess: mine.py:ready\npredict: {class: 'mine.py:Mine', files: [mine.py]}",
            model=None,
        )
        == []
    )
    assert mistakes("preprocess: sub/mine.py:ready\npredict: mine.py:Mine", model=None) != []
