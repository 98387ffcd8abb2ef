"""What Ray's dashboard says of a server whose ranks Ray runs: if it could start, where its ranks
are, and which one died first.

Standard library only. It decides nothing; whoever cannot be asked raises one of `SILENT`.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import api
from .desired import Ray
from .probe import SILENT
from .rank_name import rank_name

__all__ = ["ENGINE", "SILENT", "Culprit", "Rank", "RayView"]

ENGINE = "an engine"  # what an actor of vLLM's is called that is no rank

# seconds for each of Ray's tables: a dashboard that is always slow must not keep a server down
_PATIENCE = 15.0
# seconds for which Ray may take a node for alive whose port was closed; `containers.py` lets
# it notice in 5
_DEAD = 10.0
_ENGINE = re.compile(r"EngineCore|RayWorker")  # classes of vLLM whose actors have no such name
_CONSEQUENCE = re.compile(
    r"owner .*(?:died|exited)|owner.?has|ray\.kill|job .*finished|driver|intended|out of scope",
    re.I,
)
# v1/executor/ray_executor_v2.py of vLLM 0.32
_DIED = re.compile(r"rank=\[?(\d+)\b.{0,40} died unexpectedly")


@dataclass(frozen=True)
class Rank:
    """A rank that Ray runs: the actor's id, its name for people, its node, and its process
    there.
    """

    actor: str
    name: str
    node: str
    pid: int


@dataclass(frozen=True)
class Culprit:
    """Whose death came first, in Ray's words."""

    node: str
    rank: str
    evidence: str


