"""Build a pure Python wheel in memory, the same bytes every time: no build backend, no clock, no
file system.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Mapping

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest a zip file can say


def build(
    name: str,
    version: str,
    files: Mapping[str, bytes] | None = None,
    *,
    metadata: str = "",
    entry_points: str = "",
) -> tuple[str, bytes]:
    """Return a wheel's file name and its bytes.

    The format is the binary distribution format of the Python packaging specifications.

    Args:
        name: the distribution's name; `-` and `.` become `_` in file names.
        files: path inside the wheel → content.
        metadata: further header lines for METADATA, each ending in a newline.
        entry_points: the text of entry_points.txt.
    """
    stem = f"{name.replace('-', '_').replace('.', '_')}-{version}"
    info = f"{stem}.dist-info"
    content = {
        **(files or {}),
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}".encode()
        ),
        f"{info}/WHEEL": (
            b"Wheel-Version: 1.0\nGenerator: vlaunch\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    if entry_points:
        content[f"{info}/entry_points.txt"] = entry_points.encode()
    rows = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in sorted(content.items())]
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    # stored: compressors differ between machines
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, data in content.items():
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.create_system = 3  # Unix, also when built elsewhere
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return f"{stem}-py3-none-any.whl", buffer.getvalue()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
