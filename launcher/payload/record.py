"""What a supervised server is, as files in VLAUNCH_STATE: what is wanted, how it is, and what last answered.

Standard library only; used by the supervisors inside the containers. Every file is JSON and is replaced whole, so that a reader
never sees half of one. `head.py` reads them for the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

FOLDER = os.environ.get("VLAUNCH_STATE", "/var/lib/vlaunch")
WANTED = "wanted.json"  # what should be served, until somebody stops it
SERVER = "server.json"  # how it is
ANSWERED = "answered.json"  # what has answered, newest first
LOCK = "lock"  # held by whoever submits a server
MOUNTS = os.environ.get("VLAUNCH_MOUNTS", "/proc/self/mountinfo")  # where a container's own id can be seen
HISTORY = 5  # servers that have answered
FAULTS = 20  # faults that are kept
EVIDENCE = 2000  # characters of one fault's evidence


def read(name: str, folder: str = "") -> Any:
    """Return what a file holds, or None when it is absent or no JSON."""
    try:
        with open(os.path.join(folder or FOLDER, name), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def write(name: str, value: object, folder: str = "", *, durable: bool = True) -> None:
    """Replace a file whole, and see that it is on the disk: what is wanted must outlive a power cut."""
    path = os.path.join(folder or FOLDER, name)
    part = f"{path}.{os.getpid()}"
    try:
        with open(part, "w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise


def remove(name: str, folder: str = "") -> None:
    """Remove a file that may not be there."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(folder or FOLDER, name))


def container() -> str:
    """Return the id of the container that this runs in, which a restart keeps; empty where nothing says it.

    Docker mounts three files of the container's own folder. With the host's network its name is the host's.
    """
    try:
        with open(MOUNTS, encoding="utf-8", errors="replace") as file:
            mounts = [line.split()[3:5] for line in file]  # what is mounted, and where
    except OSError:
        return ""
    ids = [re.findall("[0-9a-f]{64}", what) for what, where in mounts if where in ("/etc/hostname", "/etc/hosts")]
    return next((found[-1] for found in ids if found), "")


def replaced(before: Mapping[str, Any]) -> bool:
    """True when that record was written in another container: somebody has put this one in its place."""
    own = container()
    return bool(own and before.get("container")) and before["container"] != own


def wants(wanted: Mapping[str, Any], folder: str = "") -> bool:
    """True while nobody has stopped this server or asked for another one."""
    now = read(WANTED, folder)
    return bool(now) and now.get("id") == wanted.get("id")


def forget(wanted: Mapping[str, Any], folder: str = "") -> None:
    """Do not want a server any more, unless another one is wanted by now, or the same one under a later job."""
    now = read(WANTED, folder) or {}
    if all(now.get(name) == wanted.get(name) for name in ("id", "job")):
        remove(WANTED, folder)


