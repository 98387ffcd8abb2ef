"""Simulated hook: GPUs of a host that a container gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.lab import nvidia_hook

GPUS: list[dict[str, Any]] = [
    {"index": index, "uuid": f"GPU-{index}", "lost": False} for index in range(8)
]


@pytest.mark.parametrize(
    ("selection", "uuids"),
    [
        ("0,1", ["GPU-0", "GPU-1"]),
        ("4,5", ["GPU-4", "GPU-5"]),
        ("GPU-7", ["GPU-7"]),
        ("all", [gpu["uuid"] for gpu in GPUS]),
        ("none", []),
        ("void", []),
        ("", []),
    ],
)
def test_docker_names_gpus_by_number_or_uuid(selection: str, uuids: list[str]) -> None:
    """As dockerd sets NVIDIA_VISIBLE_DEVICES from `--gpus`."""
    assert nvidia_hook.select_gpus(selection, GPUS) == uuids


def test_a_missing_gpu_is_refused() -> None:
    """`--gpus 9` of eight."""
    with pytest.raises(nvidia_hook.GpuRequestError, match="device error: 8: unknown device"):
        nvidia_hook.select_gpus("7,8", GPUS)


def test_a_lost_gpu_lets_no_container_start() -> None:
    """Even for other GPUs: the real hook queries all of them first."""
    gpus = [*GPUS[:-1], {**GPUS[-1], "lost": True}]

    with pytest.raises(nvidia_hook.GpuRequestError, match="nvml error: unknown error"):
        nvidia_hook.select_gpus("0", gpus)


def test_a_container_gets_the_program_and_its_own_gpus(tmp_path: Path) -> None:
    """In its root, before it starts; the data is mounted read-only."""
    document_dir, bundle, root = tmp_path / "told", tmp_path / "bundle", tmp_path / "root"
    for folder in (document_dir, bundle, root / "etc", root / "usr/bin", tmp_path / "bin"):
        folder.mkdir(parents=True)
    (document_dir / "gpus.json").write_text(json.dumps({"gpus": GPUS}))
    (tmp_path / "bin/nvidia-smi").write_text("the program")
    hook = tmp_path / "bin/hook"
    hook.write_text(Path(nvidia_hook.__file__).read_text())
    (tmp_path / "bin/nsenter").write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/entered\n')
    (tmp_path / "bin/nsenter").chmod(0o755)
    environment = ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=4,5"]
    (bundle / "config.json").write_text(
        json.dumps({"process": {"env": environment}, "root": {"path": str(root)}})
    )
    completed = subprocess.run(
        [sys.executable, str(hook), "prestart"],
        input=json.dumps({"pid": 321, "bundle": str(bundle)}),
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PRACTICE_GPUS": str(document_dir)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert (completed.returncode, completed.stderr) == (0, "")
    assert (root / "etc/practice-gpus.visible").read_text() == "GPU-4\nGPU-5\n"
    assert (root / "usr/bin/nvidia-smi").read_text() == "the program"
    target = root / "etc/practice-gpus"
    assert (tmp_path / "entered").read_text().splitlines() == [
        f"--target=321 --mount -- mount --bind {document_dir} {target}",
        f"--target=321 --mount -- mount -o remount,bind,ro {target}",
    ]
