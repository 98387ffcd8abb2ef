"""A node may be the machine one sits at: the same plan, run on a practice host itself, without SSH."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import launcher
from launcher.lab import faults
from tests.integration.conftest import VLAUNCH, Practice

pytestmark = pytest.mark.lab

_HOST = "node2"


@pytest.fixture(scope="module")
def seat(practice: Practice) -> Path:
    """Install `vlaunch` on a practice host, under the paths it has here, with an inventory of that host alone."""
    root = practice.lab.host(_HOST).root
    package = Path(launcher.__file__).parent
    for folder in {Path(sys.prefix), Path(sys.base_prefix), package}:
        if not folder.is_relative_to("/usr"):
            target = root / folder.relative_to("/")
            ignored = shutil.ignore_patterns("test", "__pycache__", "include", "share")
            shutil.copytree(folder, target, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    document = yaml.safe_load(practice.lab.inventory.read_text())
    node = next(node for node in document["nodes"] if node["name"] == _HOST)
    document |= {"cluster": "seat", "connection": "local", "nodes": [node]}
    document.pop("ssh")
    (root / "root/inventory.yaml").write_text(yaml.safe_dump(document))
    return Path("/root/inventory.yaml")


def _here(practice: Practice, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return faults.enter(practice.lab.host(_HOST), "env", "HOME=/root", VLAUNCH, *words, timeout=timeout)


def test_up_serve_chat_and_down_without_ssh(practice: Practice, down: Practice, seat: Path) -> None:
    """One node with one slot needs neither TP nor PP; `up`, `serve`, `chat` and `down` work through Docker's own socket."""
    up = _here(practice, "up", str(seat))
    serve = _here(practice, "serve", timeout=420)
    chat = _here(practice, "chat", "--max-tokens", "4", "Hello")
    logs = _here(practice, "logs", "--tail", "3")
    gone = _here(practice, "down")

    assert up.returncode == 0, up.stdout + up.stderr
    assert serve.returncode == 0, serve.stdout + serve.stderr
    assert chat.returncode == 0, chat.stdout + chat.stderr
    assert chat.stdout.strip()
    assert logs.returncode == 0, logs.stdout + logs.stderr
    assert gone.returncode == 0, gone.stdout + gone.stderr
    assert "nothing is left" in gone.stderr
    assert practice.containers() == {}
