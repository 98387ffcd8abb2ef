"""What the supervisor asks Ray's dashboard and vLLM's API, all of it on loopback, and what their answers mean.

Standard library only. It decides nothing: `supervisor.py` does. Whoever cannot be asked raises one of `SILENT`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import head

SILENT = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, http.client.HTTPException)
ENDED = "the engine has ended its ranks"
GONE = 10.0  # seconds for which Ray may take a node for alive whose port was closed; `plan/containers.py` lets it notice in 5
PATIENCE = 15.0  # seconds for each of Ray's tables that a start waits for: the record has to be written within a minute
_PROMPT = "Say hello."
_PLACES = "VLLM_RAY_DP_PLACEMENT_NODE_IPS"  # of replicas, as launcher/tools/vllm.py sets it
_RANK = re.compile(r"vllm_Worker_\w*?\d(?:_dp(\d+))?((?:_[A-Z]+\d+)*)")  # as launcher/tools/ray.py reads it
_ENGINE = re.compile(r"EngineCore|RayWorker")  # classes of vLLM whose actors have no such name
_CONSEQUENCE = re.compile(r"owner .*(?:died|exited)|owner.?has|ray\.kill|job .*finished|driver|intended|out of scope", re.I)
_DIED = re.compile(r"rank=\[?(\d+)\b.{0,40} died unexpectedly")  # v1/executor/ray_executor_v2.py of vLLM 0.32
_TELLING = re.compile(
    r"died unexpectedly|encountered a fatal error|EngineDeadError|Error:|Exception:|CUDA error|out of memory|Killed|"
    r"NCCL WARN|Connection closed|Connection reset|SIGSEGV|Segmentation fault|Aborted|timed out"
)
_TALK = re.compile(r"\b(?:WARNING|INFO|DEBUG) \d\d-\d\d ")  # of vLLM: what it goes on after
_PROGRESS = re.compile(
    r"^vllm:(?:generation_tokens_total|prompt_tokens_total|iteration_tokens_total_(?:count|sum)|num_preemptions_total|"
    r"kv_cache_usage_perc|gpu_cache_usage_perc|request_success_total)(?:\{[^\n]*\})? \S+$",
    re.M,
)
_IN_FLIGHT = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^\n]*\})? (\S+)$", re.M)


@dataclass(frozen=True)
class Fault:
    """Why a server is dead: what happened, to which rank on which node, and the words of whoever said so."""

    what: str
    node: str = ""
    rank: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class Counters:
    """What vLLM counts: `progress` is equal exactly when nothing has moved, `in_flight` are the requests it has, if it says."""

    progress: tuple[str, ...]
    in_flight: int | None

    def of(self, replica: int | None) -> tuple[str, ...]:
        """Return the progress of one replica; of all of them for None."""
        return tuple(line for line in self.progress if replica is None or f'engine="{replica}"' in line)


class Still:
    """Since when the whole server has stood still (None), or one of its replicas: completions are late, and no counter moves.

    What others answer and count says nothing about a replica that hangs.
    """

    def __init__(self, timeout: float, stuck: float) -> None:
        self.timeout, self.stuck = timeout, stuck
        self.since: dict[int | None, tuple[float, tuple[str, ...] | None]] = {}  # and what was counted then

    def answered(self, replica: int | None) -> None:
        """Note that a canary has come back."""
        self.since.pop(None, None)
        self.since.pop(replica, None)

    def late(self, replica: int | None, before: Counters | None, after: Counters | None) -> None:
        """Note a canary that did not come back in time, and what was counted while it was awaited."""
        began = time.monotonic() - self.timeout
        for each in {None, replica}:
            since, first = self.since.get(each, (began, None))
            first = first if first is not None or before is None else before.of(each)
            last = None if after is None else after.of(each)
            known = first is not None and last is not None
            # Without counters (`--disable-log-stats`) nobody knows whether it is busy.
            if known and (last != first or not last):
                self.since.pop(each, None)
            elif known or each is None:  # others answer: of a replica only its counters say that it is not busy
                self.since[each] = since, last if first is None else first

    @property
    def longest(self) -> tuple[float, int | None]:
        """For how many seconds something has stood still, and what: a replica, or the whole server, which comes first."""
        now = time.monotonic()
        found = [(now - since, each) for each, (since, _) in self.since.items()]
        return max(found, key=lambda one: (one[0], one[1] is None), default=(0.0, None))

    @property
    def dead(self) -> bool:
        """True when that is so long that it is no long step or late compilation any more."""
        return self.longest[0] >= self.stuck

    @property
    def said(self) -> str:
        """Say it; empty when nothing stands still."""
        still, replica = self.longest
        if replica is not None:
            return f"no completion of replica {replica} came back for {still:.0f}s, and nothing else of it moved"
        return f"no completion came back for {still:.0f}s, and nothing else moved" if self.since else ""


class Canary(threading.Thread):
    """A completion of one token, asked for in the background: `status` and `said` are there when it has ended."""

    def __init__(self, look: Look, timeout: float, replica: int | None) -> None:
        super().__init__(daemon=True)
        self.look, self.timeout, self.replica = look, timeout, replica
        self.status, self.said, self.began, self.seconds = 0, "", time.monotonic(), 0.0
        self.start()

    def run(self) -> None:
        """Ask."""
        try:
            self.status, self.said = head.api(self.look.args, self.look.path, self.look.body, self.timeout, self.replica)
        except SILENT as error:
            self.status, self.said = 0, f"{type(error).__name__}: {error}"
        self.seconds = time.monotonic() - self.began

    @property
    def late(self) -> bool:
        """True when it was the deadline that ended it."""
        return self.status == 0 and "timed out" in self.said


class Look:
    """Asks about one server. `wanted` says where it is (`record.py`), `job` is its Ray job."""

    def __init__(self, wanted: dict[str, Any], job: str = "") -> None:
        self.wanted, self.job = wanted, job
        self.replicas = int((wanted.get("metadata") or {}).get("vlaunch.dp", 1))
        self.args = argparse.Namespace(
            dashboard=wanted["dashboard"], api_host=wanted["api"]["host"], api=wanted["api"]["port"], job=job,
            engines=self.replicas, prompt=_PROMPT, max_tokens=1, timeout=60.0,
        )  # fmt: skip
        self.path, self.body = "/v1/completions", {}
        self.ranks: dict[str, tuple[str, str]] = {}  # Ray's id of each rank's actor → its name and address
        self.driver = ""  # Ray's id of who started them
        self.steady = 0  # looks in a row to which nothing was lacking, and Ray's nodes were the same
        self.ids: list[str] = []  # of these nodes
        self.closed: dict[str, float] = {}  # Ray's id of a node → when its port was last found closed

    def rows(self, what: str, patience: float = 3, **filters: str) -> list[dict[str, Any]]:
        """Ask for one of Ray's tables; `patience` are the seconds for it."""
        chosen = "".join(f"&filter_keys={key}&filter_predicates=%3D&filter_values={value}" for key, value in filters.items())
        answer: Any = head.ray(self.args, f"/api/v0/{what}?detail=1&limit=10000{chosen}", timeout=patience)
        return answer["data"]["result"]["result"]

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return Ray's nodes by address; a living one hides the dead rows that it left behind."""
        table: dict[str, dict[str, Any]] = {}
        for row in self.rows("nodes"):
            if row["state"] == "ALIVE" or row["node_ip"] not in table:
                table[row["node_ip"]] = row
        return table

    # ---- before it can start ----

    def lacking(self) -> str:
        """Say what a start still waits for, empty when nothing: nodes and GPUs, and what a dead server still holds.

        It is patient: a dashboard that is always slow must not keep a server down. `steady` counts.
        """
        steady, self.steady, nodes = self.steady, 0, self.wanted["cluster"]["nodes"]
        living = [row for row in self.rows("nodes", PATIENCE) if row["state"] == "ALIVE" and row["node_ip"] in nodes]
        there = [row for row in living if self._there(row)]
        brought = gpus(there)
        missed = self.missed(brought)
        if gone := [ip for ip in missed if ip not in brought]:
            return f"waiting for {', '.join(gone)} to be in Ray again"
        if len(living) > len(brought):
            return "waiting until Ray has noticed which nodes are dead"
        if missed:
            return f"waiting for GPUs in Ray: {', '.join(f'{ip} ({brought[ip]:g} of {nodes[ip]})' for ip in missed)}"
        free = sum(brought.values()) - self._reserved()
        if free < self.needs:
            return f"waiting until Ray has freed {self.needs:g} GPUs; {free:g} are free"
        before, self.ids = self.ids, sorted(row["node_id"] for row in there)
        self.steady = steady + 1 if self.ids == before else 1
        return ""

    def missed(self, brought: dict[str, float]) -> list[str]:
        """Return the declared nodes that bring too little for the engine to start, when these are there.

        An engine takes GPUs wherever they are, so that nobody misses a spare node; replicas have nodes of their own.
        """
        nodes, places = self.wanted["cluster"]["nodes"], (self.wanted.get("env") or {}).get(_PLACES)
        needed = [] if self.replicas == 1 else places.split(",") if places else nodes
        few = sum(brought.get(ip, 0) for ip in nodes) < self.needs
        return [ip for ip, count in nodes.items() if brought.get(ip, -1) < count and (few or ip in needed)]

    @property
    def needs(self) -> float:
        """How many GPUs the server takes."""
        cluster = self.wanted["cluster"]
        return float(cluster.get("needs") or sum(cluster["nodes"].values()))

    def _there(self, row: dict[str, Any]) -> bool:
        """True for a node that is what Ray says, alive. Ray notices some seconds late that a container has died.

        Its port is closed at once, but open again, of another node, before Ray has noticed.
        """
        port, now = self.wanted["cluster"].get("port"), time.monotonic()
        if port and not head.reachable(f"{row['node_ip']}:{port}"):
            self.closed[row["node_id"]] = now
        return now - self.closed.get(row["node_id"], -GONE) >= GONE

    def _reserved(self) -> float:
        listed = self.rows("placement_groups", PATIENCE)
        groups = [row for row in listed if row.get("state") not in ("REMOVED", "PENDING", "INFEASIBLE")]
        held = [bundle.get("unit_resources") or {} for row in groups for bundle in row.get("bundles") or ()]
        alone = [row for row in self.rows("actors", PATIENCE, state="ALIVE") if not row.get("placement_group_id")]
        held += [row.get("required_resources") or {} for row in alone]
        return sum(float(each.get("GPU", 0)) for each in held)

    # ---- its first answer ----

    def answers(self) -> bool:
        """True when a completion has come back, and one of each replica; what to ask from then on is remembered."""
        try:
            if head.api(self.args, "/health", timeout=5)[0] != 200:
                return False
            said: Any = head.complete(self.args)
        except SILENT:
            return False
        if said.get("status") != 200 or not all(each["answered"] for each in said.get("replicas", ())):
            return False
        self.path = said["path"]
        ask = {"model": said["model"], "max_tokens": 1, "temperature": 0}
        chat = self.path.endswith("chat/completions")
        self.body = {**ask, "messages": [{"role": "user", "content": _PROMPT}]} if chat else {**ask, "prompt": _PROMPT}
        return True

    def meet(self) -> None:
        """Remember the server's ranks: the living actors of vLLM that the newest driver of its Ray job started."""
        ips = {row["node_id"]: row["node_ip"] for row in self.rows("nodes")}
        named = [(row, name) for row in self.rows("actors", state="ALIVE") if (name := _rank(row))]
        own = head.job(self.args).get("job_id")
        # Ray may not say which driver is ours; the ranks of several, a batch job's say, must not be taken for the server's.
        alone = named if len({row.get("job_id") for row, _ in named}) == 1 else []
        ours = [each for each in named if each[0].get("job_id") == own] or alone
        self.ranks = {row["actor_id"]: (name, ips.get(row.get("node_id", ""), "")) for row, name in ours}
        self.driver = next((str(row.get("job_id")) for row, _ in ours), "")

    # ---- whether it lives ----

    def dead(self) -> Fault | None:
        """Return what Ray has noticed: a node with ranks that is gone, or a rank that is dead."""
        table = self.nodes()
        for rank, ip in self.ranks.values():
            row = table.get(ip)
            if ip and (row is None or row["state"] != "ALIVE"):
                why = str((row or {}).get("state_message") or "it is not in Ray's table any more")
                return Fault("a node with ranks is gone from Ray", node=ip, rank=rank, evidence=why)
        alive = {row["actor_id"] for row in self.rows("actors", state="ALIVE")}
        missing = [actor for actor in self.ranks if actor not in alive]
        return self._blamed(missing) if missing else None

    def culprit(self) -> Fault | None:
        """Return the rank that died of itself; the others were ended with the engine."""
        try:
            found = self.dead() or self._closed()
        except SILENT:
            return None
        return found if found is not None and found.rank else None

    def _blamed(self, missing: list[str]) -> Fault:
        """Name the first of the dead ranks whose death is no consequence of another's."""
        rows = {row["actor_id"]: row for row in self.rows("actors", job_id=self.driver)}
        found = []
        for actor in missing:
            (rank, ip), row = self.ranks[actor], rows.get(actor, {})
            why = _words(row.get("death_cause")) or f"Ray says {row.get('state', 'nothing')} of it"
            found.append(Fault("a rank is dead", node=ip, rank=rank, evidence=why))
        first = min(found, key=lambda each: bool(_CONSEQUENCE.search(each.evidence)))
        return first if not _CONSEQUENCE.search(first.evidence) else self._closed() or Fault(ENDED, evidence=first.evidence)

    def _closed(self) -> Fault | None:
        """Return a rank whose node has just died: the engine may notice before Ray does, and ends the other ranks."""
        port = self.wanted["cluster"].get("port")
        for ip, rank in {ip: rank for rank, ip in self.ranks.values()}.items():
            if port and ip and not head.reachable(f"{ip}:{port}"):
                said = f"nothing listens on {ip}:{port}: its container is gone, or its network"
                return Fault("a node with ranks is gone", node=ip, rank=rank, evidence=said)
        return None

    def accused(self, log: str) -> Fault | None:
        """Return the rank that vLLM's log names as dead: a container may be back before anybody has seen its port closed."""
        match = _DIED.search(log)
        if match is None:
            return None
        stage, part = divmod(int(match[1]), self.wanted.get("asked_for", {}).get("tp", 1))
        for name, ip in self.ranks.values():
            place = dict(re.findall(r"([A-Z]+)(\d+)", name))
            # Each replica counts its ranks from 0, and its lines do not say whose they are.
            if "DP" not in place and (int(place.get("PP", 0)), int(place.get("TP", 0))) == (stage, part):
                return Fault("a rank is dead", node=ip, rank=name)
        return None

    def home(self, replica: int) -> str:
        """Return the address of the node that has a replica's ranks; empty where several have them, or nobody knows."""
        ips = {ip for name, ip in self.ranks.values() if name.split()[0] == f"DP{replica}"}
        return ips.pop() if len(ips) == 1 else ""

    def counters(self) -> Counters | None:
        """Return what vLLM counts; None when it does not say in time. Aborted requests, the canaries', are no progress."""
        try:
            status, text = head.api(self.args, "/metrics", timeout=2)
        except SILENT:
            return None
        if status != 200:
            return None
        lines = [line for line in _PROGRESS.findall(text) if 'finished_reason="abort"' not in line]
        flying = _IN_FLIGHT.findall(text)
        return Counters(tuple(lines), int(sum(map(float, flying))) if flying else None)

    def health(self) -> int:
        """Return the status of `/health`: 503 says that the engine is dead."""
        try:
            return head.api(self.args, "/health", timeout=2)[0]
        except SILENT:
            return 0

    # ---- its log ----

    @property
    def log(self) -> str:
        """Where the output of the job goes."""
        return os.path.join(head.LOGS, f"job-driver-{self.job}.log")

    def log_size(self) -> int:
        """Return how many bytes the log has."""
        try:
            return os.path.getsize(self.log)
        except OSError:
            return 0

    def log_since(self, offset: int) -> str:
        """Return the telling lines that the log gained since so many bytes, else its last ones."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(offset, self.log_size() - (1 << 17)))
                text = file.read(1 << 17).decode(errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip() and "vlaunch supervisor:" not in line]
        telling = [line[:300] for line in lines if _TELLING.search(line) and not _TALK.search(line)]
        # What came first is the cause; what follows mostly reports it again.
        return "\n".join(telling[:6] or [line[:300] for line in lines[-6:]])


def gpus(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return how many GPUs nodes bring, by address."""
    return {row["node_ip"]: float((row.get("resources_total") or {}).get("GPU", 0)) for row in rows}


def beside(fault: Fault, other: Fault | None) -> Fault:
    """Add to a fault which rank and node are to blame, where another look knows it."""
    if other is None or fault.rank:
        return fault
    evidence = "\n".join(each for each in (other.evidence, fault.evidence) if each)
    return replace(fault, node=other.node, rank=other.rank, evidence=evidence)


def _rank(row: dict[str, Any]) -> str:
    """Return the name of the rank that an actor is; empty when it is none of vLLM's."""
    match = _RANK.fullmatch(row.get("name") or "")
    if match is None:
        return "an engine" if _ENGINE.search(row.get("class_name") or "") else ""
    replica = f"DP{match[1]}" if match[1] else ""
    return f"{replica}{match[2].replace('_', ' ')}".strip() or "the only rank"


def _words(cause: Any) -> str:
    """Return what Ray says of a death, from whichever of its forms."""
    if not isinstance(cause, dict):
        return str(cause or "")
    for each in cause.values():
        if isinstance(each, dict):
            said = each.get("error_message") or each.get("reason") or each.get("formatted_exception_string")
            if said:
                return " ".join(str(said).split())[:600]
    return json.dumps(cause)[:300]
