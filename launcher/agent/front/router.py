"""Router of the front: for requests to `/v1` whose model HAProxy does not read, and for requests
without a length.

`python3 -m vlaunch_agent.agent.front.router FOLDER` serves HAProxy at FOLDER/router.sock. It reads
a request completely, finds its model, and sends it back to HAProxy at FOLDER/servers.sock with the
name of the server in a header: HAProxy selects and holds, as for other requests. FOLDER/router.json
has the models and limits, and may change at any time. Nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mmap
import os
import re
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from email.message import Message
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from ..log import LimitedLog, say
from .router_process import MODELS, SERVER, SERVERS, SOCKET, TABLE

_HOPS = {
    *("connection", "content-length", "expect", "host", "keep-alive", "te", "trailer"),
    *("transfer-encoding", "upgrade", SERVER, MODELS),
}
_IN_MEMORY = 1 << 20  # bytes of a body; the rest of a larger one is in a temporary file
_BODIES = 16  # largest bodies that fit into the temporary files at once
_PIECE = 1 << 18  # bytes
_LIST_PATIENCE = 2.0  # seconds for a server to list its models
_LONGEST_NAME = 1000
_LARGEST_HEADER = 32768  # more than HAProxy accepts
_EVERY = 0.5  # seconds between checks of the socket's owner

_MODEL_FIELD = re.compile(
    rb'^content-disposition:[^\r\n]*;\s*name="?model"?\s*(?:;|\r|$)', re.IGNORECASE | re.MULTILINE
)


class _ModelField(msgspec.Struct):
    """The field of a JSON object that selects the server; others are skipped."""

    model: str | None = None


def find_json_model(data: bytes | mmap.mmap) -> str | None:
    """Return the top-level `model` of a JSON object; vLLM, too, uses the last one. Raises Failure
    for anything else.
    """
    try:
        return msgspec.json.decode(data, type=_ModelField).model
    except (ValueError, RecursionError) as error:
        text = f"The body is not a request in JSON: {error}."
        raise Failure(400, "invalid_json", text) from None


def find_form_model(data: mmap.mmap, boundary: bytes) -> str | None:
    """Return the last field `model` of a multipart form."""
    model, delimiter = None, b"--" + boundary
    position = data.find(delimiter)
    while position >= 0:
        start = position + len(delimiter)
        end = data.find(b"\r\n" + delimiter, start)
        head = data.find(b"\r\n\r\n", start, max(end, 0) + 2)
        if 0 <= head < end and _MODEL_FIELD.search(data[start : min(head, start + 4096)]):
            model = data[head + 4 : min(end, head + 4 + _LONGEST_NAME)].decode(errors="replace")
        position = end + 2 if end >= 0 else -1
    return model


class Failure(Exception):
    """An error response in OpenAI's form."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        fields = {"message": message, "type": kind, "param": None, "code": code}
        self.status, self.headers, self.content = status, headers, {"error": fields}


class Body:
    """A request's body in a temporary file, and the model in it."""

    def __init__(self, content_type: str) -> None:
        header = Message()
        header["content-type"] = content_type or "application/json"
        form = header.get_content_type() == "multipart/form-data"
        self._boundary = (header.get_boundary() or "").encode() if form else b""
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - see `close`
        self.size = 0

    def add(self, piece: bytes) -> None:
        """Add a piece."""
        self._file.write(piece)
        self.size += len(piece)

    def find_model(self) -> str | None:
        """Return the model, once the body is complete."""
        if not self.size or len(self._boundary) > 70:  # RFC 2046
            return None
        self._file.rollover()
        self._file.flush()
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if self._boundary:
                return find_form_model(data, self._boundary)
            return find_json_model(data)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        self._file.seek(0)
        while piece := self._file.read(_PIECE):
            yield piece

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


