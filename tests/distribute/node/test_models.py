"""A node's models: listing and removal by its program."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.distribute.node import place
from launcher.distribute.node.models import scan_models

COMMIT = "1" * 40


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A cache with one model of two shards."""
    root = tmp_path / "hub" / "models--org--m"
    snapshot = root / "snapshots" / COMMIT
    (root / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    files = {
        "config.json": b"{}",
        "m-1.safetensors": b"1" * 100,
        "m-2.safetensors": b"2" * 200,
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
    for name, data in files.items():
        blob = hashlib.sha256(data).hexdigest()
        (root / "blobs" / blob).write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return tmp_path / "hub"


def scan_model(hub: Path, **fields: Any) -> dict[str, Any]:
    result = scan_models({"hub": str(hub), "name": "org/m", "room": str(hub), **fields})
    return result["models"][0]  # type: ignore[no-any-return]


def test_a_model_of_the_cache(hub: Path) -> None:
    """Its revision and files; a link is its blob, named by digest."""
    model = scan_model(hub, files=True)
    (revision,) = model["revisions"]

    assert (model["name"], model["refs"]) == ("org/m", {"main": COMMIT})
    assert (revision["revision"], revision["count"], revision["why"]) == (COMMIT, 4, "")
    blob = hashlib.sha256(b"1" * 100).hexdigest()
    assert [row[:2] + row[3:] for row in revision["files"] if row[1] == 100] == [
        [f"blobs/{blob}", 100, blob]
    ]
    assert [f"snapshots/{COMMIT}/m-1.safetensors", f"blobs/{blob}"] in revision["links"]


@pytest.mark.parametrize(
    ("gone", "why"),
    [
        (["m-2.safetensors"], "m-2.safetensors missing"),
        (["m-1.safetensors", "m-2.safetensors"], "m-1.safetensors and 1 more files missing"),
        (["config.json"], "config.json missing"),
        (["m-1.safetensors", "m-2.safetensors", "model.safetensors.index.json"], "no weights"),
    ],
)
def test_the_reason_names_missing_files(hub: Path, gone: list[str], why: str) -> None:
    """By the index, or by the files of all models."""
    for name in gone:
        (hub / "models--org--m" / "snapshots" / COMMIT / name).unlink()

    assert scan_model(hub)["revisions"][0]["why"] == why


def test_a_link_without_content(hub: Path) -> None:
    """Its blob is missing."""
    (hub / "models--org--m" / "snapshots" / COMMIT / "m-2.safetensors").resolve().unlink()

    assert scan_model(hub)["revisions"][0]["why"] == "m-2.safetensors has no content"


def test_a_link_outside_the_blobs_is_a_file(hub: Path, tmp_path: Path) -> None:
    """With its own name, and without a digest."""
    (tmp_path / "notes.txt").write_bytes(b"notes")
    link = hub / "models--org--m" / "snapshots" / COMMIT / "notes.txt"
    link.symlink_to(tmp_path / "notes.txt")
    (revision,) = scan_model(hub, files=True)["revisions"]

    name = f"snapshots/{COMMIT}/notes.txt"
    assert [[row[0], row[1], row[3]] for row in revision["files"] if row[0] == name] == [
        [name, 5, ""]
    ]
    assert name not in [source for source, _ in revision["links"]]


def test_downloads_that_run_or_were_interrupted(hub: Path) -> None:
    """They are counted, and are no blobs."""
    (hub / "models--org--m" / "blobs" / f"{'c' * 64}.incomplete").write_bytes(bytes(50))

    model = scan_model(hub)
    assert (model["downloading"], model["left_over"]) == (1, 50)


def test_folders_beside_the_cache(tmp_path: Path, hub: Path) -> None:
    """Only models, and unfinished copies."""
    for name, file in (
        ("mine", "config.json"),
        ("begun", ".vlaunch/journal"),
        ("data", "rows.csv"),
    ):
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).write_text("{}")
    result = scan_models(
        {"hub": str(hub), "beside": str(tmp_path), "room": str(tmp_path / "none" / "x")}
    )

    names = [model["name"] for model in result["models"]]
    assert names == ["org/m", str(tmp_path / "begun"), str(tmp_path / "mine")]
    assert result["free"] > 0
    assert [model["copied"] for model in result["models"]] == [False, True, False]


def test_a_missing_folder(tmp_path: Path) -> None:
    """And a missing cache."""
    assert (
        scan_models({"path": str(tmp_path / "x"), "hub": str(tmp_path / "y"), "room": "/"})[
            "models"
        ]
        == []
    )


def test_removal(hub: Path) -> None:
    """Completely; the freed bytes are returned."""
    assert place.remove_model(str(hub / "models--org--m")) > 0
    assert list(hub.iterdir()) == []
