"""Query of a node's images against a simulated Docker, and parsing of its answer."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import UnreadableAnswer
from launcher.distribute import image_store
from launcher.distribute.image_store import ImageStore, is_named
from launcher.tools.docker import Image
from tests.simulated import image_json

_DOCKER = """#!/bin/sh
case "$*" in
  "version --format"*) echo '{"Version": "26.1.5"}' ;;
  "info --format {{json .}}") echo 'WARNING: no swap'; cat "$(dirname "$0")/info" ;;
  "info --format {{.DockerRootDir}}") dirname "$0" ;;
  "images --quiet --no-trunc") printf 'sha256:b\\nsha256:a\\nsha256:b\\n' ;;
  "image inspect sha256:a sha256:b") cat "$(dirname "$0")/images" ;;
  *) echo "what is $*?" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    path = tmp_path / "docker"
    path.write_text(_DOCKER)
    path.chmod(0o755)
    (tmp_path / "info").write_text(json.dumps({"ServerVersion": "26.1.5", "DriverStatus": None}))
    (tmp_path / "images").write_text(json.dumps([image_json("a:1"), image_json("b:1")]))
    return path


def query(docker: Path, scratch: Path) -> ImageStore:
    argv = image_store.query_argv((str(docker),), cluster="c", node="n", scratch=str(scratch))
    ran = subprocess.run(argv, capture_output=True, text=True, check=True)
    return image_store.parse_store(ran.stdout, cluster="c", node="n", scratch=str(scratch))


def test_the_answer_of_a_node(docker: Path, tmp_path: Path) -> None:
    """Images, space, Python and unfinished copies; a missing folder is no error."""
    store = query(docker, tmp_path / "not" / "there")

    assert [image.id for image in store.images] == [
        image_json(name)["Id"] for name in ("a:1", "b:1")
    ]
    assert (store.docker_version, store.containerd, store.docker_error) == ("26.1.5", False, "")
    assert store.same_disk
    assert store.free > 0
    assert store.scratch_free > 0
    assert store.python >= (3, 8)
    assert store.unfinished == 0
    folder = Path(store.folder)
    assert folder == tmp_path / "not" / "there" / f"vlaunch-{os.getuid()}" / "c" / "n"
    folder.mkdir(parents=True)
    (folder / "blob").write_bytes(bytes(100_000))
    assert query(docker, tmp_path / "not" / "there").unfinished >= 100_000


def test_containerds_store(docker: Path, tmp_path: Path) -> None:
    """In Docker 29's format."""
    status = [["driver-type", "io.containerd.snapshotter.v1"]]
    (tmp_path / "info").write_text(json.dumps({"ServerVersion": "29.0", "DriverStatus": status}))

    assert query(docker, tmp_path).containerd


def test_docker_does_not_answer(docker: Path, tmp_path: Path) -> None:
    """Its message is included, and all other parts are known."""
    docker.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2; exit 1\n")
    store = query(docker, tmp_path)

    assert "Cannot connect" in store.docker_error
    assert store.images == ()
    assert store.scratch_free > 0


@pytest.mark.parametrize(
    "text", ["", "@@vlaunch user\n0\n@@vlaunch rc 0\n", "@@vlaunch end\n@@vlaunch rc 0\n"]
)
def test_unreadable_answers(text: str) -> None:
    """An error, not a node without images."""
    with pytest.raises(UnreadableAnswer):
        image_store.parse_store(text, cluster="c", node="n")


def _image(*names: str, layers: tuple[str, ...] = (), **fields: Any) -> Image:
    about: dict[str, Any] = {"id": "", "identity": "", "digests": (), "architecture": ""}
    return Image(**{**about, "labels": {}, "names": names, "layers": layers, **fields})


@pytest.mark.parametrize(
    ("has", "name", "same"),
    [
        ("x:latest", "x", True),
        ("x:1", "x", False),
        ("vllm/vllm-openai:v1", "docker.io/vllm/vllm-openai:v1", True),
        ("docker.io/library/x:1", "x:1", True),
        ("reg:5000/x:latest", "reg:5000/x", True),
        ("ghcr.io/x:1", "x:1", False),
    ],
)
def test_names(has: str, name: str, same: bool) -> None:
    """With the registry and tag that Docker assumes, or without."""
    assert is_named(_image(has), name) is same


def test_a_name_with_a_digest() -> None:
    """Only for images from a registry."""
    name = f"x@sha256:{'0' * 64}"

    assert not is_named(_image("x:latest"), name)
    assert is_named(_image(digests=(name,)), name)


def test_layers_count_from_the_lowest_on() -> None:
    """The same layer above another one is a different layer."""
    store = ImageStore(
        folder="", top="", images=(_image(layers=("a", "b", "x")), _image(layers=("c", "d")))
    )

    assert store.count_layers(["a", "b", "c", "d"]) == 2
    assert store.count_layers(["b", "c"]) == 0
    assert store.count_layers(["c", "d"]) == 2
