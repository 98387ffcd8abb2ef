"""A line of a batch's input as a request: checks of everything but its body."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
# also below a prefix, such as /v1/score
SUFFIXES = ("/score", "/rerank")
MAX_MESSAGE = 2000  # characters


class RequestError(Exception):
    """A request without an answer; its text is OpenAI's error object as JSON.

    `code` is an HTTP status.
    """

    def __init__(
        self, message: str, param: str | None = None, type: str = "BadRequestError", code: int = 400
    ) -> None:
        error = {"message": message[:MAX_MESSAGE], "type": type, "param": param, "code": code}
        super().__init__(json.dumps(error, ensure_ascii=False))


def parse_error(text: str) -> dict[str, Any]:
    """Return the error object of an error row's reason; other reasons are its message."""
    try:
        error = json.loads(text)
        if isinstance(error, dict) and "message" in error:
            return error
    except ValueError:
        pass
    return parse_error(str(RequestError(text)))


def parse_request(columns: Mapping[str, Any]) -> tuple[str, str]:
    """Return a line's path in vLLM's API and its body as JSON.

    Raises:
        RequestError: a field is missing or wrong, or the response would be a stream.
    """
    if not isinstance(columns.get("custom_id"), str):
        raise RequestError("`custom_id` should be text", "custom_id")
    if columns.get("method") != "POST":
        raise RequestError("`method` should be POST", "method")
    path = find_path(columns.get("url"))
    body = columns.get("body")
    if not isinstance(body, dict):
        raise RequestError("`body` should be an object", "body")
    if body.get("stream"):
        raise RequestError("`stream` should be false in a batch", "stream")
    return path, json.dumps(body, ensure_ascii=False)


def find_path(url: object) -> str:
    """Return the path of vLLM's API for a line's `url`.

    Raises:
        RequestError: batches do not support it.
    """
    if isinstance(url, str):
        for path in (*PATHS, *SUFFIXES):
            if url == path or (path in SUFFIXES and url.endswith(path)):
                return path
    supported = ", ".join((*PATHS, *SUFFIXES))
    raise RequestError(f"`url` should be one of {supported}, not {str(url)[:100]!r}", "url")
