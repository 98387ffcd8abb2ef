"""The agent's answers to the launcher, one function per query: Ray's tables, batch jobs, vLLM's
counters on this node, the servers and their logs. The metrics have a site of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ... import upstream
from .. import state
from ..front import rotation
from ..health import api
from ..health.api import HttpError, QueryTarget, query_ray, query_ray_table
from ..health.probe import QUERY_ERRORS
from ..observed import Drain
from ..processes import process, submissions
from .server import HttpSite

if TYPE_CHECKING:
    from ..__main__ import Agent

Query = Mapping[str, str]
Answer = dict[str, Any]

KIND = "text/plain; version=0.0.4; charset=utf-8"
_FRESH = 1.0  # seconds for which a text of metrics is served
_RETRY = 0.25  # seconds between two attempts to reach an API
_CHUNK = 1 << 20  # bytes of a log in one answer
_PAUSE = 60.0  # seconds after a drain until servers that were not stopped get requests again
_TURN = 10.0  # seconds that the agent's main loop may hold its lock
_SINGLE = (
    *("vllm.requests-running", "vllm.requests-waiting", "vllm.kv-cache-usage"),
    *("vllm.generation-tokens", "vllm.prompt-tokens", "vllm.cache-queries", "vllm.cache-hits"),
    *("vllm.preemptions", "vllm.requests-finished", "vllm.http-requests"),
)
_LATENCIES = ("vllm.first-token", "vllm.between-tokens")
# The counters of vLLM's `/metrics` that the launcher reads every two seconds.
_COUNTED = re.compile(
    rf"^(?:{upstream.any_of(*_SINGLE)}|(?:{upstream.any_of(*_LATENCIES)})_bucket)"
    r"(?:\{[^\n]*\})? \S+$",
    re.M,
)


def metrics_site(host: str, port: int, make: Callable[[float], str]) -> HttpSite:
    """Return the site of the metrics, without a key, like vLLM's and Ray's: few readers at once,
    each within seconds, and the text is rendered at most once a second.
    """
    text, rendered_at, rendering = "", -math.inf, asyncio.Lock()

    async def answer(_: web.Request) -> web.Response:
        nonlocal text, rendered_at
        async with rendering:
            if time.monotonic() - rendered_at >= _FRESH:
                text = await asyncio.to_thread(make, time.time())
                rendered_at = time.monotonic()
        response = web.Response(body=text.encode(errors="replace"), headers={"Content-Type": KIND})
        response.force_close()
        return response

    routes = [web.get("/metrics", answer)]
    return HttpSite(name="metrics", routes=routes, host=host, port=port, most=8, seconds=5.0)


def site(path: str, agent: Agent) -> HttpSite:
    """Return the launcher's site, on a Unix socket in the container: a JSON object for each query,
    with `error` if there is no answer.
    """

    async def answer(request: web.Request) -> web.Response:
        query = {**request.query, "body": await request.text()}
        find = _QUERIES[request.method, request.path]
        try:
            return web.json_response(await asyncio.to_thread(find, agent, query))
        except QUERY_ERRORS as error:
            return web.json_response({"error": _reason(error)}, status=502)

    routes = [web.route(method, path, answer) for method, path in _QUERIES]
    return HttpSite(name="the launcher's queries", routes=routes, path=path)


def servers(agent: Agent, _: Query) -> Answer:
    """Return spec and status of all servers, the seconds since each node's agent reported, and the
    sha256 of each agent's archive; nothing where this agent is not the head's.

    `agent` is how many seconds ago the main loop turned: the statuses are as old. Raises
    TimeoutError where the main loop does not release the agent's lock.
    """
    if agent.lead is None:
        return {}
    with _locked(agent):
        age = round(max(0.0, time.monotonic() - agent.turned), 1)
        return {
            "servers": [_server(agent, name, age) for name in state.server_names()],
            "members": {
                node: round(ago + age, 1) for node, ago in agent.lead.report_ages().items()
            },
            "programs": agent.lead.programs(),
            "agent": age,
        }


@contextlib.contextmanager
def _locked(agent: Agent) -> Iterator[None]:
    """Hold the agent's lock; raise TimeoutError if its main loop hangs."""
    if not agent.lock.acquire(timeout=_TURN):
        age = time.monotonic() - agent.turned
        raise TimeoutError(f"the agent's main loop has hung for {age:.0f} s")
    try:
        yield
    finally:
        agent.lock.release()


def _server(agent: Agent, name: str, age: float) -> Answer:
    supervisor = agent.supervisors.get(name)
    if supervisor is not None and supervisor.status is not None:
        status: Any = {**supervisor.status.as_json(), "written": time.time() - age}
    else:  # of an earlier agent; its supervisor has not read it yet
        status = state.read_json(state.server_file(name, state.OBSERVED))
    spec = state.read_json(state.server_file(name, state.DESIRED))
    if spec is None and supervisor is not None and supervisor.unreadable:
        spec = {}  # a damaged file: the launcher must not take the server for a stopped one
    return {"name": name, "desired": spec, "observed": status, "age": age}


