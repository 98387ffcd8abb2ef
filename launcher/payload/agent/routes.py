"""What the agent's HTTP server answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from . import queries, submissions
from .api import Refused, Where
from .probe import SILENT
from .queries import listed
from .server import Site

Query = Mapping[str, str]
Said = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.Response]]

KIND = "text/plain; version=0.0.4; charset=utf-8"
_HOLDS = 1.0  # seconds for which a text of metrics is good


def metrics(host: str, port: int, make: Callable[[float], str]) -> Site:
    """Return the site of the metrics: whoever reaches the port may read them, as with vLLM's and
    Ray's, and can do no more: few at once, each within seconds, and the text is made once a second.
    """
    text, made, making = "", -_HOLDS, asyncio.Lock()

    async def answer(_: web.Request) -> web.Response:
        nonlocal text, made
        async with making:
            if time.monotonic() - made >= _HOLDS:
                text = await asyncio.to_thread(make, time.time())
                made = time.monotonic()
        response = web.Response(body=text.encode(errors="replace"), headers={"Content-Type": KIND})
        response.force_close()
        return response

    return Site(
        name="metrics",
        routes=[web.get("/metrics", answer)],
        host=host,
        port=port,
        most=8,
        seconds=5.0,
    )


def launcher(path: str, agent: queries.Agent) -> Site:
    """Return the site that the launcher asks, on a Unix socket in the container: a JSON object for
    each query, with `error` where there is no answer.
    """

    def nodes(query: Query) -> Said:
        return queries.nodes(int(query["dashboard"]), listed(query, "peers"))

    def jobs(query: Query) -> Said:
        dashboard = int(query["dashboard"]) if "dashboard" in query else None
        try:
            found = queries.jobs(dashboard, listed(query, "peers"))
        except SILENT as error:  # the servers are known without Ray
            found = {"error": _why(error)}
        return {**found, **queries.servers(agent)}

    def watch(query: Query) -> Said:
        patience = float(query.get("patience", 0))
        found = queries.watch(query["name"], int(query["offset"]), query["api"], patience)
        return {**found, **queries.servers(agent)}

    def counts(query: Query) -> Said:
        found = queries.counts(listed(query, "apis"), float(query["timeout"]))
        return {**found, **queries.servers(agent)}

    def servers(_: Query) -> Said:
        return queries.servers(agent)

    def submit(query: Query) -> Said:
        job, where = json.loads(query["body"]), Where(dashboard=int(query["dashboard"]))
        answer: Said = submissions.submit(where, job["submission_id"], job["argv"], job["metadata"])
        return answer

    def stop(query: Query) -> Said:
        where = Where(dashboard=int(query["dashboard"]))
        return submissions.stop(where, query["job"], float(query["grace"]))

    reads, writes = (nodes, jobs, servers, watch, counts), (submit, stop)
    return Site(
        name="the launcher's queries",
        routes=[
            *(web.get(f"/{read.__name__}", _answer(read)) for read in reads),
            *(web.post(f"/{write.__name__}", _answer(write)) for write in writes),
        ],
        path=path,
    )


def _answer(find: Callable[[Query], Said]) -> Handler:
    """Return the handler that answers with what is found, which may take its time."""

    async def answer(request: web.Request) -> web.Response:
        try:
            query = {**request.query, "body": await request.text()}
            return web.json_response(await asyncio.to_thread(find, query))
        except SILENT as error:
            return web.json_response({"error": _why(error)}, status=502)

    return answer


def _why(error: Exception) -> str:
    said = error.said[:500] if isinstance(error, Refused) else str(error)
    return said or type(error).__name__
