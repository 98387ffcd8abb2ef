"""Pure Python wheels for tests."""

from __future__ import annotations

import io
import zipfile


def build(name: str, version: str, metadata: str = "") -> tuple[str, bytes]:
    """Return the file name and the bytes of an empty wheel; `metadata` is lines of METADATA."""
    stem = f"{name.replace('-', '_')}-{version}"
    content = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in content.items():
            archive.writestr(zipfile.ZipInfo(f"{stem}.dist-info/{path}"), text)
    return f"{stem}-py3-none-any.whl", buffer.getvalue()
