"""Summary of a job, `summary.json`: in the work folder after every run, with the answers when done.

Rates and seconds are those of the last run, counts and tokens those of all.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from typing import Any

from ..job import PlacedJob
from .ledger import Ledger
from .manifest import Manifest
from .progress import TOKENS, Tracker
from .storage import open_location


def write_summary(
    job: PlacedJob, manifest: Manifest | None, ledger: Ledger | None, progress: Tracker, state: str
) -> dict[str, Any]:
    """Write and return the summary of a run that ended in `state` (done, failed, …)."""
    location = open_location(os.path.join(job.work, "summary.json"))
    before = read_earlier(location)
    seconds = time.monotonic() - progress.start_time
    # A refused run has no counts: those of the run before still hold.
    done = ledger.done if ledger else before.get("done", 0)
    errors = ledger.errors if ledger else before.get("errors", 0)
    finished = progress.done + progress.errors - progress.before
    runs = [*before.get("runs", []), *progress.lost, run_entry(progress, seconds, state)]
    tokens = {name: sum(int(run.get(name) or 0) for run in runs) for name in TOKENS}
    summary = {
        "job": job.name,
        "state": state,
        "mode": job.mode,
        "model": job.model,
        "rows": manifest.rows if manifest else before.get("rows"),
        "done": done,
        "errors": errors,
        "seconds": round(seconds, 3),
        "rows_per_second": per_second(finished, seconds),
        **tokens,
        "tokens_per_second": per_second(progress.tokens_out, seconds),
        "gpu_hours": round(progress.gpu_hours, 4),
        "first_row_after": seconds_after_start(progress.first_result, progress),
        "last_row_after": seconds_after_start(progress.last_result, progress),
        "versions": versions(),
        "digest": job.digest,
        "warnings": list(progress.warnings),
        "runs": runs,
    }
    data = (
        json.dumps(summary, ensure_ascii=False, indent=2).encode("utf-8", "backslashreplace")
        + b"\n"
    )
    if state == "done":  # first: if this fails, the run is not yet recorded
        open_location(job.write.path).child("summary.json").write_atomic(data)
    location.write_atomic(data)
    return summary


def seconds_after_start(moment: float | None, progress: Tracker) -> float | None:
    """Return the seconds from the run's start to this moment."""
    return None if moment is None else round(moment - progress.start_time, 3)


def run_entry(progress: Tracker, seconds: float, state: str) -> dict[str, Any]:
    return {
        "started": progress.started,
        "seconds": round(seconds, 3),
        "done": progress.done - progress.done_before,
        "errors": progress.errors - progress.errors_before,
        **{name: getattr(progress, name) for name in TOKENS},
        "ended": state,
    }


def read_earlier(location: Any) -> dict[str, Any]:
    try:
        content = json.loads(location.read())
        return (
            content
            if isinstance(content, dict) and isinstance(content.get("runs", []), list)
            else {}
        )
    except (OSError, ValueError):
        return {}


def per_second(amount: int, seconds: float) -> float:
    return round(amount / seconds, 3) if seconds > 0 else 0.0


def versions() -> dict[str, str | None]:
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("vllm", "ray", "torch"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed
