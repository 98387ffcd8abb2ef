"""The agent's HTTP server: a thread with its own event loop, beside the agent's main loop.

A `Site` is one set of routes at one address. An address that is not there yet, or taken, is tried
again: nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from aiohttp import web

from .wire import say

_BACKLOG = 128
_AGAIN = 3.0  # seconds between two attempts to listen on an address
_LARGEST = 4 << 20  # bytes of a request


@dataclass(frozen=True, kw_only=True)
class Site:
    """Routes and their address: a Unix socket (`path`), or a host and a port, with `tls` or plain.

    `tls` is called at each attempt to listen; an OSError means that its files are not there yet.
    At most `most` connections are open at once (0: any number), each for at most `seconds`.
    """

    name: str
    routes: Iterable[web.AbstractRouteDef]
    path: str = ""
    host: str = ""
    port: int = 0
    tls: Callable[[], ssl.SSLContext] | None = None
    most: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Name it and its address, for the log."""
        return f"{self.name} on {self.path or f'{self.host} port {self.port}'}"


class Server:
    """All sites of an agent."""

    def __init__(self, *sites: Site) -> None:
        self.sites = sites
        self.bound: dict[str, int] = {}  # sites that listen, and their ports
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="http")

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and end what is open."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # `_guard` tells of our own errors
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        await asyncio.gather(*(self._open(site) for site in self.sites))

    async def _open(self, site: Site) -> None:
        app = web.Application(middlewares=[_guard], client_max_size=_LARGEST)
        app.add_routes(site.routes)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        listening = await self._listen(site, runner)
        await self._over.wait()
        if listening is not None:
            listening.close()
        await runner.cleanup()

    async def _listen(self, site: Site, runner: web.AppRunner) -> asyncio.Server | None:
        """Listen as soon as the address is free; None when the server is closed before."""
        trouble = ""
        while not self._over.is_set():
            try:
                listening = await self._bind(site, runner)
            except (OSError, OverflowError) as error:
                if str(error) != trouble:
                    trouble = str(error)
                    say(f"cannot serve {site}: {trouble}")
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._over.wait(), _AGAIN)
                continue
            self.bound[site.name] = 0 if site.path else listening.sockets[0].getsockname()[1]
            return listening
        return None

    async def _bind(self, site: Site, runner: web.AppRunner) -> asyncio.Server:
        factory = _limited(site, runner.server)
        if site.path:
            return await self._loop.create_unix_server(
                factory, sock=_private(site.path), backlog=_BACKLOG
            )
        tls = site.tls() if site.tls is not None else None
        return await self._loop.create_server(
            factory, site.host, site.port, ssl=tls, backlog=_BACKLOG, reuse_address=True
        )


class _Busy(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        transport.close()


def _limited(site: Site, server: web.Server | None) -> Callable[[], asyncio.Protocol]:
    """Return what makes a connection's protocol, within the site's limits."""
    assert server is not None  # noqa: S101 - `setup` made it
    accepted = set[asyncio.Protocol]()  # and not counted by aiohttp yet

    def end(protocol: asyncio.Protocol) -> None:
        transport: asyncio.Transport | None = protocol.transport  # type: ignore[attr-defined]
        if transport is not None:
            transport.abort()

    def make() -> asyncio.Protocol:
        if site.most and len(accepted.union(server.connections)) >= site.most:
            return _Busy()
        protocol, loop = server(), asyncio.get_running_loop()
        accepted.add(protocol)
        loop.call_later(0, accepted.discard, protocol)
        if site.seconds:
            loop.call_later(site.seconds, end, protocol)
        return protocol

    return make


def _private(path: str) -> socket.socket:
    """Return a Unix socket that only this user can connect to; one that a dead agent left goes."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(path)
        os.chmod(path, 0o600)  # before anything listens
    except BaseException:
        made.close()
        raise
    return made


@web.middleware
async def _guard(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer an error of ours with its name, and print where it came from."""
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except Exception as error:
        say(f"{request.method} {request.path}: {traceback.format_exc()}")
        return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)
