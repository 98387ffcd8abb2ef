"""The scan for images, models and AMD GPUs: run locally, and parsed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from launcher.core import shell
from launcher.core.errors import UnreadableAnswer
from launcher.hosts.discovery.local_assets import Disk, Home, parse_local_assets, probe_script
from tests.simulated import image_json


def test_the_query_runs_and_its_answer_is_parsed(tmp_path: Path) -> None:
    """In a shell, with a fake docker that answers like the real one."""
    images = [
        image_json("vllm-cpu:0.32.0"),
        image_json("mine/vllm-ray:1", labels={"vlaunch.image.content": "x"}),
    ]
    docker = tmp_path / "docker"
    listing = "vllm-cpu:0.32.0\\nalpine:3\\nvllm/x:<none>\\n"
    docker.write_text(
        f"#!/bin/sh\nif [ \"$1\" = images ]; then printf '{listing}'; else\ncat"
        f" <<'E'\n{json.dumps(images)}\nE\nfi\n"
    )
    docker.chmod(0o755)
    (tmp_path / "wish/hub/models--Qwen--Qwen3-8B").mkdir(parents=True)
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    env = {**os.environ, "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "wish")}
    process = subprocess.run(
        (
            "sh",
            "-c",
            f"hf=$1; shift\n{probe_script()}",
            "stock",
            str(tmp_path / "wish"),
            str(docker),
        ),
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assets = parse_local_assets(process.stdout)
    homes = {home.path: home for home in assets.homes}

    assert list(assets.images) == ["vllm-cpu:0.32.0"]
    assert homes[str(tmp_path / "wish")].models == ("Qwen/Qwen3-8B",)
    assert homes[str(tmp_path / ".cache/huggingface")].models == ()
    assert all(home.free for home in assets.homes)
    assert assets.amd_gpus == 0
    assert all(Path(disk.path).is_dir() and disk.free for disk in assets.disks)


def test_the_answer_is_parsed() -> None:
    """Two homes, eight AMD GPUs, no image."""
    text = (
        "@@stock disk 2048 /raid/ops\n@@stock disk x /y\n"
        "@@stock home 90 /data/huggingface\n@@stock model"
        " models--a--b\n@@stock home  /home/x/.cache/huggingface\n@@stock amd 8\n@@stock"
        " images\n\n@@stock end\n"
    )
    assets = parse_local_assets(text)

    assert assets.homes == (
        Home(path="/data/huggingface", models=("a/b",), free=90 * 1024),
        Home(path="/home/x/.cache/huggingface"),
    )
    assert (assets.amd_gpus, assets.images) == (8, {})
    assert assets.disks == (Disk(path="/raid/ops", free=2 << 20),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@@stock images\n",
        "@@stock images\n[{\n@@stock end\n",
        "@@stock images\n[1]\n@@stock end\n",
    ],
)
def test_anything_else_is_a_typed_error(text: str) -> None:
    """Truncated, or not JSON."""
    with pytest.raises(UnreadableAnswer):
        parse_local_assets(text)


def test_folders_are_local_and_private(tmp_path: Path) -> None:
    """Without network file systems, world-writable folders, and folders of the system or Docker;
    links are not followed.
    """
    mounts = {"raid": "xfs", "open": "ext4", "home": "nfs4"}
    for name in (*mounts, "raid/else"):
        (tmp_path / name).mkdir()
    (tmp_path / "open").chmod(0o1777)
    (tmp_path / "link").symlink_to(tmp_path / "raid")
    lines = [
        f"x {tmp_path}/{name} {kind} rw 0 0" for name, kind in (*mounts.items(), ("link", "xfs"))
    ]
    used = ("/", "/boot/efi", "/usr", "/var", "/var/lib/docker", "/etc/hosts")
    lines += [f"x {path} ext4 rw 0 0" for path in used]
    (tmp_path / "mounts").write_text("\n".join(lines) + "\n")
    stat = tmp_path / "stat"
    stat.write_text('#!/bin/sh\n[ "${4#/var/lib}" != "$4" ] || echo ext2/ext3\n')
    stat.chmod(0o755)
    process = subprocess.run(
        ("sh", "-c", shell.program_text("own_disks").replace("/proc/mounts", f"{tmp_path}/mounts")),
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    disks = parse_local_assets(
        f"{process.stdout}@@stock amd 0\n@@stock images\n\n@@stock end\n"
    ).disks

    assert (process.returncode, process.stderr) == (0, "")
    assert [disk.path for disk in disks if disk.path.startswith(str(tmp_path))] == [
        f"{tmp_path}/raid"
    ]
    assert not {disk.path for disk in disks} & {*used}
