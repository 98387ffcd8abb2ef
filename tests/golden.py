"""Golden files: compared exactly, and rewritten if VLAUNCH_WRITE_GOLDEN is set."""

from __future__ import annotations

import os
from pathlib import Path


def check(path: Path, text: str) -> None:
    """Compare `text` with the file; the assertion shows the difference."""
    if os.environ.get("VLAUNCH_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    assert text == path.read_text(encoding="utf-8"), (
        f"see {path.name}; VLAUNCH_WRITE_GOLDEN=1 writes it again"
    )
