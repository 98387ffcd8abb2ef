"""vLLM's API server in a replica, without a network.

The image's vLLM parses the bodies of requests and builds the responses, so both are those of
`vllm serve`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from ....inventory.engine_args import to_flags
from ...job import CACHED_TOKENS
from ..engine_loop import exit_process, watch_process
from ..job_file import Failed
from .request import RequestError

DOWNLOAD_SECONDS = 300.0
CLOSE_SECONDS = 60.0


class ApiServer:
    """vLLM's web application and its engine, called through ASGI from an event loop's thread.

    Args:
        arguments: arguments of `vllm serve`, by their Python names.
        end: called when the engine has failed.

    Raises:
        Failed: vLLM rejects the arguments.
    """

    def __init__(
        self, arguments: Mapping[str, Any], end: Callable[[], None] = exit_process
    ) -> None:
        self.args, self.end = parse_arguments(arguments), end
        self.stack = contextlib.AsyncExitStack()
        self.loop = asyncio.new_event_loop()
        # In this thread: vLLM finds its placement group as the actor's.
        self.loop.run_until_complete(self.start())
        self.thread = threading.Thread(target=self.loop.run_forever, name="api", daemon=True)
        self.thread.start()
        self.over = watch_process(lambda: not self.client.errored, end)

    async def start(self) -> None:
        """Start the engine and create the application."""
        from vllm.entrypoints.openai import api_server
        from vllm.usage.usage_lib import UsageContext

        # defaults for throughput, as `vllm.LLM` has
        engine = api_server.build_async_engine_client(
            self.args, usage_context=UsageContext.LLM_CLASS
        )
        self.client = await self.stack.enter_async_context(engine)
        tasks = await self.client.get_supported_tasks()
        self.app = api_server.build_app(self.args, tasks, self.client.model_config)
        await api_server.init_app_state(self.client, self.app.state, self.args, tasks)
        # vLLM tells it to exit when the engine has failed
        self.app.state.server = SimpleNamespace()

    def answer(self, prompts: Sequence[Mapping[str, str]]) -> list[Any]:
        """Return each request's response (a body as bytes) or exception; thread-safe.

        A request has its body in `prompt`, and its path in `second`.
        """

        async def answer_all() -> list[Any]:
            requests = (self.send(prompt["second"], prompt["prompt"]) for prompt in prompts)
            return await asyncio.gather(*requests, return_exceptions=True)

        return asyncio.run_coroutine_threadsafe(answer_all(), self.loop).result()

    async def send(self, path: str, body: str) -> bytes:
        """Return the body of a response.

        Raises:
            RequestError: vLLM rejects the request, or fails to answer it.
        """
        try:
            content_type, data = "application/json", body.encode()
            if path.startswith("/v1/audio/"):
                content_type, data = await self.audio_form(json.loads(body))
            status, answer = await post(self.app, path, content_type, data)
        finally:
            if self.client.errored:
                self.end()
        if status != HTTPStatus.OK:
            raise self.request_error(path, status, answer)
        return answer

    async def audio_form(self, body: dict[str, Any]) -> tuple[str, bytes]:
        """Return a request about audio as a form with the file at `file_url`: type and content.

        Raises:
            RequestError: the URL is missing, not allowed or unreadable.
        """
        from urllib3.filepost import encode_multipart_formdata

        audio = await download(body.pop("file_url", None), self.args.allowed_media_domains)
        fields: list[tuple[str, Any]] = [("file", ("audio.bin", audio))]
        for name, value in body.items():
            for item in value if isinstance(value, list) else [value]:
                fields.append((name, item if isinstance(item, str) else json.dumps(item)))
        data, content_type = encode_multipart_formdata(fields)
        return content_type, data

    def request_error(self, path: str, status: int, answer: bytes) -> RequestError:
        """Return the error of a response other than 200."""
        error: Any = answer.decode(errors="replace")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = json.loads(answer)["error"]
        fields = error if isinstance(error, dict) else {"message": str(error)}
        message, param = str(fields.get("message") or ""), fields.get("param")
        if status == HTTPStatus.NOT_FOUND:
            names = [*(self.args.served_model_name or [self.args.model])]
            if message == "Not Found":
                message = f"the job's model ({', '.join(names)}) does not support {path}"
            else:
                names += [module.name for module in self.args.lora_modules or ()]
                message = f"{message} The job has {', '.join(names)}."
        type_ = str(fields.get("type") or HTTPStatus(status).phrase)
        return RequestError(message, param if isinstance(param, str) else None, type_, status)

    def close(self) -> None:
        """Shut down the engine's processes."""
        self.over.set()
        closing = asyncio.run_coroutine_threadsafe(self.stack.aclose(), self.loop)
        closing.result(CLOSE_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def parse_arguments(arguments: Mapping[str, Any]) -> Namespace:
    """Return arguments as vLLM's command line parses them.

    Raises:
        Failed: vLLM rejects them.
    """
    from vllm.entrypoints.cli import serve

    values = dict(arguments)
    model = values.pop("model")
    command = serve.cmd_init()[0]
    parser = serve.FlexibleArgumentParser(prog="vllm")
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            args: Namespace = parser.parse_args(["serve", model, *to_flags(values)])
        args.model = model
        command.validate(args)
    except (SystemExit, ValueError, TypeError) as problem:
        lines = messages.getvalue().strip().splitlines() or [str(problem)]
        raise Failed(
            "vLLM rejected the engine arguments",
            lines[-1],
            "compare `engine.args` with `vllm serve --help=all`",
        ) from problem
    return args


async def post(app: Any, path: str, content_type: str, data: bytes) -> tuple[int, bytes]:
    """Send an ASGI application a request; return the status and the body of its response."""
    key = os.environ.get("VLLM_API_KEY", "")
    headers = {
        "host": "localhost",
        "content-type": content_type,
        "content-length": str(len(data)),
        "authorization": f"Bearer {key}",
    }
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("localhost", 0),
        "server": ("localhost", 80),
    }
    received = [{"type": "http.request", "body": data, "more_body": False}]
    status, parts, done = 0, list[bytes](), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if received:
            return received.pop()
        await done.wait()
        return {"type": "http.disconnect"}

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                done.set()

    try:
        await app(scope, receive, send)
    except Exception as problem:
        # Starlette raises errors again after it has sent a response.
        if not done.is_set():
            return 500, f"{type(problem).__name__}: {problem}".encode()
    return status, b"".join(parts)


