"""Archive of the network probe, whose modules are at its top."""

from functools import cache
from pathlib import Path

from launcher.core import tls
from launcher.core.registry import Files
from launcher.network import probe
from launcher.tools.shipped import zipapps

NAME = "network.pyz"


@cache
def files() -> Files:
    """Return the files of the archive."""
    paths = (*Path(probe.__file__).parent.glob("*.py"), Path(tls.__file__))
    probe_files = {path.name: path.read_bytes() for path in paths}
    return {**probe_files, "launcher/__init__.py": b"", **zipapps.upstream_files("launcher")}