@contextlib.contextmanager
def locked(folder: str = "") -> Iterator[None]:
    """Let only one process at a time decide what is served; the kernel frees the lock of one that was killed."""
    with open(os.path.join(folder or FOLDER, LOCK), "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def answered(wanted: Mapping[str, Any], folder: str = "", clock: Callable[[], float] = time.time) -> None:
    """Note that this server has answered; the same one is noted once, with its last time."""
    kept = [each for each in read(ANSWERED, folder) or [] if each["wanted"].get("id") != wanted.get("id")]
    write(ANSWERED, [{"at": clock(), "wanted": dict(wanted)}, *kept][:HISTORY], folder)


def renew(wanted: Mapping[str, Any], folder: str = "", clock: Callable[[], float] = time.time) -> None:
    """Begin the record of a server that somebody asks for: what is known of it stays, all its restarts are left."""
    said = read(SERVER, folder) or {}
    if said.get("id") == wanted.get("id"):
        anew = {"restarts": [], "state": "starting", "doing": "", "since": clock(), "written": clock()}
        write(SERVER, {**said, **anew, "restarts_left": int((wanted.get("policy") or {}).get("restarts", 3))}, folder)
    else:
        remove(SERVER, folder)


class Record:
    """How a supervised server is: its state, its faults, and how many restarts are left.

    `state` is one of starting, ready, recovering (the engine is being stopped, or the cluster is not whole yet), gave-up and
    stopped.
    Times are seconds since 1970.
    """

    def __init__(
        self, wanted: Mapping[str, Any], job: str = "", folder: str = "", clock: Callable[[], float] = time.time,
        *, state: str = "starting",
    ) -> None:  # fmt: skip
        self.folder, self.clock = folder, clock
        before = read(SERVER, folder) or {}
        same = before.get("id") == wanted.get("id")  # a head that was restarted goes on with the same server
        policy = wanted.get("policy") or {}
        self.most, self.window = int(policy.get("restarts", 3)), float(policy.get("window", 3600))
        self.said: dict[str, Any] = {
            "version": 1, "id": wanted.get("id"), "model": wanted.get("model"), "job": job, "pid": os.getpid(),
            "container": container(),
            "state": state, "since": clock(), "doing": "", "ready_at": None, "canary": None,
            "restarts": list(before.get("restarts", ())) if same else [],
            "faults": list(before.get("faults", ())) if same else [],
        }  # fmt: skip
        self.save()

    def save(self, *, durable: bool = True) -> None:
        """Write the record. A disk that is full must not end the server: the supervisor goes on without one."""
        recent = [each for each in self.said["restarts"] if each >= self.clock() - self.window]
        self.said["restarts"] = recent
        self.said["restarts_left"] = max(0, self.most - len(recent))
        self.said["written"] = self.clock()
        with contextlib.suppress(OSError):
            write(SERVER, self.said, self.folder, durable=durable)

    def alive(self, seconds: float, in_flight: int | None) -> None:
        """Write down that a canary came back after so many seconds, and how many requests the server had then."""
        self.said["canary"] = {"at": self.clock(), "seconds": round(seconds, 3), "in_flight": in_flight}
        self.save(durable=False)

    def set(self, state: str, doing: str = "", **more: object) -> None:
        """Change the state and say what is being done or waited for."""
        if state != self.said["state"]:
            self.said["since"] = self.clock()
        self.said.update(state=state, doing=doing, **more)
        self.save()

    def fault(self, what: str, *, node: str = "", rank: str = "", evidence: str = "", in_flight: int | None = None) -> None:
        """Write down that the server is dead, why, and how many requests it had: they are lost."""
        self.said["faults"] = [
            *self.said["faults"],
            {
                "at": self.clock(), "what": what, "node": node, "rank": rank, "evidence": evidence[-EVIDENCE:],
                "in_flight": in_flight, "last_good": (self.said["canary"] or {}).get("at"), "phases": {},
                "ready_again_after": None,
            },
        ][-FAULTS:]  # fmt: skip
        self.save()

    def reached(self, phase: str) -> None:
        """Write down how many seconds after the last fault a phase of the recovery was over: stopped, whole, or started."""
        last = self.said["faults"][-1] if self.said["faults"] else None
        if last is not None and last["ready_again_after"] is None and phase not in last.setdefault("phases", {}):
            last["phases"][phase] = round(self.clock() - last["at"], 3)
            self.save()

    def ready(self) -> None:
        """Write down that a completion has come back, which ends every fault since the last one."""
        now = self.clock()
        for each in self.said["faults"]:
            if each["ready_again_after"] is None:
                each["ready_again_after"] = round(now - each["at"], 3)
        self.set("ready", ready_at=now)

    def may_restart(self) -> bool:
        """Take one restart from the budget; False when none is left."""
        self.save()
        if self.said["restarts_left"] == 0:
            return False
        self.said["restarts"].append(self.clock())
        self.save()
        return True