class Router:
    """Handler of HAProxy's requests."""

    def __init__(self, folder: str, session: aiohttp.ClientSession) -> None:
        self._folder, self._session = folder, session
        self._stored = 0  # bytes of all bodies
        self._table: dict[str, Any] = {}
        self._table_id = (0, 0)
        self._log = LimitedLog()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        try:
            self._read_table()
            return await self._route(request)
        except Failure as error:
            failure = error
        except Exception as error:
            self._log.trace("router", f"{type(error).__name__}: {error}")
            failure = Failure(500, "internal_error", "The front failed.")
        return web.json_response(failure.content, status=failure.status, headers=failure.headers)

    def _read_table(self) -> None:
        path = os.path.join(self._folder, TABLE)
        with contextlib.suppress(OSError, ValueError):  # the last one stays
            status = os.stat(path)
            if self._table_id != (status.st_ino, status.st_mtime_ns):
                with open(path, encoding="utf-8") as file:
                    self._table = json.load(file)
                self._table_id = status.st_ino, status.st_mtime_ns

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        server = request.headers.get(SERVER, "")
        if request.method == "GET" and not server:
            if re.fullmatch(r"/v1/models(/.*)?", request.path):
                return await self._list_models(request)
            text = "This address needs a server's name, as in /NAME/v1, or ?model=NAME"
            raise Failure(404, "model_not_found", f"{text}; {self._known_models(request)}")
        body = Body(request.headers.get("Content-Type", ""))
        try:
            await self._read(request, body)
            server = server or self._select(request, body.find_model())
            return await self._send(request, body, server)
        finally:
            self._stored -= body.size
            body.close()

    async def _read(self, request: web.BaseRequest, body: Body) -> None:
        largest = self._table.get("max_body", 0)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        async for piece in request.content.iter_any():
            if body.size + len(piece) > largest:
                text = f"The request is larger than {largest} bytes."
                raise Failure(413, "request_too_large", text)
            if self._stored + len(piece) > _BODIES * largest:
                text = "Too many large requests at the same time."
                raise Failure(503, "unavailable", text, **{"Retry-After": "5"})
            body.add(piece)
            self._stored += len(piece)

    def _select(self, request: web.BaseRequest, model: str | None) -> str:
        """Return the first server of a model that the key may use."""
        known = self._known_models(request)
        if not model:
            raise Failure(400, "model_required", f"The request names no `model`; {known}")
        servers = self._models.get(model, ())
        if not servers:
            text = f"The model `{model[:_LONGEST_NAME]}` does not exist; {known}"
            raise Failure(404, "model_not_found", text)
        allowed = [server for server in servers if _is_allowed(request, server)]
        if not allowed:
            raise Failure(403, "model_not_allowed", f"This key may not use {model}.")
        return allowed[0]

    @property
    def _models(self) -> Mapping[str, list[str]]:
        models: Mapping[str, list[str]] = self._table.get("models", {})
        return models

    def _known_models(self, request: web.BaseRequest) -> str:
        names = [
            model
            for model, servers in self._models.items()
            if any(_is_allowed(request, server) for server in servers)
        ]
        return f"models: {', '.join(names) or 'none'}."

    async def _send(self, request: web.BaseRequest, body: Body, server: str) -> web.StreamResponse:
        """Send a request to a server, and its answer to the client as it comes."""
        headers = _end_to_end(request.headers)
        headers |= {SERVER: server, "Host": request.host, "Content-Length": str(body.size)}
        url = URL(f"http://{SERVER}{request.rel_url.raw_path_qs}", encoded=True)
        try:
            answer = await self._session.request(
                request.method, url, headers=headers, data=body.pieces(), allow_redirects=False
            )
        except aiohttp.ClientConnectorError:
            text = "The front is being reloaded."
            raise Failure(503, "unavailable", text, **{"Retry-After": "1"}) from None
        except aiohttp.ClientError:
            text = "The server stopped before it answered; the request may have run."
            raise Failure(502, "bad_gateway", text, **{SERVER: server}) from None
        async with answer:
            answer_headers = {**_end_to_end(answer.headers), SERVER: server}
            response = web.StreamResponse(
                status=answer.status, reason=answer.reason, headers=answer_headers
            )
            response.content_length = answer.content_length
            await response.prepare(request)
            try:
                async for piece in answer.content.iter_any():
                    await response.write(piece)
            except (aiohttp.ClientError, OSError):
                # An end without the last chunk: the client sees that the answer is incomplete.
                if request.transport is not None:
                    request.transport.abort()
                return response
            await response.write_eof()
            return response

    async def _list_models(self, request: web.BaseRequest) -> web.Response:
        """Return the models of all servers that the key may use."""
        models: dict[str, list[str]] = {}  # by server
        for model, servers in self._models.items():
            for server in servers:
                if _is_allowed(request, server):
                    models.setdefault(server, []).append(model)
        lists = await asyncio.gather(
            *(self._query_models(request, server, names) for server, names in models.items())
        )
        rows = {str(row["id"]): row for rows in lists for row in rows}
        name = request.path.removeprefix("/v1/models")
        if len(name) <= 1:
            return web.json_response({"object": "list", "data": list(rows.values())})
        if name[1:] not in rows:
            text = f"The model `{name[1:_LONGEST_NAME]}` does not exist"
            raise Failure(404, "model_not_found", f"{text}; {self._known_models(request)}")
        return web.json_response(rows[name[1:]])

    async def _query_models(
        self, request: web.BaseRequest, server: str, names: list[str]
    ) -> list[dict[str, Any]]:
        """Return a server's own list; without an answer, the models of its spec."""
        headers = {**_end_to_end(request.headers), SERVER: server}
        timeout = aiohttp.ClientTimeout(_LIST_PATIENCE)
        with contextlib.suppress(
            aiohttp.ClientError, asyncio.TimeoutError, ValueError, LookupError, TypeError
        ):
            url = f"http://{SERVER}/v1/models"
            async with self._session.get(url, headers=headers, timeout=timeout) as answer:
                rows = (await answer.json())["data"]
                return [{**row, "id": str(row["id"])} for row in rows]
        return [{"id": name, "object": "model", "owned_by": "vllm"} for name in names]


