"""Archives of node programs: bytes, imports, and replacement."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.batch import archive as batch_archive
from launcher.core.registry import Files
from launcher.distribute import chain
from launcher.network import archive as network_archive
from launcher.tools.shipped import node_files, zipapps

ENTRY = Path(node_files.__file__).parents[2] / "agent" / "entry.sh"
SENT = {
    path.name: path.read_bytes()
    for path in (Path(node_files.__file__).parents[2] / "hosts" / "node").glob("*.py")
}
# Per program: its files, the oldest Python, and its image's packages, imported at its start and
# later; programs start fast. The agent's archive is beside the one of batches.
PROGRAMS = {
    "agent": (
        zipapps.agent_files,
        10,
        "aiohttp msgspec prometheus_client yarl",
        "pydantic pydantic_core ray",
    ),
    "batch": (
        batch_archive.files,
        10,
        "numpy",
        "jinja2 pyarrow pydantic ray transformers urllib3 vllm vlaunch_agent",
    ),
    "copy": (chain.program_files, 8, "", "huggingface_hub"),
    "hosts/node": (lambda: SENT, 8, "", ""),
    "network": (network_archive.files, 10, "", "torch"),
}


def imports(name: str, text: bytes, minor: int) -> Iterator[tuple[str, bool]]:
    """Yield the full names of a module's imports, and whether they are at its start."""
    tree = ast.parse(text, name, feature_version=(3, minor))
    package = name.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        at_start = node in tree.body
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_start) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            assert not node.level or base, f"{name} imports from above its package"
            module = ".".join((*base, *filter(None, [node.module])))
            yield from ((f"{module}.{alias.name}", at_start) for alias in node.names)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_imports_its_own_modules_the_standard_library_and_its_image(program: str) -> None:
    """No node and no image has the launcher; an old Python parses the text."""
    read, minor, first, later = PROGRAMS[program]
    files = read()
    own = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files}
    for name, text in files.items():
        for imported, start in imports(name, text, minor):
            if imported in own or imported.rpartition(".")[0] in own:
                continue
            allowed = sys.stdlib_module_names | {*first.split(), *("" if start else later).split()}
            assert imported.partition(".")[0] in allowed, (name, imported)


@pytest.mark.parametrize("compress", [False, True])
def test_archives_are_reproducible(compress: bool) -> None:
    """Neither the order of files nor the time matters."""
    files = {"b.py": b"1", "a/b.py": b"2" * 1000}
    data = zipapps.pack(files, compress=compress)

    assert data == zipapps.pack(dict(reversed(files.items())), compress=compress)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == files
    assert (len(data) > 1000) is not compress


@pytest.mark.processes
def test_an_upgrade_does_not_reach_a_running_agent(tmp_path: Path) -> None:
    """It imports late, prints tracebacks and starts programs of its own version."""
    main = b"""
import subprocess, sys, traceback
def main():
    print("started", flush=True)
    sys.stdin.readline()
    from . import late
    try:
        late.fail()
    except ValueError:
        traceback.print_exc(file=sys.stdout)
    path = {"PYTHONPATH": sys.path[0]}
    subprocess.run([sys.executable, "-m", "vlaunch_agent.agent.other"], env=path, check=True)
    return 3
"""
    package = "vlaunch_agent/agent"
    old: Files = {
        "vlaunch_agent/__init__.py": b"",
        f"{package}/__init__.py": b"",
        f"{package}/__main__.py": main,
        f"{package}/late.py": b"def fail():\n    raise ValueError('as meant')  # old\n",
        f"{package}/other.py": b"print('the old one')\n",
    }
    archive, new = tmp_path / zipapps.AGENT, tmp_path / "new"
    archive.write_bytes(zipapps.pack(old))
    script = ENTRY.read_text().replace("/tmp/", "/none/").replace("/opt/vlaunch", str(tmp_path))
    process = subprocess.Popen(
        ["sh", "-c", script, "entry.sh", "agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    new.write_bytes(zipapps.pack(dict.fromkeys(old, b"no = Python\n")))
    new.rename(archive)
    out, _ = process.communicate("go on\n", timeout=60)

    assert process.returncode == 3
    assert "raise ValueError('as meant')  # old" in out
    assert out.endswith("the old one\n")
