"""What the agent's HTTP server answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from .server import Site

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


def launcher(path: str) -> Site:
    """Return the site that the launcher asks, on a Unix socket in the container."""
    return Site(name="the launcher's queries", routes=[], path=path)
