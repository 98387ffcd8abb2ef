"""Ask Hugging Face, from this machine, whether a token may read a model: a gated model fails an
hour later otherwise.
"""

from __future__ import annotations

import os
import urllib.parse
from typing import TYPE_CHECKING

from launcher.core.domain import Secret
from launcher.hosts.check import Hub

if TYPE_CHECKING:
    import requests

_SECONDS = 10.0
_HOME = "https://huggingface.co"


def ask(model: str, token: Secret | None) -> Hub:
    """Ask for a model's page in the API (https://huggingface.co/docs/hub/api); `HF_ENDPOINT` names
    another hub.

    Whatever keeps us from an answer is `offline` with the reason: an air-gapped control machine is
    no fault.
    """
    if model.startswith("/"):
        return Hub(status="not asked", text="the model is a path, which needs no token")
    import requests

    where = os.environ.get("HF_ENDPOINT") or _HOME
    value = token.reveal() if token is not None else ""
    if not value.isascii() or not value.isprintable():
        return Hub(status="unauthorized", text="the token has characters that no token has")

    def with_token(request: requests.PreparedRequest) -> requests.PreparedRequest:
        # As `auth`, not among `headers`, where a login in ~/.netrc would replace it; a redirect to
        # another host loses it.
        if value:
            request.headers["Authorization"] = f"Bearer {value}"
        return request

    url = f"{where.rstrip('/')}/api/models/{urllib.parse.quote(model)}/revision/main"
    try:
        # The answer's body is of no use, and might come for ever.
        with requests.get(
            url, auth=with_token, timeout=_SECONDS, allow_redirects=True, stream=True
        ) as answer:
            return _read(model, token, answer)
    except requests.RequestException as error:
        if isinstance(error, ValueError):
            return Hub(status="offline", text=f"HF_ENDPOINT is no address of a hub: {where}")
        host = urllib.parse.urlsplit(where).hostname
        return Hub(status="offline", text=f"{host}: {type(error).__name__}")


def _read(model: str, token: Secret | None, answer: requests.Response) -> Hub:
    if answer.ok:
        return Hub(
            status="ok",
            text=f"{model} may be read" + ("" if token is not None else " without a token"),
        )
    said = answer.headers.get("X-Error-Message") or f"HTTP {answer.status_code}"
    if token is None and answer.status_code in (401, 403):
        return Hub(status="no token", text=said)
    if answer.headers.get("X-Error-Code") == "GatedRepo" or answer.status_code == 403:
        return Hub(status="gated", text=said)
    if answer.status_code == 401:
        return Hub(status="unauthorized", text=said)
    if answer.status_code == 404:
        return Hub(status="not found", text=said)
    return Hub(status="offline", text=said)
