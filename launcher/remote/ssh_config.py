"""`~/.ssh/config`, with the `Include` lines that paramiko leaves out."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import Final

import paramiko

from launcher.errors import RequestError

_INCLUDE: Final = re.compile(r"^\s*include[\s=]+(.+?)\s*$", re.IGNORECASE)
_PROXY: Final = re.compile(r"^\s*proxycommand\b", re.IGNORECASE)
_PERCENT: Final = "\x01"
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


def proxy_command(text: str, *, host: str, port: int, user: str) -> str:
    """Return the `ProxyCommand` for a connection, "" for none.

    paramiko would put in the port that `~/.ssh/config` gives; an inventory may give another.
    """
    if text.lower() == "none":
        return ""
    values = {"%%": "%", "%h": host, "%p": str(port), "%r": user}
    return re.sub("%[%hpr]", lambda found: values[found[0]], text.replace(_PERCENT, "%"))


def _lines(file: Path, base: Path, depth: int) -> list[str]:
    if depth > _DEPTH or not file.is_file():
        return []
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RequestError(f"{file}: cannot be read", evidence=str(error), hint=f"ls -l {file}") from error
    lines: list[str] = []
    for line in text.splitlines():
        if _PROXY.match(line):
            line = line.replace("%", _PERCENT)  # noqa: PLW2901 - see proxy_command
        match = _INCLUDE.match(line)
        if match is None:
            lines.append(line)
            continue
        for pattern in match[1].split():
            files = str(base / Path(pattern.strip('"')).expanduser())
            for found in sorted(glob.glob(files)):  # noqa: PTH207 - Path.glob wants a relative pattern
                lines += _lines(Path(found), base, depth + 1)
    return lines
