"""Zip archives of the Python programs for nodes and pods.

Packages in archives have the same structure as `launcher`, so that relative imports work. Features
register their programs (`core/registry.py`).
"""

import io
import zipfile
from functools import cache
from pathlib import Path, PurePath

from launcher.core.registry import Files
from launcher.upstream import entries

_LAUNCHER = Path(__file__).parents[2]
AGENT = "agent.pyz"


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
    name = "vlaunch_agent"
    return {**package_files(name, "agent/**/*.py"), **upstream_files(name)}


def upstream_files(package: str) -> Files:
    """Return `launcher.upstream` with packed texts, as a part of a package."""
    return {
        f"{package}/upstream/__init__.py": (_LAUNCHER / "upstream" / "__init__.py").read_bytes(),
        f"{package}/upstream/texts.py": entries.pack_texts(),
    }


def package_files(package: str, *patterns: str) -> dict[str, bytes]:
    """Return the modules of `launcher` that match `patterns`, as a package."""
    modules = {
        f"{package}/{path.relative_to(_LAUNCHER)}": path.read_bytes()
        for pattern in patterns
        for path in _LAUNCHER.glob(pattern)
    }
    folders = {str(folder) for name in modules for folder in PurePath(name).parents} - {"."}
    return {**{f"{folder}/__init__.py": b"" for folder in folders}, **modules}
