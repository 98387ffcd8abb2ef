"""What the launcher may ask an agent: Ray's tables, what vLLM on this node counts, the servers and
their logs. `routes.py` serves it.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from . import process, state
from .api import Refused, Where, api, ray
from .submissions import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .crew import Lead
    from .keeper import Keeper

_AGAIN = 0.25  # seconds between two looks whether an API listens
_CHUNK = 1 << 20  # bytes of a log that are told at once
_TURN = 10.0  # seconds that the agent's main loop may hold its lock
# What is told of `/metrics` (0.32, v1/metrics/loggers.py): whoever asks does so every two seconds.
_COUNTED = re.compile(
    r"^(?:vllm:(?:num_requests_(?:running|waiting)|kv_cache_usage_perc"
    r"|(?:generation|prompt)_tokens_total"
    r"|prefix_cache_(?:queries|hits)_total|num_preemptions_total|request_success_total"
    r"|(?:time_to_first_token|inter_token_latency)_seconds_bucket)|http_requests_total)"
    r"(?:\{[^\n]*\})? \S+$",
    re.M,
)


class Agent(Protocol):
    """The part of the agent that is asked about servers; `turned` is when its main loop turned last
    (seconds of a monotonic clock).
    """

    lock: threading.RLock
    lead: Lead | None
    keepers: dict[str, Keeper]
    turned: float


def servers(agent: Agent) -> dict[str, Any]:
    """The servers as they are wanted and as their keepers see them now, and how many seconds ago
    each node's agent was heard; nothing where this agent keeps none.

    `agent` is how many seconds ago the main loop turned: what the keepers know is as old.
    """
    if agent.lead is None:
        return {}
    with _locked(agent):
        age = round(max(0.0, time.monotonic() - agent.turned), 1)
        return {
            "servers": [_server(agent, name, age) for name in state.names()],
            "members": {node: round(ago + age, 1) for node, ago in agent.lead.heard().items()},
            "agent": age,
        }


@contextmanager
def _locked(agent: Agent) -> Iterator[None]:
    """Hold the agent's lock; raises TimeoutError where its main loop does not let go of it."""
    if not agent.lock.acquire(timeout=_TURN):
        raise TimeoutError(
            f"the agent's main loop hangs since {time.monotonic() - agent.turned:.0f} s"
        )
    try:
        yield
    finally:
        agent.lock.release()


def _server(agent: Agent, name: str, age: float) -> dict[str, Any]:
    """One server: as it was written down that it is wanted, and as its keeper sees it."""
    keeper = agent.keepers.get(name)
    if keeper is not None and keeper.seen is not None:
        seen: Any = {**keeper.seen.as_json(), "written": time.time() - age}
    else:  # of an agent before, which its keeper has not read yet
        seen = state.read(state.path(name, state.OBSERVED))
    return {
        "name": name,
        "desired": state.read(state.path(name, state.DESIRED)),
        "observed": seen,
        "age": age,
    }


def nodes(dashboard: int, peers: Sequence[str]) -> dict[str, Any]:
    """Ray's node table, `ray status`, and whether the head can open each peer's raylet port (a
    one-way firewall shows here).
    """
    where = Where(dashboard=dashboard)
    return {
        "nodes": ray(where, "/api/v0/nodes?detail=1&limit=10000"),
        "status": _status(where),
        "unreachable": [each for each in peers if not reachable(each)],
    }


def _status(where: Where) -> str:
    """The text of `ray status`, which the dashboard formats too: no `import ray`; empty when this
    Ray does not.
    """
    try:
        said: Any = ray(where, "/api/cluster_status?format=1")
        text: str = said["data"]["clusterStatus"]
        return text
    except (Refused, KeyError, TypeError, ValueError):
        return ""


