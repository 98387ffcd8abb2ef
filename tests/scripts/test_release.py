"""`scripts/release.sh`: reproducible builds, contents of wheel and sdist, one version."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from launcher import __version__

ROOT = Path(__file__).parents[2]


def _git(*arguments: str, folder: Path = ROOT) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def _build(source: Path, output: Path, **environment: str) -> dict[str, str]:
    """Build as the release does; return the digests of wheel and sdist."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", output],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1760000000", **environment},
        check=True,
        capture_output=True,
    )
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in output.iterdir()}


@pytest.mark.processes
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_builds_are_reproducible_and_complete(tmp_path: Path) -> None:
    """Time zone, folder, and rights and times of files change no byte. The wheel has the files of
    the package, the sdist every tracked file, and the sdist gives the same wheel.
    """
    source, moved, unpacked = tmp_path / "source", tmp_path / "moved", tmp_path / "unpacked"
    tracked = [name for name in _git("ls-files", "-z").split("\0") if (ROOT / name).is_file()]
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    sdist, wheel = f"vlaunch-{__version__}.tar.gz", f"vlaunch-{__version__}-py3-none-any.whl"
    digests = _build(source, tmp_path / "first")
    source.rename(moved)
    subprocess.run(["chmod", "-R", "go=", moved], check=True)
    os.utime(moved / "launcher" / "__init__.py", (10**9, 10**9))
    with zipfile.ZipFile(tmp_path / "first" / wheel) as archive:
        package = {
            name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name
        }
    with tarfile.open(tmp_path / "first" / sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        code = [name for name in archive.getmembers() if "/tests/" not in name.name]
        archive.extractall(unpacked, members=code, filter="data")

    assert digests.keys() == {sdist, wheel}
    assert _build(moved, tmp_path / "second", TZ="Asia/Tokyo") == digests
    assert sorted(names) == sorted([*tracked, "PKG-INFO"])
    assert package == {
        name: (ROOT / name).read_bytes() for name in tracked if name.startswith("launcher/")
    }
    from_sdist = _build(unpacked / f"vlaunch-{__version__}", tmp_path / "third")
    assert from_sdist[wheel] == digests[wheel]


def test_versions_are_equal() -> None:
    """The changelog's newest release and the files that it names have the package's version."""
    releases = re.split(r"^## (?=\d)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    named = re.findall(r"\bvlaunch-(\d+\.\d+\.\d+)", releases[1])

    assert {releases[1].split()[0], *named} == {__version__}


def test_locks_agree() -> None:
    """What users install, `requirements-runtime.lock`, is part of what is tested."""
    users, tested = (
        {
            re.sub(r"\n +# .*", "", entry)
            for entry in re.split(r"\n(?=\w)", (ROOT / name).read_text().strip())
        }
        for name in ("requirements-runtime.lock", "requirements.lock")
    )

    assert users
    assert users - tested == set()


@pytest.mark.processes
def test_release_refuses_a_dirty_checkout(tmp_path: Path) -> None:
    """Changed and untracked files are named, with a hint, and nothing is built."""
    script = tmp_path / "scripts" / "release.sh"
    script.parent.mkdir()
    shutil.copy(ROOT / "scripts" / "release.sh", script)
    (tmp_path / "changed").write_text("before")
    _git("init", "--quiet", folder=tmp_path)
    _git("add", ".", folder=tmp_path)
    _git("commit", "--quiet", "--message", "release: test", folder=tmp_path)
    (tmp_path / "changed").write_text("after")
    (tmp_path / "new").touch()
    refused = subprocess.run([script], capture_output=True, text=True, check=False)

    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.splitlines() == [
        "error: the checkout has uncommitted changes:",
        " M changed",
        "?? new",
        "hint: commit them, or set them aside with `git stash --include-untracked`",
    ]
    assert not (tmp_path / "dist").exists()
