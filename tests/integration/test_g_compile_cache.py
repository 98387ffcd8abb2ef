"""Inductor's compile cache on a lab host outlives its container, until `--purge` removes it.

The lab's image has no compiler: it uses this machine's, with torch's headers from its wheel.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from launcher.lab import hosts
from tests.integration.conftest import LabCluster
from tests.integration.servers import serve

pytestmark = [pytest.mark.lab, pytest.mark.long]

_WHEELS = Path("/var/cache/vlaunch-lab")  # launcher/lab/lab_command.py
_TOOLS = "/data/huggingface/toolchain"
_SITE = "/usr/local/lib/python3.11/dist-packages"
# Debian's compiler in another root; each real compilation is a line of `compiled`.
_COMPILER = f"""\
#!/bin/sh
case " $* " in *" -o "*) echo "$*" >> {_TOOLS}/compiled ;; esac
LD_LIBRARY_PATH=/host/usr/lib/x86_64-linux-gnu exec /host/usr/bin/g++ --sysroot=/host \\
  -B/host/usr/bin -I/host/usr/include/python3.11 "$@"
"""


def _set_up_compiler(document: dict[str, Any], *, turn: int) -> None:
    """Change an inventory to one node without Ray, with an engine that compiles; each turn needs a
    new container.
    """
    document["nodes"] = document["nodes"][:1]
    document["nodes"][0]["ssh"] = {"user": "ops"}
    document["docker"] = ["sudo", "-n", "docker"]
    document["ray"] = "none"
    document["mounts"] = [
        *("/usr:/host/usr:ro", "/usr/lib:/host/lib:ro", "/usr/lib64:/host/lib64:ro"),
        f"{_TOOLS}/torch/include:{_SITE}/torch/include:ro",
    ]
    # vLLM 0.32's CPU build cannot load its own ahead-of-time compilations.
    document["env"] |= {"CXX": f"{_TOOLS}/g++", "VLLM_USE_AOT_COMPILE": "0", "TURN": str(turn)}
    document["engine_args"]["compilation_config"]["backend"] = "inductor"


@pytest.fixture(scope="module")
def compiling(lab_cluster: LabCluster) -> LabCluster:
    """A host with a compiler and no cluster."""
    if not Path("/usr/include/python3.11/Python.h").exists() or shutil.which("g++") is None:
        pytest.skip("this machine has no g++ with Python's headers")
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0
    tools = hosts.hf_home(lab_cluster.lab.hosts[0]) / Path(_TOOLS).name
    tools.mkdir(exist_ok=True)
    (wheel,) = _WHEELS.glob("wheels-*/torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        headers = [name for name in archive.namelist() if name.startswith("torch/include/")]
        archive.extractall(tools, headers)
    (tools / "g++").write_text(_COMPILER)
    (tools / "g++").chmod(0o755)
    return lab_cluster


def _run_turn(lab_cluster: LabCluster, turn: int) -> int:
    """Start a new container, serve in it, and return the number of compilations."""
    compiled = hosts.hf_home(lab_cluster.lab.hosts[0]) / Path(_TOOLS).name / "compiled"
    compiled.unlink(missing_ok=True)
    lab_cluster.write(lambda document: _set_up_compiler(document, turn=turn))
    result = lab_cluster.vlaunch("up")
    assert result.code == 0, result.output
    serve(lab_cluster, "--backend", "mp")
    assert lab_cluster.vlaunch("stop").code == 0
    return len(compiled.read_text().splitlines()) if compiled.exists() else 0


def test_a_new_container_compiles_nothing_of_the_model(compiling: LabCluster) -> None:
    """Two runs of the compiler remain: a header of Inductor, which it stores elsewhere."""
    first, second = _run_turn(compiling, 1), _run_turn(compiling, 2)

    assert first > 8
    assert second <= 2
    assert "compiled: " in compiling.vlaunch("status").out
    assert "ok" in compiling.vlaunch("check", "--only", "cache-dir").output


def test_a_purge_removes_files_of_the_containers_root(compiling: LabCluster) -> None:
    """Although the SSH user cannot remove it; without the option it stays."""
    folder = "/home/ops/.vlaunch/cache/lab"
    plain = compiling.vlaunch("down", "--yes")
    assert (plain.code, "`vlaunch down --purge` removes it" in plain.err) == (0, True), plain.output
    assert compiling.on("node1", "ls", folder)
    purged = compiling.vlaunch("down", "--yes", "--purge")

    assert purged.code == 0, purged.output
    assert "left" in compiling.on("node1", "sh", "-c", f"ls {folder} 2>/dev/null || echo left none")
