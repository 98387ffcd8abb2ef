"""The image that replaces one with CUDA."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

from launcher.lab import gpu_image, image
from launcher.tools.shipped import derived


def read_archive(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {name: file.read() for name in tar.getnames() if (file := tar.extractfile(name))}


def test_the_archive_adds_a_layer_to_the_lab_image(tmp_path: Path) -> None:
    """It refers to the lower layer, which Docker already has. The same content has the same ID
    everywhere.
    """
    rootfs = tmp_path / "building/rootfs"
    (rootfs / "etc").mkdir(parents=True)
    base = tmp_path / "image-abc.tar"
    image.pack(rootfs, base)
    below = read_archive(base)

    archive = gpu_image.ensure(tmp_path, base)

    members = read_archive(archive)
    manifest = json.loads(members["manifest.json"])[0]
    config = json.loads(members[manifest["Config"]])
    lower, upper = manifest["Layers"]
    assert manifest["RepoTags"] == [gpu_image.NAME]
    assert lower in below and lower not in members
    assert config["rootfs"]["diff_ids"] == [
        f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in (below[lower], members[upper])
    ]
    assert config["config"]["Entrypoint"] == ["vllm", "serve"]
    assert len(config["history"]) == 2
    assert (
        image.image_id(archive)
        == f"sha256:{hashlib.sha256(members[manifest['Config']]).hexdigest()}"
    )
    first = archive.read_bytes()
    archive.unlink()
    assert gpu_image.ensure(tmp_path, base).read_bytes() == first


def test_the_layer_registers_the_plugin_and_labels_the_image(tmp_path: Path) -> None:
    """In the package directory of the image's Python."""
    rootfs = tmp_path / "building/rootfs"
    rootfs.mkdir(parents=True)
    image.pack(rootfs, tmp_path / "image-abc.tar")
    members = read_archive(gpu_image.ensure(tmp_path, tmp_path / "image-abc.tar"))
    manifest = json.loads(members["manifest.json"])[0]
    with tarfile.open(fileobj=io.BytesIO(members[manifest["Layers"][1]])) as layer:
        names = layer.getnames()

        member = layer.extractfile(f"{image.SITE}/vlaunch_gpu_claim-1.0.dist-info/entry_points.txt")
        assert member is not None
        entries = member.read().decode()

    assert f"{image.SITE}/{derived.PLUGIN_PACKAGE}/__init__.py" in names
    assert f"{image.SITE}/vlaunch_gpu_claim.py" in names
    assert entries == "[vllm.general_plugins]\nvlaunch_gpu_claim = vlaunch_gpu_claim:register\n"
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)
    config = json.loads(members[manifest["Config"]])["config"]
    assert "vLLM runs its CPU build" in config["Labels"][gpu_image.LABEL]


def test_the_name_is_that_of_an_image_for_nvidia_gpus() -> None:
    """`vlaunch init` derives an image's type from its name."""
    assert "vllm" in gpu_image.NAME
    assert not any(platform in gpu_image.NAME for platform in ("cpu", "rocm", "xpu", "tpu", "hpu"))
