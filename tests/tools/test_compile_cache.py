"""A node's compile cache: query, parser and removal, run locally."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from launcher.tools import compile_cache, host
from launcher.tools.compile_cache import CompileCache
from launcher.tools.host import host_output


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ext4", CompileCache(kind="ext4")),
        ("xfs\n340", CompileCache(kind="xfs", size=340 * 1024)),
        ("UNKNOWN (0x1badface)", CompileCache(kind="UNKNOWN (0x1badface)")),
        ("", None),
        (None, None),
        ("stat: cannot read", None),
        ("ext4\nmany", None),
    ],
)
def test_answers(text: str | None, expected: CompileCache | None) -> None:
    """A missing size means a missing folder."""
    assert compile_cache.parse_cache(text) == expected


@pytest.mark.parametrize(
    ("kind", "remote"),
    [
        *((kind, True) for kind in ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs")),
        *((kind, True) for kind in ("beegfs", "fuse.sshfs", "fuse.juicefs", "wekafs", "9p")),
        *((kind, False) for kind in ("ext4", "ext2/ext3", "xfs", "btrfs", "zfs", "overlay")),
        *((kind, False) for kind in ("tmpfs", "fuseblk", "fuse.fuse-overlayfs")),
    ],
)
def test_remote_file_systems_are_recognised(kind: str, remote: bool) -> None:
    """By findmnt's and stat's names."""
    assert CompileCache(kind=kind).remote is remote


@pytest.mark.parametrize("configured", [True, False])
def test_a_node_reports_its_cache(configured: bool, tmp_path: Path) -> None:
    """With the probe, below the user's home or in the inventory's directory; a missing cache has
    the file system of its parent.
    """
    argv = host.probe(
        ("no-docker",),
        cluster="c",
        state_dir="",
        hf_home="/",
        accelerator="cpu",
        images=(),
        extra_script=compile_cache.query_script(str(tmp_path / "own") if configured else None, "c"),
    )
    folder = tmp_path / ("own/c" if configured else ".vlaunch/cache/c")

    def probe_cache() -> CompileCache | None:
        done = subprocess.run(
            argv,
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        return host_output.parse_probe(done.stdout).compile_cache

    before = probe_cache()
    (folder / "0123").mkdir(parents=True)
    (folder / "0123" / "kernel").write_bytes(os.urandom(3 << 20))
    after = probe_cache()

    assert before is not None and before.size is None and before.kind
    assert after is not None and after.kind == before.kind
    assert after.size is not None and 3 << 20 <= after.size < 4 << 20


@pytest.mark.parametrize("around", [True, False])
def test_a_purge_removes_its_own_files(around: bool, tmp_path: Path) -> None:
    """Other files and the inventory's directory stay."""
    state = tmp_path / "state"
    (state / "cache/c/0123/vllm").mkdir(parents=True)
    (state / "cache/c/0123/vllm/kernel").write_text("x")
    argv = compile_cache.purge(
        ("no-docker",),
        str(state / "cache/c"),
        parent=str(state / "cache") if around else "",
        image="",
    )

    assert subprocess.run(argv, check=False).returncode == 0
    assert not (state / "cache/c").exists()
    assert state.exists() is (state / "cache").exists() is not around
    assert subprocess.run(argv, check=False).returncode == 0  # the folder is empty


def test_files_of_root_are_removed_by_root(tmp_path: Path) -> None:
    """In a container of an existing image, a fake in this test; if that fails as well, it is an
    error.
    """
    folder = tmp_path / "cache/c"
    folder.mkdir(parents=True)
    rm, docker = tmp_path / "rm", tmp_path / "docker"
    rm.write_text(f'#!/bin/sh\n[ -e "{tmp_path}/done" ] || exit 1\nexec /bin/rm "$@"\n')
    docker.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/done"\n')
    for program in (rm, docker):
        program.chmod(0o755)

    def purge(image: str) -> int:
        argv = compile_cache.purge((str(docker),), str(folder), parent="", image=image)
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.run(argv, env=env, check=False).returncode

    assert purge("") == 1
    assert folder.exists()
    assert purge("vllm:1") == 0
    assert not folder.exists()
    output = (tmp_path / "done").read_text()
    assert f"--user 0:0 --volume {folder}:/cache --entrypoint sh vllm:1" in output