async def download(url: object, allowed_domains: Sequence[str] | None) -> bytes:
    """Return the content of an `http`, `https` or `data` URL.

    Raises:
        RequestError: it is not allowed, or cannot be read.
    """
    try:
        if not isinstance(url, str) or not url.startswith(("http://", "https://", "data:")):
            raise ValueError("not an http, https or data URL")
        if url.startswith("data:"):
            return base64.b64decode(url.partition(",")[2])
        import vllm.envs
        from urllib3.util import parse_url
        from vllm.connections import global_http_connection

        target = parse_url(url)
        if allowed_domains and target.hostname not in allowed_domains:
            raise ValueError(f"{target.hostname} is not in `allowed_media_domains`")
        content: bytes = await global_http_connection.async_get_bytes(
            target.url,
            timeout=DOWNLOAD_SECONDS,
            allow_redirects=vllm.envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS,
        )
    except Exception as problem:  # aiohttp has exceptions of its own
        raise RequestError(f"`file_url` cannot be read: {problem}", "file_url") from problem
    return content


def response_columns(body: bytes) -> dict[str, Any]:
    """Return the columns of a response: its body as text, and its counts of tokens.

    Raises:
        ValueError: it is not JSON.
    """
    content = json.loads(body)
    usage = content.get("usage") if isinstance(content, dict) else None
    counts: Mapping[str, Any] = usage if isinstance(usage, dict) else {}
    return {
        "response": body.decode(),
        "prompt_tokens": counts.get("prompt_tokens") or 0,
        "output_tokens": counts.get("completion_tokens") or 0,
        CACHED_TOKENS: (counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    }
