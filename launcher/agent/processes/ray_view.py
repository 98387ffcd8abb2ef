"""Ray's view of a server whose ranks it runs: readiness for a start, the ranks' nodes, and the
first dead rank.

It decides nothing; a dashboard that does not answer raises one of `probe.QUERY_ERRORS`.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import upstream
from ..desired import Ray
from ..health import api
from ..health.api import is_reachable
from . import process, ray_driver
from .rank_name import rank_name

ENGINE = "an engine"  # the name of an actor of vLLM's that is no rank

# seconds for each of Ray's tables: a dashboard that is always slow must not keep a server down
_PATIENCE = 15.0
# seconds for which Ray may take a node for alive whose port was closed; `containers.py` lets
# it notice in 5
_DEAD = 10.0
# actor classes of vLLM without such a name
_ENGINE = re.compile(upstream.any_of("vllm.actor-engine", "vllm.actor-rank"))
_CONSEQUENCE = re.compile(upstream.text("ray.death-consequence"), re.I)
_DIED = re.compile(upstream.text("vllm.rank-died-number"))


@dataclass(frozen=True)
class RayRank:
    """A rank that Ray runs: the actor's id, its display name, its node, and its process there."""

    actor: str
    name: str
    node: str
    pid: int


@dataclass(frozen=True)
class Culprit:
    """The rank that died first, with Ray's evidence."""

    node: str
    rank: str
    evidence: str


