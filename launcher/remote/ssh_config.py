"""`~/.ssh/config`, with the `Include` lines that paramiko leaves out."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import Final

import paramiko

from launcher.errors import RequestError
from launcher.model import Node

_INCLUDE: Final = re.compile(r"^\s*include[\s=]+(.+?)\s*$", re.IGNORECASE)
_PROXY: Final = re.compile(r"^\s*proxycommand\b", re.IGNORECASE)
_PORT: Final = re.compile(r"^\s*port(?:\s*=\s*|\s+)(.+?)\s*(?:\s#.*)?$", re.IGNORECASE)
_PERCENT: Final = "\x01"
_DEPTH: Final = 16  # as ssh_config(5) readers do, against files that include each other


def load() -> paramiko.SSHConfig:
    """Read the user's file and then the system's, as ssh(1) does; raises RequestError for one that
    cannot be understood.
    """
    text: list[str] = []
    for file in (Path.home() / ".ssh" / "config", Path("/etc/ssh/ssh_config")):
        text += ["Host *", *_lines(file, file.parent, 0)]
    try:
        return paramiko.SSHConfig.from_text("\n".join(text))
    except paramiko.SSHException as error:
        raise RequestError(
            "the ssh configuration cannot be read", evidence=str(error), hint="ssh -G HOST"
        ) from error


def port_of(config: paramiko.SSHConfig, node: Node) -> int:
    """Return the port that a node's SSH is reached at: the inventory's, else the
    configuration's.
    """
    return node.ssh.port or int(config.lookup(node.host).get("port", 22))


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
        raise RequestError(
            f"{file}: cannot be read", evidence=str(error), hint=f"ls -l {file}"
        ) from error
    lines: list[str] = []
    for number, written in enumerate(text.splitlines(), 1):
        line = _port(file, number, written)
        if _PROXY.match(line):
            line = line.replace("%", _PERCENT)  # see proxy_command
        match = _INCLUDE.match(line)
        if match is None:
            lines.append(line)
            continue
        for pattern in match[1].split():
            files = str(base / Path(pattern.strip('"')).expanduser())
            # Path.glob wants a relative pattern
            for found in sorted(glob.glob(files)):  # noqa: PTH207
                lines += _lines(Path(found), base, depth + 1)
    return lines


def _port(file: Path, number: int, line: str) -> str:
    """Refuse a port that is none, for whichever host it is meant, as ssh(1) does; paramiko takes a
    comment for a part of it.
    """
    if (match := _PORT.match(line)) is None:
        return line
    value = match[1].strip('"')
    if not re.fullmatch("[0-9]{1,5}", value) or not 1 <= int(value) <= 65535:
        raise RequestError(
            f"{file}:{number}: `Port {value}` is no port",
            evidence=line.strip(),
            hint="write a number from 1 to 65535",
        )
    return f"Port {value}"
