"""Copies of images over real programs on loopback, with a Docker that stores its input."""

from __future__ import annotations

import json
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from launcher.distribute.members import MemberSpec
from launcher.distribute.node import images
from launcher.distribute.node.files import CopyManifest, ManifestFile
from tests.chains import CHUNK, Chain, when
from tests.image_tars import NAME, sha, tar_of

pytestmark = pytest.mark.processes
SLOWLY = 4_000_000  # bytes per second
LAYERS = tuple(random.Random(1).randbytes(size) for size in (9_000_017, 1_000_000, 700))


class Images(Chain):
    """Nodes with a Docker that writes its input into a file; `n0` has the image's files."""

    exported: dict[str, Any]
    refuses: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        saved = self.base / "saved"
        saved.write_bytes(tar_of_layers())
        root, top = str(self.roots["n0"]), str(self.base / "n0")
        (self.base / "n0").chmod(0o700)
        request = {"of": "1", "root": root, "top": top, "need": 1, "save": ["cat", str(saved)]}
        self.exported = images.export_image(request)

    @property
    def manifest(self) -> CopyManifest:
        """Return the manifest of the exported files."""
        return CopyManifest([ManifestFile(*row) for row in self.exported["files"]], CHUNK)

    def loaded(self, name: str) -> Path:
        """Return the file that a node's Docker has loaded."""
        return self.base / name / "given"

    def has_it(self, name: str) -> bool:
        """Return whether a node's Docker has loaded all files, without staged files left."""
        try:
            with tarfile.open(self.loaded(name)) as tar:
                sums = {entry.name: sha(tar.extractfile(entry).read()) for entry in tar}  # type: ignore[union-attr]
        except (OSError, tarfile.TarError):
            return False
        root = self.roots["n0"]
        expected = {row[0]: sha((root / row[0]).read_bytes()) for row in self.exported["files"]}
        return sums == expected and not self.roots[name].exists()

    def _part(
        self,
        name: str,
        manifest: CopyManifest,
        source: str,
        links: list[list[str]],
        pushes: bool,
        fields: dict[str, Any],
    ) -> MemberSpec:
        script = "echo no space left >&2; exit 1" if name == self.refuses else 'cat > "$0"'
        top = self.roots[name].parent
        top.chmod(0o700)
        load = {"load": ["sh", "-c", script, str(self.loaded(name))], "top": str(top)}
        fields = fields if name == source else {**fields, "load": load}
        return super()._part(name, manifest, source, links, pushes, fields)


def tar_of_layers() -> bytes:
    """Return an image as Docker saves it."""
    diffs = [f"sha256:{sha(layer)}" for layer in LAYERS]
    config = json.dumps({"rootfs": {"type": "layers", "diff_ids": diffs}}).encode()
    files = {f"blobs/sha256/{sha(layer)}": layer for layer in (*LAYERS, config)}
    paths = list(files)
    rows = [{"Config": paths[-1], "RepoTags": [NAME], "Layers": paths[:-1]}]
    return tar_of({**files, "manifest.json": json.dumps(rows).encode()})


@pytest.fixture
def chain(tmp_path: Path) -> Images:
    return Images(tmp_path, 4)


def test_every_docker_loads_the_image(chain: Images) -> None:
    """From files copied along the chain, which are removed."""
    came = chain.run(chain.manifest)

    assert came.failed == {}
    assert [chain.has_it(name) for name in chain.names[1:]] == [True] * 3
    assert came.members["n3"].received == chain.manifest.total_bytes
    assert came.members["n0"].sent == chain.manifest.total_bytes


def test_a_killed_node_resumes(chain: Images) -> None:
    """The others have the image; a repetition sends it the rest, and its Docker loads all of it."""
    chain.rate = SLOWLY
    came = chain.run(chain.manifest, at=when(0.4, lambda: chain.kill("n1")))

    assert list(came.failed) == ["n1"]
    assert [chain.has_it(name) for name in ("n1", "n2", "n3")] == [False, True, True]
    again = chain.run(chain.manifest, names=["n0", "n1"])
    assert chain.has_it("n1")
    assert 0 < again.members["n1"].received < 0.9 * chain.manifest.total_bytes


def test_a_failing_docker_is_named(chain: Images) -> None:
    """With its message; the others have the image."""
    chain.refuses = "n1"
    came = chain.run(chain.manifest)

    assert list(came.failed) == ["n1"]
    assert "no space left" in came.failed["n1"]
    assert [chain.has_it(name) for name in ("n2", "n3")] == [True, True]
