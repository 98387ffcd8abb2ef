"""A node that is the operator's own machine: the same plan, run on a lab host itself,
without SSH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import launcher
from benchmarks.faults import host_faults
from launcher.tools.shipped import derived
from tests.integration.conftest import LabCluster

pytestmark = pytest.mark.lab

_HOST = "node2"


@dataclass(frozen=True)
class LocalOperator:
    """An operator on a lab host with `vlaunch` and an inventory of that host alone."""

    lab_cluster: LabCluster
    python: str

    def vlaunch(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run `vlaunch` on the host."""
        paths = (
            "HOME=/root",
            "PYTHONPATH=/root/seat/site-packages:/root/seat/project",
            "LD_LIBRARY_PATH=/root/seat/python/lib",
        )
        program = ("-c", "from launcher.cli.main import main; main()")
        return host_faults.enter(
            self.lab_cluster.lab.host(_HOST),
            "env",
            *paths,
            self.python,
            *program,
            *arguments,
            timeout=timeout,
        )


@pytest.fixture(scope="module")
def operator(lab_cluster: LabCluster) -> Iterator[LocalOperator]:
    """Install this Python, its packages and `vlaunch` on a lab host, which reaches no package
    index.

    `up` puts Ray's image on the host first, unless earlier tests have.
    """
    lab_cluster.write()
    if not lab_cluster.docker(_HOST, "images", "--quiet", derived.REPOSITORY):
        assert lab_cluster.vlaunch("up").code == 0
        assert lab_cluster.vlaunch("down", "--yes").code == 0
    home = lab_cluster.lab.host(_HOST).root / "root"
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
    document = yaml.safe_load(lab_cluster.lab.inventory.read_text())
    node = next(node for node in document["nodes"] if node["name"] == _HOST)
    document |= {"cluster": "seat", "connection": "local", "nodes": [node]}
    del document["ssh"], document["front"]
    (home / "inventory.yaml").write_text(yaml.safe_dump(document))
    operator = LocalOperator(lab_cluster=lab_cluster, python=str(python))
    yield operator
    operator.vlaunch("down", "--yes")


def _copy(source: Path, target: Path, *excluded: str) -> None:
    ignored = shutil.ignore_patterns("test", "__pycache__", *excluded)
    shutil.copytree(source, target, symlinks=True, ignore=ignored, dirs_exist_ok=True)


def test_up_without_ssh(down: LabCluster, operator: LocalOperator) -> None:
    """Through the local Docker socket; commands reach the container."""
    up = operator.vlaunch("up", "/root/inventory.yaml")
    assert up.returncode == 0, up.stdout + up.stderr
    ray = operator.vlaunch("exec", "--", "ray", "status")
    assert (ray.returncode, "0.0/1.0 GPU" in ray.stdout) == (0, True), ray.stdout + ray.stderr


@pytest.mark.long
def test_serve_and_chat_without_ssh(operator: LocalOperator) -> None:
    """One node with one slot needs neither TP nor PP."""
    assert operator.vlaunch("up", "/root/inventory.yaml").returncode == 0
    serve = operator.vlaunch("serve", timeout=420)
    assert serve.returncode == 0, serve.stdout + serve.stderr
    chat = operator.vlaunch("chat", "--max-tokens", "4", "Hello")
    assert chat.returncode == 0, chat.stdout + chat.stderr
    assert chat.stdout.strip()
    logs = operator.vlaunch("logs", "--tail", "3")
    assert logs.returncode == 0, logs.stdout + logs.stderr


def test_down_without_ssh(lab_cluster: LabCluster, operator: LocalOperator) -> None:
    """It leaves nothing."""
    gone = operator.vlaunch("down", "--yes")
    assert gone.returncode == 0, gone.stdout + gone.stderr
    assert "nothing is left" in gone.stderr
    assert lab_cluster.containers() == {}