def drain(agent: Agent, query: Query) -> Answer:
    """Take servers with processes on `nodes` out of the fronts' rotation, and wait until they have
    no request in progress, or their time limit. Return the number of requests that are left.

    They get requests again if they are still ready a minute later.
    """
    lead, affected = agent.lead, set(_split_list(query, "nodes"))
    if lead is None:
        return {"requests": 0}
    drains, left = dict[str, Drain](), 0
    with _locked(agent):
        for name, supervisor in agent.supervisors.items():
            server = supervisor.server
            if server is None or affected.isdisjoint(node.node for node in server.spec.processes):
                continue
            limit = server.spec.policy.drain
            if (begun := rotation.begin_drain(name, lead, limit, time.monotonic())) is not None:
                drains[name] = begun
                agent.paused[name] = time.monotonic() + limit + _PAUSE
    while drains:
        time.sleep(_RETRY)
        with _locked(agent):
            now = time.monotonic()
            updates = {n: rotation.update_drain(d, n, lead, now) for n, d in drains.items()}
        ended = [drain for name, drain in drains.items() if updates[name] is None]
        left += sum(drain.requests for drain in ended if now - drain.since >= drain.limit)
        drains = {name: drain for name, drain in updates.items() if drain is not None}
    return {"requests": left}


def nodes(_: Agent, query: Query) -> Answer:
    """Return Ray's node table, the text of `ray status` (empty if this Ray's dashboard has none),
    and the peers whose raylet the head cannot reach, as behind a one-way firewall.
    """
    target = submissions.dashboard_target(query)
    table = query_ray_table(target, "nodes")
    try:
        answer: Any = query_ray(target, "/api/cluster_status?format=1")
        status = answer["data"]["clusterStatus"]
    except (HttpError, KeyError, TypeError, ValueError):
        status = ""
    unreachable = [peer for peer in _split_list(query, "peers") if not _is_reachable(peer)]
    return {"nodes": table, "status": status, "unreachable": unreachable}


def jobs(agent: Agent, query: Query) -> Answer:
    """Return submitted jobs, Ray's tables, the peers whose raylets do not listen (Ray's node table
    lists a dead node as alive for some seconds), and the servers, even if Ray does not answer.
    """
    target = submissions.dashboard_target(query)
    with ThreadPoolExecutor(32) as pool:  # each answer of a busy dashboard is slow
        peers = {peer: pool.submit(_is_reachable, peer) for peer in _split_list(query, "peers")}
        requests: dict[str, Future[Any]] = {
            "jobs": pool.submit(query_ray, target, upstream.text("ray.route-jobs")),
            "nodes": pool.submit(query_ray_table, target, "nodes"),
            "actors": pool.submit(query_ray_table, target, "actors", state="ALIVE"),
            "groups": pool.submit(query_ray_table, target, "placement_groups"),
        }
        try:
            answer = {name: request.result() for name, request in requests.items()}
            # Ray also lists its own drivers
            submitted = (job for job in answer["jobs"] if job.get("submission_id"))
            answer["jobs"] = [submissions.select_fields(job) for job in submitted]
            answer["unreachable"] = [peer for peer, probe in peers.items() if not probe.result()]
        except QUERY_ERRORS as error:
            answer = {"error": _reason(error)}
    return answer | servers(agent, query)


def counts(agent: Agent, query: Query) -> Answer:
    """Return the counters of some APIs (`host:port`) on this node, and the servers."""
    timeout = float(query["timeout"])

    def count(address: str) -> Answer:
        host, port = _split_address(address)
        status, text = api.query_api(
            QueryTarget(api_host=host, api=port),
            upstream.text("vllm.route-metrics"),
            timeout=timeout,
        )
        lines = _COUNTED.findall(text) if status == 200 else []
        return {"status": status, "text": "\n".join(lines), "error": "" if lines else text[:300]}

    apis = _split_list(query, "apis")
    with ThreadPoolExecutor(16) as pool:
        counters = dict(zip(apis, pool.map(count, apis), strict=True))
    return {"apis": counters} | servers(agent, query)


def watch(agent: Agent, query: Query) -> Answer:
    """Return the lines that a server's log on this node gained since `offset` bytes, of its current
    engine only, whether its API at `host:port` listens, and the servers.

    While an engine starts, wait up to `patience` seconds until its API listens, or its log has an
    end: frequent queries would take the cores that small nodes need to load.
    """
    name, deadline = query["name"], time.monotonic() + float(query.get("patience", 0))
    if not state.NAME.fullmatch(name):
        raise ValueError(f"no server can be named {name!r:.80}")
    path = state.server_file(name, state.LOG)
    text, offset, restarted = _read_log(path, int(query["offset"]))
    while not (listening := _is_reachable(query["api"])) and time.monotonic() < deadline:
        time.sleep(_RETRY)
        new_text, offset, new_engine = _read_log(path, offset)
        text, restarted = new_text if new_engine else text + new_text, restarted or new_engine
        if new_engine or process.ENDS in new_text:
            break
    answer = {"log": text, "offset": offset, "anew": restarted, "listening": listening}
    return answer | servers(agent, query)


def _read_log(path: str, offset: int) -> tuple[str, int, bool]:
    """Return the complete lines of a log since an offset, their end offset, and whether another
    engine has started among them.
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
    _, marker, rest = text.rpartition(process.BEGINS)
    return (rest.partition("\n")[2] if marker else text), offset, bool(marker)


_POSTED = (submissions.submit, submissions.stop, drain)
_QUERIES: dict[tuple[str, str], Callable[[Agent, Query], Answer]] = {
    **{("GET", f"/{query.__name__}"): query for query in (nodes, jobs, servers, watch, counts)},
    **{("POST", f"/{query.__name__}"): query for query in _POSTED},
}


def _split_list(query: Query, name: str) -> list[str]:
    """Return the comma-separated parts of a parameter."""
    return [part for part in query.get(name, "").split(",") if part]


def _split_address(address: str) -> tuple[str, int]:
    """Return the host and port of `host:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _is_reachable(address: str) -> bool:
    return api.is_reachable(*_split_address(address))


def _reason(error: Exception) -> str:
    reason = error.text[:500] if isinstance(error, HttpError) else str(error)
    return reason or type(error).__name__
