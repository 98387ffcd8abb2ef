"""Asks Hugging Face what a model consists of, and downloads it, with Hugging Face's own client: it
knows tokens, mirrors, proxies and the layout of its cache. The images of vLLM bring it.

The only part of the chain that needs more than the standard library.
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
from .look import folder
from .store import discard

_REPORT_INTERVAL = 1.0  # seconds
_BUSY_STATUSES = (429, 500, 502, 503, 504)
_RETRY_DELAYS = (1.0, 3.0, 9.0)  # seconds
_WORKERS = 4  # files at a time: as many begin anew after an interruption


class HubError(Exception):
    """The hub, or the way to it, refused a request."""


def resolve_revision(request: dict[str, Any]) -> dict[str, Any]:
    """Return the commit of a revision, and its files with sizes and digests; raises NotFetched."""
    with _hub(request) as hub:
        info = _retry_busy(
            lambda: hub.HfApi().model_info(
                request["name"], revision=request.get("revision") or None, files_metadata=True
            )
        )
        files = []
        for each in info.siblings or []:
            digest = each.lfs["sha256"] if each.lfs else each.blob_id
            files.append([each.rfilename, each.size or 0, digest or ""])
    return {"revision": info.sha, "files": files}


def download_files(request: dict[str, Any], tell: Callable[..., None]) -> dict[str, Any]:
    """Download the named files of a commit into the cache `hub`, and point `ref` to the commit;
    raises NotFetched.

    Progress is told each second. Complete files stay, whatever happens.
    """
    repo = os.path.join(request["hub"], folder(request["name"]))
    discard(repo)  # files of an interrupted copy, which the client cannot use
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_REPORT_INTERVAL):
            tell("progress", have=_cached_bytes(os.path.join(repo, "blobs")))

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
    place.point(repo, f"refs/{request['ref']}", request["revision"])
    place.give_to_owner(repo)
    return {"bytes": _cached_bytes(os.path.join(repo, "blobs"))}


@contextlib.contextmanager
def _hub(request: dict[str, Any]) -> Any:
    """Have Hugging Face's client with the request's environment; its errors become NotFetched."""
    os.environ.update(request.get("env", {}))
    # What the model's users must not do is asked for here.
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.pop(name, None)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if request.get("token"):
        os.environ["HF_TOKEN"] = request["token"]
    try:
        import huggingface_hub
    except ImportError as error:
        raise HubError(f"there is no huggingface_hub here: {error}") from None
    try:
        yield huggingface_hub
    # it has dozens of its own, and those of whatever carries it
    except Exception as error:
        raise HubError(_describe_error(error)) from None


def _retry_busy(ask: Callable[[], Any]) -> Any:
    """Ask again when the hub is busy; the client does so for files alone."""
    for seconds in _RETRY_DELAYS:
        try:
            return ask()
        except Exception as error:
            answer = getattr(error, "response", None)
            if getattr(answer, "status_code", 0) not in _BUSY_STATUSES:
                raise
            time.sleep(seconds)
    return ask()


def _describe_error(error: Exception) -> str:
    """Return the kind and the first lines of an error: it has the address and the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:3]])


def _cached_bytes(blobs: str) -> int:
    """Return the bytes in a cache's folder, of whole files and of those that are begun."""
    size = 0
    with contextlib.suppress(OSError), os.scandir(blobs) as entries:
        for each in entries:
            with contextlib.suppress(OSError):
                size += each.stat().st_blocks * 512
    return size