def _is_allowed(request: web.BaseRequest, server: str) -> bool:
    """Return True if the key may use a server, by its line in HAProxy's map."""
    models = request.headers.get(MODELS, "")
    return models == "*" or f",{server}," in models


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOPS}


async def serve(folder: str) -> None:
    """Serve until the parent exits."""
    path, parent = os.path.join(folder, SOCKET), os.getppid()
    if not os.stat(folder).st_mode & stat.S_ISGID:  # else it is shared with the image's user
        os.chmod(folder, 0o711)  # noqa: S103 - HAProxy gives up its rights; the files are for root
    os.umask(0o177)
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # such as clients that disconnect
    connector = aiohttp.UnixConnector(os.path.join(folder, SERVERS), limit=0, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(None),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        cookie_jar=aiohttp.DummyCookieJar(),
        max_line_size=_LARGEST_HEADER,
        max_field_size=_LARGEST_HEADER,
    ) as session:
        server = web.Server(
            Router(folder, session).handle,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            max_line_size=_LARGEST_HEADER,
            max_field_size=_LARGEST_HEADER,
        )
        runner = web.ServerRunner(server)
        await runner.setup()
        listener = _listen(folder, path)
        await web.SockSite(runner, listener, backlog=1024).start()
        while os.getppid() == parent:
            _follow_owner(folder, path)
            await asyncio.sleep(_EVERY)
        await runner.cleanup()


def _listen(folder: str, path: str) -> socket.socket:
    """Listen on a socket that is HAProxy's before it has its name."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{path}.new")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(1024)
    _follow_owner(folder, f"{path}.new")
    os.replace(f"{path}.new", path)
    return listener


def _follow_owner(folder: str, path: str) -> None:
    """Give the router's socket to HAProxy's user, the owner of HAProxy's own socket."""
    with contextlib.suppress(OSError):
        owner = os.stat(os.path.join(folder, SERVERS)).st_uid
        if os.stat(path).st_uid == owner:
            return
        try:
            os.chown(path, owner, -1)
        except PermissionError:  # the image's user; the folder above is closed to others
            os.chmod(path, 0o666)  # noqa: S103


if __name__ == "__main__":
    try:
        asyncio.run(serve(sys.argv[1]))
    except OSError as error:
        say(f"the front's router cannot serve: {error}")
        sys.exit(1)
