"""Which files of a model are downloaded, and what is made of them."""

from __future__ import annotations

import pytest

from launcher.errors import RequestError
from launcher.plan.fetching import Wish, check_room, choose, plan_fetch
from launcher.tools.chain import Resolved, Seen
from tests.plan.test_copying import hub, revision, seen

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


def names(wish: Wish, *files: tuple[str, int, str]) -> list[str]:
    return [row[0] for row in choose(NAME, resolved(*files), wish)]


def test_weights_come_in_safetensors_alone() -> None:
    """With all that is no weights."""
    assert names(Wish()) == ["config.json", "model.safetensors", "tokenizer/vocab.txt"]


def test_others_come_when_they_are_asked_for() -> None:
    """All, or by their names; what is left out wins."""
    assert len(names(Wish(every=True))) == 5
    assert names(Wish(include=("*.json", "*.bin"))) == ["config.json", "pytorch_model.bin"]
    assert names(Wish(exclude=("tokenizer/*",))) == ["config.json", "model.safetensors"]
    assert names(Wish(include=("*.json",), exclude=("t*",))) == ["config.json"]


def test_a_model_without_safetensors_is_not_guessed_about() -> None:
    """Its files may run code; who trusts them says so."""
    only = (FILES[0], FILES[2])
    with pytest.raises(RequestError, match="no weights in safetensors") as caught:
        names(Wish(), *only)
    assert "--all-files" in caught.value.hint

    assert names(Wish(every=True), *only) == ["config.json", "pytorch_model.bin"]
    assert names(Wish(), FILES[0]) == ["config.json"]  # it has none at all


def test_nothing_is_left() -> None:
    """Which is told."""
    with pytest.raises(RequestError, match="no file of org/model is left"):
        names(Wish(include=("*.gguf",)))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (("../x.safetensors", 1, SAFE), "bad name"),
        (("x.safetensors", 1, "nothing"), "does not say what"),
        (("x.safetensors", -1, SAFE), "does not say what"),
    ],
)
def test_a_hub_that_lies_is_not_believed(row: tuple[str, int, str], said: str) -> None:
    """Names that lead out, and files without a digest."""
    with pytest.raises(RequestError, match=said):
        names(Wish(), row)


def test_the_copy_is_of_blobs() -> None:
    """Each content once; links and the name of the revision are made of it."""
    rows = choose(NAME, resolved(), Wish())
    copying = plan_fetch(NAME, resolved(), rows, source="b", targets=["a", "b", "c"])

    assert [(each.name, each.size) for each in copying.manifest.files] == [
        (f"blobs/{GIT}", 7),
        (f"blobs/{SAFE}", 5000),
    ]
    assert (f"snapshots/{COMMIT}/tokenizer/vocab.txt", f"blobs/{GIT}") in copying.links
    assert (copying.source, copying.targets) == ("b", ("c", "a"))
    assert copying.refs == (("refs/main", COMMIT),)
    named = plan_fetch(NAME, resolved(), rows, source="b", targets=["b"], revision="v2")
    assert (named.refs, named.targets) == ((("refs/v2", COMMIT),), ())


def test_room() -> None:
    """What is there of it already needs none."""
    rows = choose(NAME, resolved(), Wish())
    copying = plan_fetch(NAME, resolved(), rows, source="a", targets=["a"])
    with pytest.raises(RequestError, match="a has too little room"):
        check_room(NAME, Seen(models=(), free=5000, python=(3, 11)), "a", copying)
    there = revision(files=((f"blobs/{SAFE}", 5000, 0, SAFE),), links=())

    check_room(NAME, seen(hub(there), free=100), "a", copying)
