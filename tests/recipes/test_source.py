"""Recipes from where they lie."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from launcher.errors import RequestError
from launcher.recipes import source
from tests.recipes import acme

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]


def checkout(path: Path) -> str:
    """Make a git checkout of our recipes; returns its commit."""
    shutil.copytree(acme.FOLDER, path)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*GIT, "-C", str(path), *words], check=True)
    return subprocess.run(
        ["git", "-C", str(path), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


def packed(commit: str, path: Path, *words: str) -> Path:
    """Pack a checkout as `git archive` does."""
    subprocess.run(
        ["git", "-C", str(path), "archive", *words, commit], check=True, capture_output=True
    )
    return Path(words[words.index("-o") + 1])


def test_a_folder_a_checkout_and_archives_are_the_same(tmp_path: Path) -> None:
    """Their recipes have one digest; a checkout and what git packs know their commit."""
    own = tmp_path / "checkout"
    commit = checkout(own)
    archives = [
        packed(commit, own, "-o", str(tmp_path / "a.tar")),
        packed(commit, own, "-o", str(tmp_path / "b.tar.gz"), "--prefix=recipes-main/"),
        packed(commit, own, "-o", str(tmp_path / "c.zip"), "--prefix=recipes-main/"),
    ]
    folder = acme.library()

    for path in (own, *archives):
        found = source.library(source.local(path), str(path))
        assert (found.origin.commit, found.origin.digest) == (commit, folder.origin.digest)
    assert folder.origin.commit == ""
    assert list(folder.paths) == [
        "acme/Dense-8B",
        "acme/Experts-600B",
        "acme/Own-Image-27B",
        "acme/Sound",
    ]


def test_other_forms_of_a_checkout(tmp_path: Path) -> None:
    """Its commit is found where references are packed, where none is followed, and in another work
    tree.
    """
    own, other = tmp_path / "checkout", tmp_path / "other"
    commit = checkout(own)
    subprocess.run([*GIT, "-C", str(own), "pack-refs", "--all"], check=True)
    assert source.local(own).commit == commit

    words = ["worktree", "add", "-q", "-b", "side", str(other)]
    subprocess.run([*GIT, "-C", str(own), *words], check=True)
    assert source.local(other).commit == commit

    subprocess.run([*GIT, "-C", str(own), "checkout", "-q", commit], check=True)
    assert source.local(own).commit == commit

    (own / ".git" / "HEAD").write_bytes(b"\xff")
    assert source.local(own).commit == ""


def site(folder: Path) -> None:
    """Make the static JSON of a site with one recipe, and a page for a variant of it."""
    recipe = {
        "hf_id": "acme/One",
        "meta": {"title": "One", "tasks": ["text"]},
        "model": {"model_id": "acme/One", "base_args": ["--x"]},
        "variants": {"default": {"precision": "bf16", "vram_minimum_gb": 4}},
        "recommended_command": {"strategy": "single_node_tp", "alternatives": {}},
    }
    listed = [
        {"hf_id": "acme/One", "json": "/acme/One.json", "title": "other/words"},
        {"hf_id": "acme/One-FP8", "derived_from": "acme/One"},
        {"hf_id": "../../etc/passwd"},
    ]
    profile = {"brand": "NVIDIA", "generation": "hopper", "gpu_count": 8, "vram_gb": 640}
    strategy = {"name": "single_node_tp", "parallel_flag": "--tensor-parallel-size"}
    (folder / "acme").mkdir(parents=True)
    for name, content in {
        "models.json": listed,
        "taxonomy.json": {"hardware_profiles": {"h100": profile}},
        "strategies.json": {"single_node_tp": strategy},
        "acme/One.json": recipe,
        "acme/One-FP8.json": recipe,
    }.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_a_sites_json(tmp_path: Path) -> None:
    """What lies in a folder as a site has it; pages of variants are their recipes', and no name
    leads elsewhere.
    """
    site(tmp_path / "public")
    found = source.library(source.local(tmp_path / "public"), "x")

    assert sorted(found.files) == [
        "acme/One.json",
        "models.json",
        "strategies.json",
        "taxonomy.json",
    ]
    assert found.recipe("acme/One").value.compatible_strategies == ["single_node_tp"]
    assert list(found.profiles) == ["h100"]
    assert list(found.strategies) == ["single_node_tp"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.tar", b"nonsense", "is no archive that can be read"),
        ("a.zip", b"PK\x03\x04broken", "is no archive that can be read"),
        ("a.tar.gz", b"\x1f\x8b\x08\x00broken", "is no archive that can be read"),
        ("a.txt", b"x", "is neither a folder nor an archive"),
    ],
)
def test_what_is_no_archive(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    """A clear error."""
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(RequestError, match=said):
        source.local(path)


def test_what_has_no_recipes(tmp_path: Path) -> None:
    """An empty folder, and a git directory without files, which can be packed."""
    with pytest.raises(RequestError, match="has no recipes"):
        source.local(tmp_path)
    with pytest.raises(RequestError, match="neither a folder nor an archive"):
        source.local(tmp_path / "none")
    subprocess.run([*GIT, "init", "-q", "--bare", str(tmp_path / "bare")], check=True)
    with pytest.raises(RequestError, match="without its files") as error:
        source.local(tmp_path / "bare")
    assert "git -C" in error.value.hint


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, all of them, their number, and what an archive unpacks to."""
    shutil.copytree(acme.FOLDER, tmp_path / "big")
    (tmp_path / "big" / "models" / "acme" / "Big.yaml").write_text("#" * (1 << 20) + "x")
    with pytest.raises(RequestError, match=r"Big\.yaml is larger than 1 MiB"):
        source.local(tmp_path / "big")
    (tmp_path / "big" / "models" / "acme" / "Big.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match=r"Big\.yaml is not UTF-8"):
        source.local(tmp_path / "big")

    monkeypatch.setattr(source, "MOST", 1000)
    with pytest.raises(RequestError, match="which no recipes need"):
        source.local(acme.FOLDER)
    monkeypatch.undo()
    monkeypatch.setattr(source, "_MOST_FILES", 3)
    with pytest.raises(RequestError, match="3 are the most"):
        source.local(acme.FOLDER)
    monkeypatch.undo()
    monkeypatch.setattr(source, "_MOST_UNPACKED", 100)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.add(acme.FOLDER, "recipes")
    with pytest.raises(RequestError, match="no archive that can be read"):
        source.archive(content.getvalue(), "a.tar")


def test_only_plain_files_are_taken(tmp_path: Path) -> None:
    """A link in an archive leads nowhere."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.add(acme.FOLDER / "taxonomy.yaml", "taxonomy.yaml")
        link = tarfile.TarInfo("models/acme/Link.yaml")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    assert list(source.archive(content.getvalue(), "a.tar").files) == ["taxonomy.yaml"]

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("x/taxonomy.yaml", "a: b")
        archive.writestr("x/../models/a/b.yaml", "a: b")
    assert list(source.archive(packed.getvalue(), "a.zip").files) == ["taxonomy.yaml"]
