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
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from aiohttp import web

from .certificates import Certificates, Troubles, cause
from .log import say, trace

_BACKLOG = 128
_MOST_QUERIES = 32  # that wait for others' answers at once
_AGAIN = 3.0  # seconds between two attempts to listen on an address
_LARGEST = 4 << 20  # bytes of a request
_HANDSHAKE = 10.0  # seconds for a TLS handshake
_PENDING = 256  # of them at once
_IDLE = 75.0  # seconds until a connection without a request is closed


@dataclass(frozen=True, kw_only=True)
class Site:
    """Routes and their address: a Unix socket (`path`), or a host and a port.

    With `certificates` over mutual TLS. At most `most` connections are open at once (0: any
    number), each for at most `seconds`.
    """

    name: str
    routes: Iterable[web.AbstractRouteDef]
    path: str = ""
    host: str = ""
    port: int = 0
    certificates: Certificates | None = None
    troubles: Troubles = field(default_factory=Troubles)
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
        self._under_tls = set[asyncio.Transport]()  # TCP connections with TLS over them
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
        self._loop.set_default_executor(ThreadPoolExecutor(_MOST_QUERIES))
        self._loop.run_until_complete(self._serve())
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _serve(self) -> None:
        await asyncio.gather(*(self._open(site) for site in self.sites))

    async def _end(self) -> None:
        """End what is still open; nobody waits for the other side."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transport in self._under_tls:
            transport.abort()
        await asyncio.sleep(0)  # they close their sockets meanwhile

    async def _open(self, site: Site) -> None:
        app = web.Application(middlewares=[_guard], client_max_size=_LARGEST)
        app.add_routes(site.routes)
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            keepalive_timeout=_IDLE,
        )
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
        if site.certificates is not None:
            factory = _tls(site, site.certificates, factory, self._under_tls)
        return await self._loop.create_server(
            factory, site.host, site.port, backlog=_BACKLOG, reuse_address=True
        )


class _Busy(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        transport.close()


class _Tls(asyncio.Protocol):
    """A connection with TLS; what fails in it is printed, which asyncio's own listener does not do.

    From the end of the handshake on, all is passed to the protocol that is made then.
    """

    def __init__(
        self,
        site: Site,
        certificates: Certificates,
        make: Callable[[], asyncio.Protocol],
        pending: dict[asyncio.Transport, None],
        below: set[asyncio.Transport],
    ) -> None:
        self._site, self._certificates, self._make = site, certificates, make
        self._pending, self._below = pending, below
        self._host = ""
        self._inner: asyncio.Protocol | None = None
        self._early = b""  # what came with the end of the handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; where too many have not come to an end, the oldest is closed."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a socket's
        transport.pause_reading()
        self._host = str(transport.get_extra_info("peername", ("?",))[0])
        self._transport = transport
        self._below.add(transport)
        self._pending[transport] = None
        if len(self._pending) > _PENDING:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.abort()
        self._task = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        context, secured = self._certificates.context(), None
        try:
            if context is not None:
                secured = await asyncio.get_running_loop().start_tls(
                    self._transport,
                    self,
                    context,
                    server_side=True,
                    ssl_handshake_timeout=_HANDSHAKE,
                )
        except OSError as error:
            self._failed(error)
        finally:
            self._pending.pop(self._transport, None)
        if secured is None:
            self._below.discard(self._transport)
            self._transport.abort()
            return
        self._inner = self._make()
        self._inner.connection_made(secured)
        if self._early:
            self._inner.data_received(self._early)

    def _failed(self, error: BaseException) -> None:
        if not isinstance(error, ConnectionResetError):  # the client just went away
            self._site.troubles.say(f"refused a connection from {self._host}: {cause(error)}")

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self._inner is None:
            self._early += data
        else:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        """Pass it on."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on; bytes that the other side did not send end a connection."""
        if isinstance(exc, ssl.SSLError):
            self._failed(exc)
        self._below.discard(self._transport)
        if self._inner is not None:
            self._inner.connection_lost(exc)


def _tls(
    site: Site,
    certificates: Certificates,
    make: Callable[[], asyncio.Protocol],
    below: set[asyncio.Transport],
) -> Callable[[], asyncio.Protocol]:
    """Return what makes a connection's protocol, behind TLS."""
    pending: dict[asyncio.Transport, None] = {}
    return lambda: _Tls(site, certificates, make, pending, below)


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
    except (web.HTTPException, ConnectionResetError):  # the client has gone
        raise
    except Exception as error:
        trace(f"{request.method} {request.path}")
        return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)
