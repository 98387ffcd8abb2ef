"""HTTP server of the agent: a thread with its own event loop, beside the agent's main loop.

An `HttpSite` is one set of routes at one address. An address that does not exist yet, or is in use,
is tried again; no other site waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from ..log import LimitedLog, say, trace
from .certificates import Certificates, describe_error

_BACKLOG = 128
_MOST_QUERIES = 32  # that wait for other programs' answers at once
_RETRY = 3.0  # seconds between two attempts to listen on an address
_LARGEST = 4 << 20  # bytes of a request
_HANDSHAKE = 5.0  # seconds for a TLS handshake
_PENDING = 256  # TLS handshakes at once
_IDLE = 75.0  # seconds until a connection without a request is closed


@dataclass(frozen=True, kw_only=True)
class HttpSite:
    """Routes and their address: a Unix socket (`path`), or a host and a port.

    With `certificates` over mutual TLS. At most `most` connections are open at once (0: any
    number), each for at most `seconds` (0: any time).
    """

    name: str
    routes: Iterable[web.AbstractRouteDef]
    path: str = ""
    host: str = ""
    port: int = 0
    certificates: Certificates | None = None
    log: LimitedLog = field(default_factory=LimitedLog)
    most: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return its name and address, for the log."""
        return f"{self.name} on {self.path or f'{self.host} port {self.port}'}"


class HttpServer:
    """All sites of an agent."""

    def __init__(self, *sites: HttpSite) -> None:
        self.sites = sites
        self.bound: dict[str, int] = {}  # sites that listen, and their ports
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="http")

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def close(self) -> None:
        """Close all sockets and end the thread."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # `_guard` prints our own errors
        self._loop.set_default_executor(ThreadPoolExecutor(_MOST_QUERIES))
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        listeners = [self._loop.create_task(_Listener(site).run(self.bound)) for site in self.sites]
        await self._closing.wait()
        tasks: Collection[asyncio.Task[None]] = listeners
        while tasks:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.sleep(0)  # aborted connections close their sockets meanwhile


class _Listener:
    """A site and its connections."""

    def __init__(self, site: HttpSite) -> None:
        self._site = site
        self._connections = set[asyncio.Task[None]]()
        self._handshakes = dict[socket.socket, asyncio.Task[None]]()  # oldest first
        app = web.Application(middlewares=[_guard], client_max_size=_LARGEST)
        app.add_routes(site.routes)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            keepalive_timeout=_IDLE,
        )

    async def run(self, bound: dict[str, int]) -> None:
        """Serve until this task is cancelled; note the port in `bound`."""
        loop = asyncio.get_running_loop()
        await self._runner.setup()
        try:
            with await self._listen() as listener:
                bound[self._site.name] = 0 if self._site.path else listener.getsockname()[1]
                loop.add_reader(listener, self._accept, listener)
                try:
                    await asyncio.Event().wait()
                finally:
                    loop.remove_reader(listener)
        finally:
            for _ in range(2):  # accepted connections can be aborted after that
                await asyncio.sleep(0)
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await self._runner.cleanup()

    async def _listen(self) -> socket.socket:
        """Listen as soon as the address is free."""
        last = ""
        while True:
            try:
                return _bind(self._site)
            except (OSError, OverflowError) as error:
                if str(error) != last:
                    last = str(error)
                    say(f"cannot serve {self._site}: {last}")
            await asyncio.sleep(_RETRY)

    def _accept(self, listener: socket.socket) -> None:
        """Serve a connection within the limits; with too many handshakes, drop the oldest."""
        loop, certificates = asyncio.get_running_loop(), self._site.certificates
        try:
            sock, address = listener.accept()
        except OSError:  # such as too many open files
            time.sleep(0.1)
            return
        context = certificates.context() if certificates else None
        full = 0 < self._site.most <= len(self._connections)
        if full or (certificates and not context):
            sock.close()
            return
        task = loop.create_task(self._connect(sock, context, address))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        self._handshakes[sock] = task
        if len(self._handshakes) > _PENDING:
            self._handshakes.pop(next(iter(self._handshakes))).cancel()

    async def _connect(self, sock: socket.socket, tls: ssl.SSLContext | None, address: Any) -> None:
        """Serve a connection until it ends; print why TLS ended it."""
        loop = asyncio.get_running_loop()
        lost = loop.create_future()
        protocol: Any = _Protocol(self._runner.server, lost)
        try:
            timeout = _HANDSHAKE if tls else None
            await loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=tls, ssl_handshake_timeout=timeout
            )
            self._handshakes.pop(sock, None)
            await asyncio.wait([lost], timeout=self._site.seconds or None)
            if lost.done() and (error := lost.result()):
                raise error
        except ConnectionResetError:  # by the client
            pass
        except OSError as error:
            self._site.log.say(f"refused a connection from {address[0]}: {describe_error(error)}")
        finally:
            self._handshakes.pop(sock, None)
            if protocol.transport is not None:
                with contextlib.suppress(AttributeError):  # Python 3.11.2, once TLS is closed
                    protocol.transport.abort()


class _Protocol:
    """aiohttp's protocol of a connection; `lost` gets the TLS error that ends it."""

    def __init__(self, server: Any, lost: asyncio.Future[ssl.SSLError | None]) -> None:
        self._protocol, self._lost = server(), lost
        self.transport: asyncio.Transport | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Pass it on, and keep the transport: aiohttp's protocol forgets it."""
        self.transport = transport
        self._protocol.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Pass it on, but not its cause, which a handler need not know."""
        self._lost.set_result(error if isinstance(error, ssl.SSLError) else None)
        self._protocol.connection_lost(None)


def _bind(site: HttpSite) -> socket.socket:
    """Return the socket on which a site listens; raises OSError or OverflowError.

    Only this user can connect to a Unix socket; one that a dead agent left is replaced.
    """
    if not site.path:
        family = socket.AF_INET6 if ":" in site.host else socket.AF_INET
        listener = socket.create_server((site.host, site.port), family=family, backlog=_BACKLOG)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(site.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(site.path)
            os.chmod(site.path, 0o600)  # before it listens
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    listener.setblocking(False)
    return listener


@web.middleware
async def _guard(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer an internal error with its name, and print its traceback."""
    try:
        return await handler(request)
    except (web.HTTPException, ConnectionResetError):  # the client has gone
        raise
    except Exception as error:
        trace(f"{request.method} {request.path}")
        return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)
