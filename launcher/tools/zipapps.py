"""Zip archives of the Python programs for nodes and pods.

Packages in archives have the same structure as `launcher`, so that relative imports work.
"""

import io
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePath

from launcher.failures import data
from launcher.upstream import entries

_LAUNCHER = Path(__file__).parents[1]
Files = Mapping[str, bytes]  # contents by path in the archive
AGENT, BATCH, NETWORK = "agent.pyz", "batch.pyz", "network.pyz"


def pack(files: Files, *, compress: bool = False) -> bytes:
    """Pack files into a reproducible archive; a compressed one depends on Python's zlib."""
    buffer = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), data, method, compresslevel=9)
    return buffer.getvalue()


@cache
def agent_files() -> Files:
    """Return the package `vlaunch_agent`: the agent, and clients such as that of `vlaunch chat`."""
    files = _package_files("vlaunch_agent", "agent/*.py")
    return {**files, **_upstream_files("vlaunch_agent")}


@cache
def batch_files() -> Files:
    """Return the package `vlaunch_batch` (driver of batch jobs), and `desk.py` to start it."""
    main = b"from .batch.driver.__main__ import run\n\nrun()\n"
    desk = b"import sys\n\nfrom vlaunch_batch.batch.desk import main\n\nsys.exit(main())\n"
    return {
        **_package_files(
            "vlaunch_batch",
            _LAUNCHER,
            *("batch/desk.py", "batch/folder.py", "batch/job.py", "batch/job_values.py"),
            *("batch/driver/**/*.py", "core/values.py", "core/sizes.py"),
            *("agent/cause.py", "core/interrupts.py"),
            *("failures/frames.py", "failures/match.py", "failures/table.py"),
            "inventory/engine_args.py",
        ),
        "vlaunch_batch/failures/data.py": data.pack_entries(),
        **_upstream_files("vlaunch_batch"),
        "vlaunch_batch/__main__.py": main,
        "__main__.py": desk,
    }


@cache
def network_files() -> Files:
    """Return the files of the network probe."""
    tls = _LAUNCHER / "distribute" / "tls.py"
    programs = (*(_LAUNCHER / "network/probe").glob("*.py"), tls)
    return {
        **{path.name: path.read_bytes() for path in programs},
        "launcher/__init__.py": b"",
        **_upstream_files("launcher"),
    }


@cache
def copy_files() -> Files:
    """Return the package `vlaunch_copy`: the program of a node in a copy."""
    return _package_files("vlaunch_copy", "distribute/node/*.py", "distribute/tls.py")


def _upstream_files(package: str) -> Files:
    """Return `launcher.upstream` with packed texts, as a part of a package."""
    return {
        f"{package}/upstream/__init__.py": (_LAUNCHER / "upstream" / "__init__.py").read_bytes(),
        f"{package}/upstream/texts.py": entries.pack_texts(),
    }


def _package_files(package: str, *patterns: str) -> dict[str, bytes]:
    """Return the modules of `launcher` that match `patterns`, as a package."""
    modules = {
        f"{package}/{path.relative_to(_LAUNCHER)}": path.read_bytes()
        for pattern in patterns
        for path in _LAUNCHER.glob(pattern)
    }
    folders = {str(folder) for name in modules for folder in PurePath(name).parents} - {"."}
    return {**{f"{folder}/__init__.py": b"" for folder in folders}, **modules}
