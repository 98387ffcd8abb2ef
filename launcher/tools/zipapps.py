"""Programs of nodes and pods: one zip archive each, which Python starts or imports from.

Modules lie in an archive's package as they do in `launcher`, so that relative imports are the same.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePath

_LAUNCHER = Path(__file__).parents[1]
Files = Mapping[str, bytes]  # of an archive, by their names in it
AGENT, BATCH, NETWORK = "agent.pyz", "batch.pyz", "network.pyz"


def pack(files: Files, *, compress: bool = False) -> bytes:
    """Return an archive of files.

    Its bytes, and so its digest, depend on the files alone; compressed, also on Python's zlib.
    """
    buffer = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), data, method, compresslevel=9)
    return buffer.getvalue()


@cache
def agent() -> Files:
    """Return the agent, `vlaunch chat`'s client and the like: the package `vlaunch_agent`."""
    return _files("vlaunch_agent", _LAUNCHER / "agent", "*.py")


@cache
def batch() -> Files:
    """Return the driver of batch jobs, the package `vlaunch_batch`, and `desk.py`, which starts."""
    main = b"from .batch.driver.__main__ import run\n\nrun()\n"
    return {
        **_files(
            "vlaunch_batch", _LAUNCHER, "batch/driver/*.py", "agent/cause.py", "core/patterns.py"
        ),
        "vlaunch_batch/__main__.py": main,
        "__main__.py": (_LAUNCHER / "batch" / "desk.py").read_bytes(),
    }


@cache
def network() -> Files:
    """Return the network probe."""
    tls = _LAUNCHER / "distribute" / "tls.py"
    return {
        path.name: path.read_bytes() for path in (*(_LAUNCHER / "network/probe").glob("*.py"), tls)
    }


@cache
def copy() -> Files:
    """Return the program of one node in a copy: the package `vlaunch_copy`."""
    return _files("vlaunch_copy", _LAUNCHER, "distribute/node/*.py", "distribute/tls.py")


def _files(package: str, base: Path, *patterns: str) -> Files:
    """Return the modules below `base` that match, in packages."""
    modules = {
        f"{package}/{path.relative_to(base)}": path.read_bytes()
        for pattern in patterns
        for path in base.glob(pattern)
    }
    folders = {str(folder) for name in modules for folder in PurePath(name).parents} - {"."}
    return {**{f"{folder}/__init__.py": b"" for folder in folders}, **modules}
