"""Images as Docker 20.10, 26 and containerd's store save them, taken apart and put together."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.payload.chain.archive import Image, NotAnImage, full_name, pack, split
from tests.image_tars import LAYERS, NAME, classic, config_of, modern, sha, tar_of


def together(image: Image, here: list[str], folder: Path) -> dict[str, bytes]:
    """The files of the tar that is made of an image."""
    data = b"".join(
        pack(image, [NAME], here, lambda digest: iter([(folder / digest).read_bytes()]))
    )
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]


@pytest.mark.parametrize("save", [classic, modern])
def test_it_is_split_into_blobs(save: Callable[..., bytes], tmp_path: Path) -> None:
    """Each under its digest, and nothing else: an equal layer that stands there twice is one."""
    image = split(io.BytesIO(save()), str(tmp_path))

    assert [each.digest for each in image.layers] == [sha(each) for each in LAYERS]
    assert {each.name for each in tmp_path.iterdir()} == {image.config, *map(sha, LAYERS)}
    assert (tmp_path / sha(LAYERS[1])).read_bytes() == LAYERS[1]
    assert Image.read(json.loads(json.dumps(image.as_json()))) == image


def test_both_forms_are_the_same_image(tmp_path: Path) -> None:
    """Also their manifests, so that nodes name it alike."""
    assert split(io.BytesIO(classic())) == split(io.BytesIO(modern(manifest=False)))


def test_a_manifest_stays_as_it_was_published() -> None:
    """Its digest is the image's name in containerd's store."""
    image = split(io.BytesIO(modern(packed=True)))

    assert json.loads(image.manifest)["annotations"] == {"of": "the publisher"}
    assert [each.diff for each in image.layers] == [sha(each) for each in LAYERS]
    assert image.layers[0].digest == sha(gzip.compress(LAYERS[0], mtime=0))


def test_docker_gets_what_it_lacks(tmp_path: Path) -> None:
    """Lists of all layers for both kinds of stores, and the bytes of those that are wanted."""
    image = split(io.BytesIO(classic()), str(tmp_path))
    files = together(image, [image.config, sha(LAYERS[1])], tmp_path)

    (listed,) = json.loads(files["manifest.json"])
    assert listed["RepoTags"] == [NAME]
    assert listed["Layers"] == [f"blobs/sha256/{sha(each)}" for each in LAYERS]
    assert files[listed["Config"]] == config_of(LAYERS)
    (row,) = json.loads(files["index.json"])["manifests"]
    assert row["annotations"] == {"io.containerd.image.name": f"docker.io/library/{NAME}"}
    assert files[f"blobs/sha256/{row['digest'][7:]}"] == image.manifest.encode()
    assert row["digest"] == f"sha256:{sha(image.manifest.encode())}"
    blobs = {name for name in files if name.startswith("blobs/")}
    assert blobs == {
        f"blobs/sha256/{each}" for each in (image.config, sha(LAYERS[1]), row["digest"][7:])
    }
    again = split(io.BytesIO(b"".join(_all(image, tmp_path))))
    assert again == image


def _all(image: Image, folder: Path) -> Any:
    here = list(dict.fromkeys([image.config, *(each.digest for each in image.layers)]))
    return pack(image, [NAME], here, lambda digest: iter([(folder / digest).read_bytes()]))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no image came"),
        (b"Error response from daemon", "no image came"),
        (classic()[:2000], "no image came|what `docker save` writes"),
        (tar_of({"manifest.json": b"[]"}), "several images|what `docker save` writes"),
        (tar_of({"other": b"x"}), "what `docker save` writes"),
        (classic(wrong=True), "layer 2 is not what its digest"),
        (modern(wrong=True), "layer 2 is not what its digest"),
        (modern(packed=True, wrong=True), "layer 2 is not what its digest"),
        (tar_of({"manifest.json": b"[" * 100_000}), "what `docker save` writes"),
        (classic(twice=True), "several images; say which one: b:1, other:1"),
    ],
)
def test_what_is_no_image(data: bytes, why: str, tmp_path: Path) -> None:
    """Is refused, whatever it is."""
    with pytest.raises(NotAnImage, match=why):
        split(io.BytesIO(data), str(tmp_path))


def test_one_of_several_is_named() -> None:
    """As `docker save` of two images writes them."""
    assert len(split(io.BytesIO(classic(twice=True)), name=NAME).layers) == len(LAYERS)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("x", "docker.io/library/x:latest"),
        ("vllm/vllm-openai:v0.32.0", "docker.io/vllm/vllm-openai:v0.32.0"),
        ("ghcr.io/a/b", "ghcr.io/a/b:latest"),
        ("localhost/a:1", "localhost/a:1"),
        ("reg:5000/a/b:1", "reg:5000/a/b:1"),
    ],
)
def test_a_name_in_full(name: str, full: str) -> None:
    """With the registry and the tag that Docker assumes."""
    assert full_name(name) == full
