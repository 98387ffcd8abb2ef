"""The head's side of the connections between agents: `POST /report`, over mutual TLS.

A client is the node that its certificate names (CN).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator

from aiohttp import web

from . import records
from .certificates import Certificates, Troubles, name_in
from .crew import Lead, Refused
from .members import HOLD
from .node import Report
from .server import Site

_AGAIN = 0.02  # seconds between two attempts to get the agent's lock
_HANGS = 5.0  # seconds for which its main loop may hold it; members wait longer for an answer


def site(
    lead: Lead, lock: threading.RLock, certificates: Certificates, host: str, port: int
) -> Site:
    """Return the site to which members post; `lock` is held while the agent changes."""
    troubles = Troubles()
    reports = _Reports(lead, lock, certificates, troubles)
    return Site(
        name="the agents of other nodes",
        routes=[web.post("/report", reports.take), web.get("/orders", reports.wait)],
        host=host,
        port=port,
        certificates=certificates,
        troubles=troubles,
    )


class _Reports:
    """The answers to members."""

    def __init__(
        self, lead: Lead, lock: threading.RLock, certificates: Certificates, troubles: Troubles
    ) -> None:
        self._lead, self._lock = lead, lock
        self._certificates, self._troubles = certificates, troubles
        # nodes that wait for other orders than they have
        self._waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}
        lead.ordered = self._tell

    async def take(self, request: web.Request) -> web.Response:
        """Take a report, and answer with the node's orders."""
        try:
            body = await request.read()
        except OSError as error:  # its protocol says why
            raise web.HTTPBadRequest from error
        try:
            name, transport = self._client(request)
            report = _read(name, body)
            async with self._locked():
                answer = self._lead.exchange(name, report, transport)
        except Refused as why:
            return self._refuse(request, str(why))
        return web.json_response(answer)

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Hold the agent's lock, and let the other answers go on until it is free; raises Refused
        where the agent's main loop does not let go of it.
        """
        until = time.monotonic() + _HANGS
        while not self._lock.acquire(blocking=False):
            if time.monotonic() > until:
                raise Refused("the main loop of the head's agent hangs")
            await asyncio.sleep(_AGAIN)
        try:
            yield
        finally:
            self._lock.release()

    async def wait(self, request: web.Request) -> web.Response:
        """Answer as soon as there are other orders than those that a node has, or after a while."""
        try:
            name, _ = self._client(request)
        except Refused as why:
            return self._refuse(request, str(why))
        other = asyncio.Event()
        self._waiting[name] = asyncio.get_running_loop(), other
        number = str(self._lead.number(name))
        if (request.query.get("head_boot"), request.query.get("number")) == (
            self._lead.boot,
            number,
        ):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(other.wait(), HOLD)
        else:
            other.set()
        return web.json_response({"changed": other.is_set()})

    def _tell(self, name: str) -> None:
        """Answer a node that waits; called in any thread."""
        if name in self._waiting:
            loop, other = self._waiting[name]
            loop.call_soon_threadsafe(other.set)

    def _client(self, request: web.Request) -> tuple[str, asyncio.Transport]:
        """Return the node that the client's certificate names, and the connection; raises Refused
        where that certificate was accepted with files that have been replaced since.
        """
        transport = request.transport
        if transport is None or (
            transport.get_extra_info("sslcontext") is not self._certificates.context()
        ):
            raise Refused("its connection is older than this node's certificates")
        return name_in(transport.get_extra_info("peercert")), transport

    def _refuse(self, request: web.Request, why: str) -> web.Response:
        self._troubles.say(f"refused a report from {request.remote}: {why[:300]}")
        answer = web.json_response({"error": why}, status=403)
        answer.force_close()
        return answer


def _read(name: str, body: bytes) -> Report:
    """Read a node's report; raises Refused, naming the field that is wrong."""
    try:
        return records.read(Report, body, "report")
    except ValueError as error:
        raise Refused(f"{name} sent an invalid report: {error}") from None
