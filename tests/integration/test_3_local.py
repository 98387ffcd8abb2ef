"""A node may be the machine one sits at: the same plan, run on a practice host itself, without
SSH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import launcher
from benchmarks.faults import host_faults
from launcher.tools import derived
from tests.integration.conftest import Practice

pytestmark = pytest.mark.lab

_HOST = "node2"


@dataclass(frozen=True)
class LocalOperator:
    """An operator on a practice host that has `vlaunch`, with an inventory of that host alone."""

    practice: Practice
    python: str

    def vlaunch(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run `vlaunch` there."""
        paths = (
            "HOME=/root",
            "PYTHONPATH=/root/seat/site-packages:/root/seat/project",
            "LD_LIBRARY_PATH=/root/seat/python/lib",
        )
        program = ("-c", "from launcher.cli.main import main; main()")
        return host_faults.enter(
            self.practice.lab.host(_HOST),
            "env",
            *paths,
            self.python,
            *program,
            *words,
            timeout=timeout,
        )


@pytest.fixture(scope="module")
def operator(practice: Practice) -> LocalOperator:
    """Install this Python, its packages and `vlaunch` on a practice host, which has no way to a
    package index.

    Ray's image is brought there as another operator would have done it before, unless tests before
    this one have.
    """
    practice.write()
    if not practice.docker(_HOST, "images", "--quiet", derived.REPOSITORY):
        assert practice.vlaunch("up").code == 0
        assert practice.vlaunch("down", "--yes").code == 0
    home = practice.lab.host(_HOST).root / "root"
    _copy(Path(sysconfig.get_path("purelib")), home / "seat/site-packages")
    _copy(Path(launcher.__file__).parent, home / "seat/project/launcher")
    python = Path(sys.base_prefix) / f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not python.is_relative_to("/usr"):
        (home / "seat/python/bin").mkdir(parents=True, exist_ok=True)
        shutil.copy2(python, home / "seat/python/bin")
        _copy(
            Path(sysconfig.get_path("stdlib")),
            home / "seat/python/lib" / python.name,
            "site-packages",
        )
        for library in (python.parents[1] / "lib").glob("libpython*"):
            shutil.copy2(library, home / "seat/python/lib")
        python = Path("/root/seat/python/bin") / python.name
    document = yaml.safe_load(practice.lab.inventory.read_text())
    node = next(node for node in document["nodes"] if node["name"] == _HOST)
    document |= {"cluster": "seat", "connection": "local", "nodes": [node]}
    document.pop("ssh")
    (home / "inventory.yaml").write_text(yaml.safe_dump(document))
    return LocalOperator(practice=practice, python=str(python))


def _copy(source: Path, target: Path, *unneeded: str) -> None:
    ignored = shutil.ignore_patterns("test", "__pycache__", *unneeded)
    shutil.copytree(source, target, symlinks=True, ignore=ignored, dirs_exist_ok=True)


def test_up_serve_chat_and_down_without_ssh(
    practice: Practice, down: Practice, operator: LocalOperator
) -> None:
    """One node with one slot needs neither TP nor PP; `up`, `serve`, `chat` and `down` work through
    Docker's own socket.
    """
    up = operator.vlaunch("up", "/root/inventory.yaml")
    assert up.returncode == 0, up.stdout + up.stderr
    serve = operator.vlaunch("serve", timeout=420)
    assert serve.returncode == 0, serve.stdout + serve.stderr
    chat = operator.vlaunch("chat", "--max-tokens", "4", "Hello")
    assert chat.returncode == 0, chat.stdout + chat.stderr
    assert chat.stdout.strip()
    logs = operator.vlaunch("logs", "--tail", "3")
    assert logs.returncode == 0, logs.stdout + logs.stderr
    gone = operator.vlaunch("down", "--yes")
    assert gone.returncode == 0, gone.stdout + gone.stderr
    assert "nothing is left" in gone.stderr
    assert practice.containers() == {}
