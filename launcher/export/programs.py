"""Programs that pods run, each a zip archive that Python starts."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

_LAUNCHER = Path(__file__).parents[1]
FOLDER = "/opt/vlaunch"  # the archives' folder in pods
NETWORK, BATCH = "network.pyz", "batch.pyz"
_MAIN = b"import network_gate\nnetwork_gate.main()\n"


def network() -> bytes:
    """Return the network check: `network_gate.py` and the modules that it imports."""
    paths = (
        *(_LAUNCHER / "network" / "probe").glob("network*.py"),
        _LAUNCHER / "distribute" / "tls.py",
    )
    modules = {path.name: path.read_bytes() for path in paths}
    return _archive({**modules, "__main__.py": _MAIN})


def batch() -> bytes:
    """Return the package of batch jobs, for PYTHONPATH."""
    files = (_LAUNCHER / "batch" / "driver").glob("*.py")
    return _archive({f"vlaunch_batch/{path.name}": path.read_bytes() for path in files})


def _archive(files: Mapping[str, bytes]) -> bytes:
    """Return an archive of files, the same bytes each time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name)
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED, compresslevel=9)
    return buffer.getvalue()
