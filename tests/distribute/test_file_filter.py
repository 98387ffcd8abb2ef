"""Selection of a model's files, and of the nodes that have them."""

from __future__ import annotations

import pytest

from launcher.core.errors import RequestError
from launcher.distribute.chain import Resolved
from launcher.distribute.file_filter import (
    FileFilter,
    missing_bytes,
    nodes_with_files,
    select_files,
)
from tests.distribute.test_model_plan import hub, node_models, revision

NAME, COMMIT = "org/model", "1" * 40
SAFE, BIN, GIT = "a" * 64, "b" * 64, "c" * 40
FILES = (
    ("config.json", 100, GIT),
    ("model.safetensors", 5000, SAFE),
    ("pytorch_model.bin", 5000, BIN),
    ("original/consolidated.00.pth", 5000, BIN),
    ("tokenizer/vocab.txt", 7, GIT),
)


def resolved(*files: tuple[str, int, str]) -> Resolved:
    return Resolved(revision=COMMIT, files=files or FILES)


def names(file_filter: FileFilter, *files: tuple[str, int, str]) -> list[str]:
    return [row[0] for row in select_files(NAME, resolved(*files), file_filter)]


def test_only_safetensors_weights_by_default() -> None:
    """With all other kinds of files."""
    assert names(FileFilter()) == ["config.json", "model.safetensors", "tokenizer/vocab.txt"]


def test_other_files_on_request() -> None:
    """All, or by name; exclusions win."""
    assert len(names(FileFilter(every=True))) == 5
    assert names(FileFilter(include=("*.json", "*.bin"))) == ["config.json", "pytorch_model.bin"]
    assert names(FileFilter(exclude=("tokenizer/*",))) == ["config.json", "model.safetensors"]
    assert names(FileFilter(include=("*.json",), exclude=("t*",))) == ["config.json"]


def test_a_model_without_safetensors() -> None:
    """Its files may run code, so the user must request them."""
    only = (FILES[0], FILES[2])
    with pytest.raises(RequestError, match="no weights in safetensors") as caught:
        names(FileFilter(), *only)
    assert "--all-files" in caught.value.hint

    assert names(FileFilter(every=True), *only) == ["config.json", "pytorch_model.bin"]
    assert names(FileFilter(), FILES[0]) == ["config.json"]  # it has no file at all


def test_an_empty_selection() -> None:
    """The request is rejected."""
    with pytest.raises(RequestError, match="the filters exclude every file of org/model"):
        names(FileFilter(include=("*.gguf",)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("../x.safetensors", 1, SAFE), "invalid file name"),
        (("x.safetensors", 1, "nothing"), "no valid size and digest"),
        (("x.safetensors", -1, SAFE), "no valid size and digest"),
    ],
)
def test_invalid_answers_of_a_hub(row: tuple[str, int, str], message: str) -> None:
    """Names outside the folder, and files without a digest."""
    with pytest.raises(RequestError, match=message):
        names(FileFilter(), row)


def test_nodes_with_the_complete_model() -> None:
    """With the hub's sizes, in this revision, and without an unfinished copy."""
    config = ("config.json", 100, GIT)
    rows = select_files(NAME, resolved(config, FILES[1]), FileFilter())
    blobs = tuple((f"blobs/{digest}", size, 0, digest) for _, size, digest in rows)
    complete = revision(files=blobs)
    nodes = {
        "complete": node_models(hub(complete)),
        "other": node_models(hub(revision("2" * 40, files=blobs))),
        "part": node_models(hub(revision(files=blobs[:1]))),
        "copying": node_models(hub(complete, unfinished=5)),
        "empty": node_models(),
    }

    assert nodes_with_files(NAME, resolved(), rows, nodes) == ["complete"]


def test_missing_files_of_a_node() -> None:
    """Equal files count once; files of another revision exist."""
    rows = select_files(NAME, resolved(), FileFilter())
    stored = revision("2" * 40, files=((f"blobs/{SAFE}", 5000, 0, SAFE),), links=())

    assert missing_bytes(rows, node_models()) == 5000 + 100 + 7
    assert missing_bytes(rows, node_models(hub(stored))) == 100 + 7
