"""A model's files are in the page cache before vLLM asks for them: which, and when not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.payload.agent import read_ahead
from launcher.payload.agent.read_ahead import ReadAhead, files, folder, split, stages_of

ALL = (0, 1, 1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot in a Hugging Face cache, with four layers in three files."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    repository = tmp_path / "hub" / "models--org--m"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc\n")
    for name in ("a", "b", "c"):
        (snapshot / f"{name}.safetensors").write_bytes(b"x" * 100)
    places = {
        "model.embed_tokens.weight": "a.safetensors",
        "model.layers.0.mlp.weight": "a.safetensors",
        "model.layers.1.mlp.weight": "b.safetensors",
        "model.layers.2.mlp.weight": "c.safetensors",
        "model.layers.3.mlp.weight": "c.safetensors",
    }
    index = {"weight_map": places}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    return snapshot


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of which the kernel was told that they will be needed."""
    told: list[str] = []

    def advise(file: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        told.append(Path(f"/proc/self/fd/{file}").readlink().name)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return told


def names(paths: list[str]) -> list[str]:
    return [Path(path).name for path in paths]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (ALL, ["a", "b", "c"]),
        ((0, 1, 2), ["a", "b"]),
        ((1, 2, 2), ["a", "c"]),
        ((0, 2, 4), ["a", "b"]),
    ],
)
def test_a_node_reads_what_its_stages_load(
    cache: Path, stages: tuple[int, int, int], expected: list[str]
) -> None:
    """And what belongs to no layer, which any stage may load."""
    assert names(files(str(cache), stages)) == [f"{each}.safetensors" for each in expected]


def test_without_an_index_all_is_read(cache: Path) -> None:
    """Also where it is none."""
    (cache / "model.safetensors.index.json").write_text("[]")

    assert names(files(str(cache), (1, 2, 2))) == [f"{each}.safetensors" for each in "abc"]


def test_where_a_model_is(cache: Path, tmp_path: Path) -> None:
    """A path is itself; what is not on this node is nowhere."""
    assert folder("org/m") == str(cache)
    assert folder(str(tmp_path)) == str(tmp_path)
    assert (folder("org/other"), files(folder("org/other"), ALL)) == ("", [])


def test_it_reads_every_file_once(
    cache: Path, read: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """And says so."""
    assert ReadAhead("chat", "org/m", (0, 1, 2)).join(10)

    assert read == ["a.safetensors", "b.safetensors"]
    assert "chat: reading 0.0 GiB of org/m ahead" in capsys.readouterr().out


def test_what_does_not_fit_is_left_alone(
    cache: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the free memory is vLLM's, and the host's."""
    monkeypatch.setattr(read_ahead, "_available", lambda: 599)
    assert ReadAhead("chat", "org/m", ALL).join(10)
    assert read == []

    monkeypatch.setattr(read_ahead, "_available", lambda: 600)
    assert ReadAhead("chat", "org/m", ALL).join(10)
    assert len(read) == 3


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (7, 3, [2, 3, 2]), (11, 4, [3, 3, 3, 2]), (2, 1, [2])],
)
def test_layers_are_split_as_vllm_does(layers: int, stages: int, expected: list[int]) -> None:
    """What is left over goes to the last stages but one."""
    assert split(layers, stages) == expected


@pytest.mark.parametrize(
    ("ranks", "stage", "count", "expected"),
    [
        ([("a", 8), ("b", 8)], 8, 2, {"a": (0, 1, 2), "b": (1, 2, 2)}),
        ([("a", 1), ("b", 1)], 2, 1, {"a": (0, 1, 1), "b": (0, 1, 1)}),
        ([("a", 3), ("b", 1)], 1, 4, {"a": (0, 3, 4), "b": (3, 4, 4)}),
        # replicas, inside nodes and over several
        ([("a", 4), ("b", 4)], 2, 2, {"a": (0, 2, 2), "b": (0, 2, 2)}),
        (
            [("a", 1), ("b", 1), ("c", 1), ("d", 1)],
            1,
            2,
            {"a": (0, 1, 2), "b": (1, 2, 2), "c": (0, 1, 2), "d": (1, 2, 2)},
        ),
    ],
)
def test_the_stages_of_nodes(
    ranks: list[tuple[str, int]],
    stage: int,
    count: int,
    expected: dict[str, tuple[int, int, int]],
) -> None:
    """Ranks follow each other over the nodes."""
    assert stages_of(ranks, stage, count) == expected


@given(st.lists(st.integers(1, 16), min_size=1, max_size=8), st.integers(1, 8), st.integers(1, 8))
def test_stages_are_always_some_of_those_there_are(held: list[int], stage: int, count: int) -> None:
    """Whatever a record says."""
    ranks = [(str(at), each) for at, each in enumerate(held)]

    for first, end, of in stages_of(ranks, stage, count).values():
        assert 0 <= first < end <= of == count
