"""`~/.ssh/config`, with the `Include` lines that paramiko leaves out."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import Final

import paramiko

from launcher.errors import RequestError

_INCLUDE: Final = re.compile(r"^\s*include[\s=]+(.+?)\s*$", re.IGNORECASE)
_DEPTH: Final = 16  # as ssh_config(5) readers do, against files that include each other


def load() -> paramiko.SSHConfig:
    """Read the user's file and then the system's, as ssh(1) does; raises RequestError for one that cannot be understood."""
    text: list[str] = []
    for file in (Path.home() / ".ssh" / "config", Path("/etc/ssh/ssh_config")):
        text += ["Host *", *_lines(file, file.parent, 0)]
    try:
        return paramiko.SSHConfig.from_text("\n".join(text))
    except paramiko.SSHException as error:
        raise RequestError("the ssh configuration cannot be read", evidence=str(error), hint="ssh -G HOST") from error


def _lines(file: Path, base: Path, depth: int) -> list[str]:
    if depth > _DEPTH or not file.is_file():
        return []
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RequestError(f"{file}: cannot be read", evidence=str(error), hint=f"ls -l {file}") from error
    lines: list[str] = []
    for line in text.splitlines():
        match = _INCLUDE.match(line)
        if match is None:
            lines.append(line)
            continue
        for pattern in match[1].split():
            files = str(base / Path(pattern.strip('"')).expanduser())
            for found in sorted(glob.glob(files)):  # noqa: PTH207 - Path.glob wants a relative pattern
                lines += _lines(Path(found), base, depth + 1)
    return lines
