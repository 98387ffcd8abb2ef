"""Ask Hugging Face, from this machine, whether a token may read a model: a gated model fails an hour later otherwise."""

from __future__ import annotations

import os
import urllib.parse

from launcher.checks.shape import Hub
from launcher.model import Secret

_SECONDS = 10.0
_HOME = "https://huggingface.co"


def ask(model: str, token: Secret | None) -> Hub:
    """Ask for a model's page in the API (https://huggingface.co/docs/hub/api); `HF_ENDPOINT` names another hub.

    Whatever keeps us from an answer is `offline` with the reason: an air-gapped control machine is no fault.
    """
    if model.startswith("/"):
        return Hub(status="not asked", text="the model is a path, which needs no token")
    import requests  # noqa: PLC0415 - only this question needs it

    where = os.environ.get("HF_ENDPOINT") or _HOME
    url = f"{where.rstrip('/')}/api/models/{urllib.parse.quote(model)}/revision/main"
    headers = {"Authorization": f"Bearer {token.reveal()}"} if token is not None else {}
    try:
        answer = requests.get(url, headers=headers, timeout=_SECONDS, allow_redirects=True)
    except requests.RequestException as error:
        return Hub(status="offline", text=f"{urllib.parse.urlsplit(where).hostname}: {type(error).__name__}")
    if answer.ok:
        return Hub(status="ok", text=f"{model} may be read" + ("" if token is not None else " without a token"))
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