def reachable(address: str) -> bool:
    """True when `host:port` accepts a connection."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=3):
            return True
    except OSError:
        return False


def jobs(dashboard: int | None, peers: Sequence[str]) -> dict[str, Any]:
    """Submitted jobs and Ray's tables (not without a dashboard), and which peers' raylets do not
    listen: Ray's node table has a dead node alive for some seconds more.
    """
    alive = "filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
    tables = {
        "nodes": "/api/v0/nodes?detail=1&limit=10000",
        "actors": f"/api/v0/actors?detail=1&limit=10000&{alive}",
        "groups": "/api/v0/placement_groups?detail=1&limit=10000",
    }
    with ThreadPoolExecutor(32) as pool:  # a busy dashboard is slow to begin with each
        knocks = {each: pool.submit(reachable, each) for each in peers}
        asked = dict[str, Future[Any]]()
        if dashboard is not None:
            where = Where(dashboard=dashboard)
            asked["jobs"] = pool.submit(_submitted, where)
            asked |= {name: pool.submit(ray, where, path) for name, path in tables.items()}
        return {
            **{name: answer.result() for name, answer in asked.items()},
            "unreachable": [each for each, knock in knocks.items() if not knock.result()],
        }


def _submitted(where: Where) -> list[dict[str, object]]:
    """The jobs that somebody submitted; Ray also lists what is connected to it otherwise."""
    found: Any = ray(where, "/api/jobs/")
    return [shown(job) for job in found if job.get("submission_id")]


def counts(apis: Sequence[str], timeout: float) -> dict[str, Any]:
    """What each API (`host:port`) on this node counts, all asked at once."""

    def count(at: str) -> dict[str, object]:
        status, text = api(_where(at), "/metrics", timeout=timeout)
        found = _COUNTED.findall(text) if status == 200 else []
        return {"status": status, "text": "\n".join(found), "error": "" if found else text[:300]}

    with ThreadPoolExecutor(16) as pool:
        return {"apis": dict(zip(apis, pool.map(count, apis), strict=True))}


def _where(at: str) -> Where:
    host, _, port = at.rpartition(":")
    return Where(api_host=host.strip("[]"), api=int(port))


def watch(name: str, offset: int, at: str, patience: float) -> dict[str, Any]:
    """What a server's log on this node gained since `offset` bytes, of its present engine only, and
    whether its API at `host:port` listens.

    While an engine starts, `patience` seconds are waited until its API listens, or its log tells of
    an end: whoever asks again and again takes the cores that small nodes need to load.
    """
    if not state.NAME.fullmatch(name):
        raise ValueError(f"no server can be named {name!r:.80}")
    deadline, path = time.monotonic() + patience, state.path(name, state.LOG)
    text, offset, anew = _log(path, offset)
    while not (listening := reachable(at)) and time.monotonic() < deadline:
        time.sleep(_AGAIN)
        more, offset, newer = _log(path, offset)
        text, anew = more if newer else text + more, anew or newer
        if newer or process.ENDS in more:
            break
    return {"log": text, "offset": offset, "anew": anew, "listening": listening}


def _log(path: str, offset: int) -> tuple[str, int, bool]:
    """Return the whole lines of a log since an offset, where they end, and whether another engine
    has begun among them.
    """
    try:
        with open(path, "rb") as file:
            if file.seek(0, 2) < offset:
                offset = 0  # of the log before
            file.seek(offset)
            chunk = file.read(_CHUNK)
    except OSError:
        return "", offset, False
    # Half a line would be judged twice, or not at all. Progress bars end theirs with a carriage
    # return.
    end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1 or (
        len(chunk) if len(chunk) == _CHUNK else 0
    )
    text, offset = chunk[:end].decode(errors="replace"), offset + end
    _, begins, rest = text.rpartition(process.BEGINS)
    return (rest.partition("\n")[2] if begins else text), offset, bool(begins)


def listed(query: Mapping[str, str], name: str) -> list[str]:
    """Return the words of a query's value, which are separated by commas."""
    return [each for each in query.get(name, "").split(",") if each]
