"""Lines of a batch's output: responses, and error entries of requests that failed.

Every line has a `response` with the HTTP status; an error entry also has `error`, with the fields
of `openai.types.BatchError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .request import parse_error


def response_line(job_digest: str, row: int, custom_id: str, body: str) -> bytes:
    """Return the line of an answered request; `body` is vLLM's response as JSON."""
    number = format_id(job_digest, row)
    start = f'{{"id": "batch_req_{number}", "custom_id": {json.dumps(custom_id)}, "response": '
    response = f'{{"status_code": 200, "request_id": "req_{number}", "body": {body}}}'
    return f'{start}{response}, "error": null}}\n'.encode()


def error_line(job_digest: str, row: int, custom_id: object, reason: str) -> bytes:
    """Return the line of a failed request.

    `custom_id` is null if the line has none. `error.line` is the row's number, from 1, in all input
    files together.
    """
    number, error = format_id(job_digest, row), parse_error(reason)
    line: Mapping[str, Any] = {
        "id": f"batch_req_{number}",
        "custom_id": custom_id if isinstance(custom_id, str) else None,
        "response": {
            "status_code": error["code"],
            "request_id": f"req_{number}",
            "body": {"error": error},
        },
        "error": {
            "code": error["type"],
            "message": error["message"],
            "param": error["param"],
            "line": row + 1,
        },
    }
    return json.dumps(line).encode() + b"\n"


def format_id(job_digest: str, row: int) -> str:
    """Return the id of a row's response, which is the same in every run of a job."""
    return f"{job_digest[:16]}_{row}"
