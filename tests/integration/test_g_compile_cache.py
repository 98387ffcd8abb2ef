"""What Inductor compiles on a practice host outlives its container, and goes when it is told to.

The practice image has no compiler: it gets this machine's, with torch's headers from its wheel.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from launcher.lab import hosts
from tests.integration.conftest import Practice
from tests.integration.servers import serve

pytestmark = [pytest.mark.lab, pytest.mark.long]

_WHEELS = Path("/var/cache/vlaunch-lab")  # launcher/lab/lab_command.py
_TOOLS = "/data/huggingface/toolchain"
_SITE = "/usr/local/lib/python3.11/dist-packages"
# Debian's compiler of another place; each run of it that is no question is a line of `compiled`.
_COMPILER = f"""\
#!/bin/sh
case " $* " in *" -o "*) echo "$*" >> {_TOOLS}/compiled ;; esac
LD_LIBRARY_PATH=/host/usr/lib/x86_64-linux-gnu exec /host/usr/bin/g++ --sysroot=/host \\
  -B/host/usr/bin -I/host/usr/include/python3.11 "$@"
"""


def _compiling(document: dict[str, Any], *, turn: int) -> None:
    """One node without Ray, whose engine compiles; each turn needs a new container."""
    document["nodes"] = document["nodes"][:1]
    document["nodes"][0]["ssh"] = {"user": "ops"}
    document["docker"] = ["sudo", "-n", "docker"]
    document["ray"] = "none"
    document["mounts"] = [
        *("/usr:/host/usr:ro", "/usr/lib:/host/lib:ro", "/usr/lib64:/host/lib64:ro"),
        f"{_TOOLS}/torch/include:{_SITE}/torch/include:ro",
    ]
    # vLLM 0.32's CPU build cannot load what its compilation ahead of time saved.
    document["env"] |= {"CXX": f"{_TOOLS}/g++", "VLLM_USE_AOT_COMPILE": "0", "TURN": str(turn)}
    document["engine_args"]["compilation_config"]["backend"] = "inductor"


@pytest.fixture(scope="module")
def compiling(practice: Practice) -> Practice:
    """A host with a compiler and nothing of a cluster."""
    if not Path("/usr/include/python3.11/Python.h").exists() or shutil.which("g++") is None:
        pytest.skip("this machine has no g++ with Python's headers")
    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0
    tools = hosts.hf_home(practice.lab.hosts[0]) / Path(_TOOLS).name
    tools.mkdir(exist_ok=True)
    (wheel,) = _WHEELS.glob("wheels-*/torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        headers = [each for each in archive.namelist() if each.startswith("torch/include/")]
        archive.extractall(tools, headers)
    (tools / "g++").write_text(_COMPILER)
    (tools / "g++").chmod(0o755)
    return practice


def _turn(practice: Practice, turn: int) -> int:
    """Bring up a new container, serve in it, and return how much was compiled for that."""
    compiled = hosts.hf_home(practice.lab.hosts[0]) / Path(_TOOLS).name / "compiled"
    compiled.unlink(missing_ok=True)
    practice.write(lambda document: _compiling(document, turn=turn))
    ran = practice.vlaunch("up")
    assert ran.code == 0, ran.said
    serve(practice, "--backend", "mp")
    assert practice.vlaunch("stop").code == 0
    return len(compiled.read_text().splitlines()) if compiled.exists() else 0


def test_a_new_container_compiles_nothing_of_the_model(compiling: Practice) -> None:
    """Two runs of the compiler are left: a header of Inductor's, which it keeps elsewhere."""
    first, second = _turn(compiling, 1), _turn(compiling, 2)

    assert first > 8
    assert second <= 2
    assert "compiled: " in compiling.vlaunch("status").out
    assert "ok" in compiling.vlaunch("check", "--only", "cache-dir").said


def test_a_purge_removes_what_root_in_the_container_wrote(compiling: Practice) -> None:
    """Though the login may remove nothing of it by itself; without it, it stays."""
    folder = "/home/ops/.vlaunch/cache/lab"
    kept = compiling.vlaunch("down", "--yes")
    assert (kept.code, "`vlaunch down --purge` removes it" in kept.err) == (0, True), kept.said
    assert compiling.on("node1", "ls", folder)
    purged = compiling.vlaunch("down", "--yes", "--purge")

    assert purged.code == 0, purged.said
    assert "left" in compiling.on("node1", "sh", "-c", f"ls {folder} 2>/dev/null || echo left none")
