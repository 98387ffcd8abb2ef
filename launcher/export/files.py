"""Files of `vlaunch export -o DIR`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from launcher.core.errors import VlaunchError


def write(folder: str, files: Mapping[str, bytes]) -> None:
    """Write files into a folder; raises VlaunchError."""
    try:
        for name, data in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    except OSError as error:
        raise VlaunchError(
            f"{folder}: {error.strerror}", hint="name a folder that you can write: `-o DIR`"
        ) from None
    click.echo(f"wrote {', '.join(files)} to {folder}", err=True)