class RayView:
    """Queries about one server.

    `ray` has Ray's ports and how many GPUs the server takes, `addresses` the nodes' addresses, or
    names that may resolve to other addresses later.
    """

    def __init__(self, ray: Ray, tp: int, addresses: Mapping[str, str]) -> None:
        self.ray, self.tp, self.addresses = ray, tp, addresses
        self.where = api.QueryTarget(dashboard=ray.dashboard)
        self._steady, self._ids = 0, list[str]()
        # Ray's id of a node → when its port was last closed
        self._closed: dict[str, float] = {}
        self._reached = set[
            str
        ]()  # Ray's ids of nodes that the GCS has reached since they returned

    @property
    def _names(self) -> dict[str, str]:
        """Nodes' names by their current addresses."""
        return {_resolve(host): name for name, host in self.addresses.items()}

    def query_table(
        self, table: str, patience: float = _PATIENCE, **filters: str
    ) -> list[dict[str, Any]]:
        """Return one of Ray's tables."""
        return api.query_ray_table(self.where, table, patience, **filters)

    def missing_reason(self, looks: int) -> str:
        """Return what a start still waits for (nodes, free GPUs); empty if nothing was missing
        `looks` times in a row.
        """
        names = self._names
        rows = [row for row in self.query_table("nodes") if row["node_ip"] in names]
        living = [row for row in rows if row["state"] == "ALIVE"]
        listening = [row for row in living if self._is_alive(row)]
        steady, self._steady = self._steady, 0
        if len(living) > len(listening):
            return "waiting for Ray to detect dead nodes"
        if reason := self._gpus_reason(listening):
            return reason
        before, self._ids = self._ids, sorted(row["node_id"] for row in listening)
        self._steady = steady + 1 if self._ids == before else 1
        if self._steady < looks:
            return "checking that the nodes stay in Ray"
        dead = {row["node_ip"] for row in rows if row["state"] == "DEAD"}
        return self._unreached_reason([row for row in listening if row["node_ip"] in dead])

    def _gpus_reason(self, listening: list[dict[str, Any]]) -> str:
        """Return which GPUs are missing or in use; empty if there are enough."""
        names, needed = self._names, self.ray.gpus
        total = sum(_gpu_count(row.get("resources_total")) for row in listening)
        if total < needed:
            missing = names.keys() - {row["node_ip"] for row in listening}
            nodes = ", ".join(sorted(names[ip] for ip in missing)) or "GPUs"
            return f"waiting for {nodes} to join Ray: it has {total:g} of {needed:g} GPUs"
        free = total - self._used_gpus()
        return (
            f"waiting for {needed:g} free GPUs in Ray; {free:g} are free" if free < needed else ""
        )

    def _unreached_reason(self, returned: list[dict[str, Any]]) -> str:
        """Return the reason why a start waits for nodes that have returned to Ray."""
        ids = {row["node_ip"]: row["node_id"] for row in returned}
        ids = {ip: node_id for ip, node_id in ids.items() if node_id not in self._reached}
        code, output = ray_driver.run("reach", *ids) if ids else (0, "")
        if code == 0:
            self._reached.update(ids.values())
            return ""
        nodes = ", ".join(sorted(self._names.get(ip, ip) for ip in ids))
        error = str(ray_driver.parse_output(output).get("error"))
        return f"waiting for Ray's GCS to reach {nodes}: {' '.join(error.split())[:200]}"

    def _is_alive(self, row: Mapping[str, Any]) -> bool:
        """True for a node that is alive in Ray.

        Ray notices some seconds late that a container has died. Its port is closed at once, but may
        be open again, for another node, before Ray has noticed.
        """
        now = time.monotonic()
        if not is_reachable(row["node_ip"], self.ray.node_manager):
            self._closed[row["node_id"]] = now
        return now - self._closed.get(row["node_id"], -_DEAD) >= _DEAD

    def _used_gpus(self) -> float:
        """Return how many of Ray's GPUs are in use, by placement groups and by other actors."""
        resources = [
            bundle.get("unit_resources")
            for row in self.query_table("placement_groups")
            if row.get("state") not in ("REMOVED", "PENDING", "INFEASIBLE")
            for bundle in row.get("bundles") or ()
        ]
        resources += [
            row.get("required_resources")
            for row in self.query_table("actors", state="ALIVE")
            if not row.get("placement_group_id")
        ]
        return sum(map(_gpu_count, resources))

    def query_ranks(self, driver: int) -> list[RayRank]:
        """Return the living ranks that the process `driver`, or a child of it, has started; all
        ranks if Ray cannot tell.
        """
        names = self._names
        nodes_by_id = {
            row["node_id"]: names.get(row["node_ip"], row["node_ip"])
            for row in self.query_table("nodes")
        }
        actors = [row for row in self.query_table("actors", state="ALIVE") if _rank_name(row)]
        jobs: Any = api.query_ray(self.where, upstream.text("ray.route-jobs"), timeout=_PATIENCE)
        session = set(map(str, process.session_pids(driver)))
        jobs_of_driver = {
            str(job.get("job_id"))
            for job in jobs
            if isinstance(job, dict) and str((job.get("driver_info") or {}).get("pid")) in session
        }
        if jobs_of_driver:
            actors = [row for row in actors if str(row.get("job_id")) in jobs_of_driver]
        elif len({row.get("job_id") for row in actors}) > 1:
            return []  # of several drivers: their owners are unknown
        return [
            RayRank(
                str(row["actor_id"]),
                _rank_name(row),
                nodes_by_id.get(row.get("node_id", ""), ""),
                int(row.get("pid") or 0),
            )
            for row in actors
        ]

    def find_culprit(self, ranks: list[RayRank], evidence: str) -> Culprit | None:
        """Return the rank that died by itself; the others were stopped. None if unknown."""
        if culprit := self._find_dead(ranks):
            return culprit
        # The engine may notice a node's death before Ray does, and ends the other ranks.
        port = self.ray.node_manager
        for rank in ranks:
            ip = self.addresses.get(rank.node)
            if ip and not is_reachable(ip, port):
                why = f"nothing listens on {ip}:{port}: its container or network is down"
                return Culprit(rank.node, rank.name, why)
        # A container may be back before its port was tried: vLLM's log names the rank. Replicas
        # number their ranks from 0, and their lines do not tell of which replica they are.
        match = _DIED.search(evidence)
        for rank in ranks if match else ():
            place = dict(re.findall(r"([A-Z]+)(\d+)", rank.name))
            number = int(place.get("PP", 0)) * self.tp + int(place.get("TP", 0))
            if match and "DP" not in place and number == int(match[1]):
                return Culprit(rank.node, rank.name, "")
        return None

    def _find_dead(self, ranks: list[RayRank]) -> Culprit | None:
        """Return the rank whose node or actor is dead in Ray, by itself."""
        nodes = {row["node_ip"] for row in self.query_table("nodes", 3) if row["state"] == "ALIVE"}
        alive = {row["actor_id"] for row in self.query_table("actors", 3, state="ALIVE")}
        deaths = {row["actor_id"]: row.get("death_cause") for row in self.query_table("actors", 3)}
        for rank in ranks:
            if (host := self.addresses.get(rank.node)) and _resolve(host) not in nodes:
                return Culprit(rank.node, rank.name, "its node has left Ray")
            reason = _death_text(deaths.get(rank.actor))
            if rank.actor not in alive and reason and not _CONSEQUENCE.search(reason):
                return Culprit(rank.node, rank.name, reason)
        return None


def _resolve(host: str) -> str:
    """Return the current address of a name; an address, or an unknown name, stays unchanged."""
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return host


def _gpu_count(resources: Any) -> float:
    return float((resources or {}).get("GPU", 0))


def _rank_name(row: Mapping[str, Any]) -> str:
    """Return an actor's rank name; empty if it is none of vLLM's."""
    engine = ENGINE if _ENGINE.search(row.get("class_name") or "") else ""
    return rank_name(row.get("name") or "") or engine


def _death_text(cause: Any) -> str:
    """Return Ray's text for a death, from any of its forms."""
    if not isinstance(cause, dict):
        return str(cause or "")
    keys = ("error_message", "reason", "formatted_exception_string")
    forms = [form.get(key) for form in cause.values() if isinstance(form, dict) for key in keys]
    texts = [" ".join(str(text).split())[:600] for text in forms if text]
    return texts[0] if texts else json.dumps(cause)[:300]
