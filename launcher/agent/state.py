"""The files of servers: a folder of each in VLAUNCH_STATE, with its spec, its status, the servers
that have answered before, and its log.

Files are JSON and are replaced as a whole, so that a reader never sees half of one. The folder is
mounted from the node: a reboot, or a new container, finds the files of before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from . import desired, observed, records
from .desired import Desired
from .observed import Observed

FOLDER = os.environ.get("VLAUNCH_STATE", "/var/lib/vlaunch")
DESIRED, OBSERVED, HISTORY, LOG = "desired.json", "observed.json", "history.json", "engine.log"
NETWORK = "network.json"  # the last verdict of a network check, which the launcher writes
# where the launcher queries an agent, in its container
SOCKET = os.environ.get("VLAUNCH_AGENT_SOCKET", "/tmp/vlaunch-agent.sock")
KEPT = 5  # servers that have answered
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
# where a container's own id can be seen
_MOUNTS = os.environ.get("VLAUNCH_MOUNTS", "/proc/self/mountinfo")


def names(folder: str = "") -> list[str]:
    """Return the names of all servers that have a folder."""
    try:
        entries = list(os.scandir(folder or FOLDER))
    except OSError:
        return []
    return sorted(entry.name for entry in entries if NAME.fullmatch(entry.name) and entry.is_dir())


def path(name: str, file: str, folder: str = "") -> str:
    """Return the path of a server's file."""
    return os.path.join(folder or FOLDER, name, file)


def read(file: str) -> Any:
    """Return what a file holds, or None when it is absent or no JSON."""
    try:
        with open(file, encoding="utf-8") as opened:
            return json.load(opened)
    except (OSError, ValueError, RecursionError):
        return None


def write(file: str, value: object, *, durable: bool = True) -> None:
    """Replace a file whole; when `durable`, see that it is on the disk."""
    part = f"{file}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(part, "w", encoding="utf-8") as opened:
            json.dump(value, opened)
            if durable:
                opened.flush()
                os.fsync(opened.fileno())
        os.replace(part, file)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise


def wanted(name: str, folder: str = "") -> Desired | None:
    """Return the server that is wanted under a name; raises ValueError where the file is of another
    version.
    """
    payload = read(path(name, DESIRED, folder))
    return None if payload is None else desired.read(payload)


def seen(name: str, folder: str = "") -> Observed | None:
    """Return how the server of that name is, as the keeper wrote it last."""
    try:
        return observed.read(read(path(name, OBSERVED, folder)))
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A server that has answered, when it did last, what its KV cache holds, and the seconds of its
    longest step.
    """

    at: float
    desired: Desired
    held: Mapping[str, str] = field(default_factory=dict)
    longest_step: float = 0.0


def note_answered(newest: Answered, folder: str = "") -> None:
    """Note that a server has answered, newest first; the same one is noted once."""
    server = newest.desired
    others = [entry for entry in _history(server.name, folder) if entry.desired.id != server.id]
    entries = [asdict(entry) for entry in (newest, *others)]
    write(path(server.name, HISTORY, folder), entries[:KEPT])


def longest_step(name: str, server: str, folder: str = "") -> float:
    """Return the seconds of the longest step of the server with such an id; 0 where none is
    known.
    """
    history = _history(name, folder)
    return next((entry.longest_step for entry in history if entry.desired.id == server), 0.0)


def _history(name: str, folder: str) -> list[Answered]:
    """Return the servers that have answered under a name."""
    try:
        return records.read(list[Answered], read(path(name, HISTORY, folder)), "history")
    except ValueError:
        return []


def container() -> str:
    """Return the id of the container that this runs in, which a restart keeps; empty where nothing
    says it.

    Docker mounts three files of the container's own folder. With the host's network its name is the
    host's.
    """
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as file:
            mounts = [line.split()[3:5] for line in file]  # what is mounted, and where
    except OSError:
        return ""
    ids = [
        re.findall("[0-9a-f]{64}", source)
        for source, mount_point in mounts
        if mount_point in ("/etc/hostname", "/etc/hosts")
    ]
    return next((matches[-1] for matches in ids if matches), "")