class RayView:
    """Asks about one server.

    `ray` says where Ray is and how many GPUs the server takes, `addresses` where the nodes are: by
    address, or by a name that another address may have tomorrow.
    """

    def __init__(self, ray: Ray, tp: int, addresses: Mapping[str, str]) -> None:
        self.ray, self.tp, self.addresses = ray, tp, addresses
        self.where = api.Where(dashboard=ray.dashboard)
        self._steady, self._ids = 0, list[str]()
        # Ray's id of a node → when its port was last found closed
        self._closed: dict[str, float] = {}

    @property
    def _names(self) -> dict[str, str]:
        """The nodes' names by their addresses now."""
        return {_address(host): name for name, host in self.addresses.items()}

    def rows(self, what: str, patience: float = _PATIENCE, **filters: str) -> list[dict[str, Any]]:
        """Ask for one of Ray's tables."""
        chosen = "".join(
            f"&filter_keys={key}&filter_predicates=%3D&filter_values={value}"
            for key, value in filters.items()
        )
        answer: Any = api.ray(
            self.where, f"/api/v0/{what}?detail=1&limit=10000{chosen}", timeout=patience
        )
        found: list[dict[str, Any]] = answer["data"]["result"]["result"]
        return found

    def lacking(self, looks: int) -> str:
        """Say what a start still waits for, empty when nothing did for so many looks: nodes, and
        GPUs that are free.
        """
        living = self._living()
        there = [row for row in living if self._listens(row)]
        steady, self._steady = self._steady, 0
        if len(living) > len(there):
            return "waiting until Ray has noticed which nodes are dead"
        if lacking := self._lacking_gpus(there):
            return lacking
        before, self._ids = self._ids, sorted(row["node_id"] for row in there)
        self._steady = steady + 1 if self._ids == before else 1
        return "" if self._steady >= looks else "looking whether the nodes stay in Ray"

    def _lacking_gpus(self, there: list[dict[str, Any]]) -> str:
        """Say that the nodes that are there have too few GPUs, or too few that are free."""
        brought = sum(_gpus(row.get("resources_total")) for row in there)
        if brought < self.ray.gpus:
            gone = ", ".join(self._absent(there)) or "GPUs"
            return f"waiting for {gone} to be in Ray: {brought:g} of {self.ray.gpus:g} GPUs are"
        free = brought - self._held()
        if free < self.ray.gpus:
            return f"waiting until {self.ray.gpus:g} GPUs are free in Ray; {free:g} are"
        return ""

    def _living(self) -> list[dict[str, Any]]:
        """Return the nodes of this cluster that Ray takes for alive."""
        rows, names = self.rows("nodes"), self._names
        return [each for each in rows if each["state"] == "ALIVE" and each["node_ip"] in names]

    def _absent(self, there: list[dict[str, Any]]) -> list[str]:
        """Return the names of the nodes that are not among these."""
        here = {row["node_ip"] for row in there}
        return sorted(name for ip, name in self._names.items() if ip not in here)

    def _listens(self, row: Mapping[str, Any]) -> bool:
        """True for a node that is what Ray says, alive.

        Ray notices some seconds late that a container has died.

        Its port is closed at once, but open again, of another node, before Ray has noticed.
        """
        now = time.monotonic()
        if not _reachable(row["node_ip"], self.ray.node_manager):
            self._closed[row["node_id"]] = now
        return now - self._closed.get(row["node_id"], -_DEAD) >= _DEAD

    def _held(self) -> float:
        """Return how many GPUs of Ray's are taken, by placement groups and by actors without."""
        held = [
            bundle.get("unit_resources")
            for row in self.rows("placement_groups")
            if row.get("state") not in ("REMOVED", "PENDING", "INFEASIBLE")
            for bundle in row.get("bundles") or ()
        ]
        held += [
            row.get("required_resources")
            for row in self.rows("actors", state="ALIVE")
            if not row.get("placement_group_id")
        ]
        return sum(map(_gpus, held))

    def ranks(self, driver: int) -> list[Rank]:
        """Return the living ranks that the process `driver`, or a child of it, has started; all of
        them if Ray cannot tell.
        """
        homes = self._homes()
        found = [
            (row, name) for row in self.rows("actors", state="ALIVE") if (name := _rank_name(row))
        ]
        own = self._jobs(driver)
        if own:
            found = [(row, name) for row, name in found if str(row.get("job_id")) in own]
        elif len({row.get("job_id") for row, _ in found}) > 1:
            return []  # of several drivers: whose is whose nobody knows
        return [
            Rank(
                str(row["actor_id"]),
                name,
                homes.get(row.get("node_id", ""), ""),
                int(row.get("pid") or 0),
            )
            for row, name in found
        ]

    def _homes(self) -> dict[str, str]:
        """Return the names of nodes by Ray's ids of them."""
        rows, names = self.rows("nodes"), self._names
        return {row["node_id"]: names.get(row["node_ip"], row["node_ip"]) for row in rows}

    def _jobs(self, driver: int) -> set[str]:
        """Return Ray's jobs that the process `driver`, or a child of it, has begun."""
        jobs: Any = api.ray(self.where, "/api/jobs/", timeout=_PATIENCE)
        drivers = {
            str((each.get("driver_info") or {}).get("pid")): str(each.get("job_id"))
            for each in jobs
            if isinstance(each, dict)
        }
        return {
            job for pid, job in drivers.items() if pid.isdigit() and _same_session(int(pid), driver)
        }

    def culprit(self, ranks: list[Rank], evidence: str) -> Culprit | None:
        """Return the rank that died of itself; the others were ended with the engine.

        None when nobody knows.
        """
        return self._dead(ranks) or self._unreachable(ranks) or self._accused(ranks, evidence)

    def _dead(self, ranks: list[Rank]) -> Culprit | None:
        table = {row["node_ip"]: row for row in self.rows("nodes", 3) if row["state"] == "ALIVE"}
        alive = {row["actor_id"] for row in self.rows("actors", 3, state="ALIVE")}
        rows = {row["actor_id"]: row for row in self.rows("actors", 3)}
        for rank in ranks:
            if (host := self.addresses.get(rank.node)) and _address(host) not in table:
                return Culprit(rank.node, rank.name, "its node is gone from Ray")
            words = _words(rows.get(rank.actor, {}).get("death_cause"))
            if rank.actor not in alive and _of_itself(words):
                return Culprit(rank.node, rank.name, words)
        return None

    def _unreachable(self, ranks: list[Rank]) -> Culprit | None:
        """Return a rank whose node has just died: the engine may notice before Ray does, and ends
        the other ranks.
        """
        for rank in ranks:
            ip = self.addresses.get(rank.node)
            if ip and not _reachable(ip, self.ray.node_manager):
                said = (
                    f"nothing listens on {ip}:{self.ray.node_manager}: its container is gone, or"
                    " its network"
                )
                return Culprit(rank.node, rank.name, said)
        return None

    def _accused(self, ranks: list[Rank], evidence: str) -> Culprit | None:
        """Return the rank that vLLM's log names as dead: a container may be back before anybody has
        seen its port closed.
        """
        match = _DIED.search(evidence)
        if match is None:
            return None
        stage, part = divmod(int(match[1]), self.tp)
        for rank in ranks:
            place = dict(re.findall(r"([A-Z]+)(\d+)", rank.name))
            # Each replica counts its ranks from 0, and its lines do not say whose they are.
            if "DP" not in place and (int(place.get("PP", 0)), int(place.get("TP", 0))) == (
                stage,
                part,
            ):
                return Culprit(rank.node, rank.name, "")
        return None


def _address(host: str) -> str:
    """Return the address that a name has now; an address, or a name that has none, is returned."""
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return host


def _gpus(resources: Any) -> float:
    return float((resources or {}).get("GPU", 0))


def _of_itself(death: str) -> bool:
    """True for what Ray says of a death that no other brought about."""
    return bool(death) and not _CONSEQUENCE.search(death)


def _reachable(ip: str, port: int) -> bool:
    try:
        with socket.create_connection((ip, port), timeout=3):
            return True
    except OSError:
        return False


def _same_session(pid: int, session: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[3]) == session
    except (OSError, ValueError, IndexError):
        return False


def _rank_name(row: Mapping[str, Any]) -> str:
    """Return the name of the rank that an actor is; empty when it is none of vLLM's."""
    if name := rank_name(row.get("name") or ""):
        return name
    return ENGINE if _ENGINE.search(row.get("class_name") or "") else ""


def _words(cause: Any) -> str:
    """Return what Ray says of a death, from whichever of its forms."""
    if not isinstance(cause, dict):
        return str(cause or "")
    for each in cause.values():
        if isinstance(each, dict):
            said = (
                each.get("error_message")
                or each.get("reason")
                or each.get("formatted_exception_string")
            )
            if said:
                return " ".join(str(said).split())[:600]
    return json.dumps(cause)[:300]
