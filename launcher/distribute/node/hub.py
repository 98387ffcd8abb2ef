"""Queries and downloads with Hugging Face's own client, which handles tokens, mirrors, proxies and
the layout of its cache. vLLM's images contain it.

No other module of the node program needs more than the standard library.
"""

from __future__ import annotations

import contextlib
import glob
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from . import place
from .models import cache_folder
from .store import discard_parts

_REPORT_INTERVAL = 1.0  # seconds
_BUSY_STATUSES = (429, 500, 502, 503, 504)
_RETRY_DELAYS = (1.0, 3.0, 9.0)  # seconds
_WORKERS = 4  # files at a time; after an interruption these restart from their first byte


class HubError(Exception):
    """The hub rejected a request, or could not be reached."""


def resolve_revision(request: dict[str, Any]) -> dict[str, Any]:
    """Return the commit of a revision, and its files with sizes and digests; raises HubError."""
    with _hub(request) as hub:
        info = _retry_busy(
            lambda: hub.HfApi().model_info(
                request["name"], revision=request.get("revision") or None, files_metadata=True
            )
        )
        files = []
        for sibling in info.siblings or []:
            digest = sibling.lfs["sha256"] if sibling.lfs else sibling.blob_id
            files.append([sibling.rfilename, sibling.size or 0, digest or ""])
    return {"revision": info.sha, "files": files}


def download_files(request: dict[str, Any], emit: Callable[..., None]) -> dict[str, Any]:
    """Download the named files of a commit into the cache `hub`, and point `ref` to the commit;
    raises HubError.

    Emits progress each second. Complete files stay after a failure.
    """
    repo = os.path.join(request["hub"], cache_folder(request["name"]))
    discard_parts(repo)  # the client cannot use the parts of an interrupted copy
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_REPORT_INTERVAL):
            emit("progress", have=_cached_bytes(os.path.join(repo, "blobs")))

    threading.Thread(target=watch, daemon=True).start()
    try:
        with _hub(request) as hub:
            hub.snapshot_download(
                request["name"],
                revision=request["revision"],
                cache_dir=request["hub"],
                allow_patterns=[glob.escape(name) for name in request["files"]],
                max_workers=_WORKERS,
            )
    finally:
        done.set()
    place.write_ref(repo, f"refs/{request['ref']}", request["revision"])
    place.give_to_owner(repo)
    return {"bytes": _cached_bytes(os.path.join(repo, "blobs"))}


@contextlib.contextmanager
def _hub(request: dict[str, Any]) -> Any:
    """Yield Hugging Face's client with the request's environment; its errors become HubError."""
    os.environ.update(request.get("env", {}))
    # The containers run offline, but this request needs the hub.
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.pop(name, None)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if request.get("token"):
        os.environ["HF_TOKEN"] = request["token"]
    try:
        import huggingface_hub
    except ImportError as error:
        raise HubError(f"huggingface_hub is not installed here: {error}") from None
    try:
        yield huggingface_hub
    # the client has dozens of exceptions, and passes on those of its HTTP library
    except Exception as error:
        raise HubError(_describe_error(error)) from None


def _retry_busy(call: Callable[[], Any]) -> Any:
    """Retry a call while the hub is busy; the client itself retries only downloads of files."""
    for seconds in _RETRY_DELAYS:
        try:
            return call()
        except Exception as error:
            answer = getattr(error, "response", None)
            if getattr(answer, "status_code", 0) not in _BUSY_STATUSES:
                raise
            time.sleep(seconds)
    return call()


def _describe_error(error: Exception) -> str:
    """Return the class and the first lines of an error, with the address and the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:3]])


def _cached_bytes(blobs: str) -> int:
    """Return the bytes in a cache's folder, of complete and incomplete files."""
    size = 0
    with contextlib.suppress(OSError), os.scandir(blobs) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                size += entry.stat().st_blocks * 512
    return size
