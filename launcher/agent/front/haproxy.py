"""HAProxy in the front of this node: servers enter and leave rotation, and their requests are
counted. The head's agent decides the states (`rotation.py`).

The front's folder is mounted from the node; a node without it has no front. A state without an
order stays as it is, also while the head cannot be reached.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..background import Background
from ..log import LimitedLog
from ..records import Count
from ..state import write_text

# ready: gets requests. drain: finishes those in progress. maint: gets none.
READY, DRAIN, MAINT = "ready", "drain", "maint"
FOLDER, _SOCKET, _MASTER = ".front", "haproxy.sock", "master.sock"
STATES = "replicas.states"  # file that HAProxy reads at its start
_TIMEOUT = 5.0  # seconds for an answer of HAProxy
_FORCED_MAINT, _FORCED_DRAIN = 1, 8  # bits of `srv_admin_state`
_OLD_WORKERS = re.compile(r"^(\d+) ", re.MULTILINE)
_NOT_RUNNING = (FileNotFoundError, ConnectionRefusedError)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """A server in a front: its state, and its requests in progress."""

    state: str
    requests: Count = 0


class Front:
    """The front of this node; `report` has its servers, None if the node has no front.

    HAProxy is queried in a thread: it must not block the agent.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.join(folder, FOLDER)
        self.report: Mapping[str, Rotation] | None = None
        self._targets: dict[str, str] = {}
        self._saved: str | None = None  # in the file of states
        self._sync: Background[Mapping[str, Rotation]] | None = None
        self._log = LimitedLog()

    def tick(self, states: Mapping[str, str]) -> None:
        """Bring HAProxy in line with the states, and note its report."""
        self._targets |= states
        sync = self._sync
        if sync is not None and not sync.done:
            return
        if sync is not None and sync.value is not None:
            self.report = sync.value
        elif sync is not None:
            self._log.say(f"cannot query the front: {sync.error}")
        if not os.path.isdir(self.folder):
            self.report, self._sync = None, None
            return
        targets = dict(self._targets)
        self._sync = Background(lambda: self._synchronize(targets))

    def _synchronize(self, targets: Mapping[str, str]) -> Mapping[str, Rotation]:
        """Set the states that differ, and return those before: the next report confirms them."""
        try:
            table = self._query(_SOCKET, "show servers state")
        except _NOT_RUNNING:
            return {}
        # a version, and a line of names after `# `
        rows = csv.DictReader(table.partition("# ")[2].split("\n"), delimiter=" ")
        replicas = [row for row in rows if _is_replica(row["be_name"], row["srv_name"])]
        requests = self._count_requests()
        rotations: dict[str, Rotation] = {}
        for row in replicas:
            name, current = _server_of(row["srv_name"]), _admin_state(row)
            target = targets.get(name, current)
            if target != current:
                self._set_state(f"{row['be_name']}/{row['srv_name']}", target)
            if name not in rotations or current == READY:
                rotations[name] = Rotation(state=current, requests=requests.get(name, 0))
        self._save(replicas)
        return rotations

    def _set_state(self, replica: str, target: str) -> None:
        # A ready server has answered: HAProxy need not wait for its own check.
        health = f"; set server {replica} health up" if target == READY else ""
        self._query(_SOCKET, f"set server {replica} state {target}{health}")

    def _count_requests(self) -> dict[str, int]:
        """Count the requests in progress by server, also those of workers before a reload."""
        tables = [self._query(_SOCKET, "show stat -1 4 -1")]
        with contextlib.suppress(*_NOT_RUNNING):
            old_workers = self._query(_MASTER, "show proc").partition("# old workers")[2]
            for pid in _OLD_WORKERS.findall(old_workers.partition("# programs")[0]):
                tables.append(self._query(_MASTER, f"@!{pid} show stat -1 4 -1"))
        requests: dict[str, int] = {}
        for table in tables:
            for row in csv.DictReader(table.partition("# ")[2].split("\n")):
                if _is_replica(row["pxname"], row["svname"]):
                    name = _server_of(row["svname"])
                    requests[name] = requests.get(name, 0) + int(row["scur"])
        return requests

    def _save(self, replicas: Sequence[Mapping[str, str]]) -> None:
        """Write the replicas out of rotation if they have changed: a reload or a restart of HAProxy
        keeps them. Without the file, as on a full disk, it starts with all of them.
        """
        states = {f"{row['be_name']}/{row['srv_name']}": _admin_state(row) for row in replicas}
        text = "".join(f"{name} {state}\n" for name, state in states.items() if state != READY)
        if not replicas or text == self._saved:
            return
        try:
            write_text(os.path.join(self.folder, STATES), text)
            self._saved = text
        except OSError as error:
            self._log.say(f"cannot save the states of the front's replicas: {error}")

    def _query(self, name: str, command: str) -> str:
        """Return HAProxy's answer; raises OSError."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_TIMEOUT)
            client.connect(os.path.join(self.folder, name))
            client.sendall(f"{command}\n".encode())
            client.shutdown(socket.SHUT_WR)  # the master waits for more commands
            with client.makefile(encoding="utf-8", errors="replace") as answer:
                return answer.read()


def _is_replica(backend: str, server: str) -> bool:
    """Return True for a row that is neither the place of waiting requests, nor a copy, nor the
    router: names in capitals are internal.
    """
    return server != "HOLD" and not backend.endswith(".ready") and not backend.isupper()


def _server_of(replica: str) -> str:
    """Return the server of a replica: it is named `SERVER`, or `SERVER:NODE`."""
    return replica.partition(":")[0]


def _admin_state(row: Mapping[str, str]) -> str:
    bits = int(row["srv_admin_state"])
    return MAINT if bits & _FORCED_MAINT else DRAIN if bits & _FORCED_DRAIN else READY
