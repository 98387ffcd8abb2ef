"""Wheels that are built in memory."""

from __future__ import annotations

import io
import zipfile

from launcher.tools import purewheel


def test_a_wheel() -> None:
    """Its name follows from the distribution's, its bytes are the same every time, and RECORD has
    the digest of each other file.
    """
    files = {"a_b/__init__.py": b"x = 1\n"}
    name, data = purewheel.build("a-b.c", "1.0", files, metadata="Requires-Dist: d\n")

    assert name == "a_b_c-1.0-py3-none-any.whl"
    assert purewheel.build("a-b.c", "1.0", files, metadata="Requires-Dist: d\n") == (name, data)
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        content = {path: wheel.read(path).decode() for path in wheel.namelist()}
    assert content["a_b/__init__.py"] == "x = 1\n"
    assert (
        "Name: a-b.c\nVersion: 1.0\nRequires-Dist: d\n" in content["a_b_c-1.0.dist-info/METADATA"]
    )
    record = content["a_b_c-1.0.dist-info/RECORD"].splitlines()
    assert "a_b/__init__.py,sha256=nia_NpkRxFwkPGhBR7I_yeHc_PJX0pmhxjIBam_NM_Q,6" in record
