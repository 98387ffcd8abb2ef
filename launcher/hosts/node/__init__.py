"""Programs that run on a node or in its container, sent as text: standard library only."""

from pathlib import Path


def program_source(name: str) -> str:
    """Return the source of `NAME.py`, for `python3 -c`."""
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
