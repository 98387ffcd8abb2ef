"""Files of servers: a folder for each in VLAUNCH_STATE, with its spec, its status, its history and
its log.

Files are JSON and replaced atomically. The folder is mounted from the node: a reboot, or a new
container, finds the earlier files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
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
HISTORY_LENGTH = 5  # servers that have answered
GROUP = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")  # name of a group of replicas
NAME = re.compile(rf"{GROUP.pattern}(?:\.(?:[2-9]|[1-9][0-9]{{1,3}}))?")  # of a server: a replica
# where a container's own id can be seen
_MOUNTS = os.environ.get("VLAUNCH_MOUNTS", "/proc/self/mountinfo")


def server_names(folder: str = "") -> list[str]:
    """Return the names of all servers with a folder."""
    try:
        entries = list(os.scandir(folder or FOLDER))
    except OSError:
        return []
    return sorted(entry.name for entry in entries if NAME.fullmatch(entry.name) and entry.is_dir())


def group_of(name: str) -> str:
    """Return the group of a server: the replicas of `chat` are `chat`, `chat.2`, `chat.3` …"""
    return name.partition(".")[0]


def replica_number(name: str) -> int:
    """Return a server's number in its group."""
    return int(name.partition(".")[2] or 1)


def replica_name(group: str, number: int) -> str:
    """Return the name of a replica."""
    return group if number == 1 else f"{group}.{number}"


def server_file(name: str, file: str, folder: str = "") -> str:
    """Return the path of a server's file."""
    return os.path.join(folder or FOLDER, name, file)


def read_json(file: str) -> Any:
    """Return the content of a JSON file; None if it is absent or invalid."""
    try:
        with open(file, encoding="utf-8") as opened:
            return json.load(opened)
    except (OSError, ValueError, RecursionError):
        return None


def write_json(file: str, value: object, *, durable: bool = True) -> None:
    """Replace a JSON file like `write_text`."""
    write_text(file, json.dumps(value), durable=durable)


def write_text(file: str, text: str, *, durable: bool = True) -> None:
    """Replace a file atomically; with `durable`, sync it to the disk. Raises OSError."""
    part = f"{file}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(part, "w", encoding="utf-8") as opened:
            opened.write(text)
            if durable:
                opened.flush()
                os.fsync(opened.fileno())
        os.replace(part, file)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise


def read_spec(name: str, folder: str = "") -> Desired | None:
    """Return the spec of a server; raise ValueError for an unreadable file, such as one of another
    version of vlaunch.
    """
    file = server_file(name, DESIRED, folder)
    payload = read_json(file)
    if payload is None and os.path.exists(file):
        raise ValueError("it is not valid JSON")
    return None if payload is None else desired.parse_spec(payload)


def read_status(name: str, folder: str = "") -> Observed | None:
    """Return the last status of a server, as the supervisor wrote it."""
    try:
        return observed.parse_status(read_json(server_file(name, OBSERVED, folder)))
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """A server that has answered, the time of its last first answer, its KV cache capacity, and its
    longest step in seconds.
    """

    at: float
    desired: Desired
    held: Mapping[str, str] = field(default_factory=dict)
    longest_step: float = 0.0


def note_answered(newest: HistoryEntry, folder: str = "") -> None:
    """Add a server to the front of the history; each server is listed once."""
    server = newest.desired
    others = [
        entry for entry in _read_history(server.name, folder) if entry.desired.id != server.id
    ]
    entries = [asdict(entry) for entry in (newest, *others)]
    write_json(server_file(server.name, HISTORY, folder), entries[:HISTORY_LENGTH])


def longest_step(name: str, server: str, folder: str = "") -> float:
    """Return the longest step in seconds of the server with this id; 0 if unknown."""
    history = _read_history(name, folder)
    return next((entry.longest_step for entry in history if entry.desired.id == server), 0.0)


def _read_history(name: str, folder: str) -> list[HistoryEntry]:
    """Return the servers that have answered under a name."""
    try:
        return records.parse_record(
            list[HistoryEntry], read_json(server_file(name, HISTORY, folder)), "history"
        )
    except ValueError:
        return []


def container_id() -> str:
    """Return the id of this container, which survives a restart; empty if unknown.

    Docker mounts three files of the container's own folder. With the host's network its hostname is
    the host's.
    """
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as file:
            mounts = [line.split()[3:5] for line in file]  # source and mount point
    except OSError:
        return ""
    ids = [
        re.findall("[0-9a-f]{64}", source)
        for source, mount_point in mounts
        if mount_point in ("/etc/hostname", "/etc/hosts")
    ]
    return next((matches[-1] for matches in ids if matches), "")


@functools.cache
def program_digest() -> str:
    """Return the sha256 of this agent's archive, which stays open when an upgrade replaces it (see
    `entry.sh`); empty if the agent runs from plain files.
    """
    archive = getattr(globals().get("__loader__"), "archive", "")
    try:
        with open(archive, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""
