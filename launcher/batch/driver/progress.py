"""Progress of a job: counters, rates and state. The driver writes `progress.json` every second; the
launcher reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import typing
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from ..job import PlacedJob
from .forecast import Forecast

VERSION = 1
WINDOW = 30.0  # seconds that rates are averaged over
WARNINGS = 50
TEXT, EVIDENCE = 1000, 8000  # most characters written
MAX_CHARS = 4000  # most characters read
MAX_NUMBER = 1e18  # limit of counters and times
FINAL_STATES = ("done", "failed", "refused", "stopped")
# tokens of prompts, of answers, and of prompts served from vLLM's cache
TOKENS = ("tokens_in", "tokens_out", "tokens_cached")
CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


@dataclass(kw_only=True)
class JobFailure:
    """The error that ended a driver, as it reported it."""

    message: str
    evidence: str = ""
    hint: str = ""


@dataclass(kw_only=True)
class Progress:
    """Progress of a job, as last written by its driver.

    `rows` of None: the input is not yet counted. `gpu_hours` are those of all runs, from a
    replica's process on.
    """

    state: str = ""
    text: str = ""
    submission: str = ""
    started: float = 0.0
    updated: float = 0.0
    rows: int | None = None
    done: int = 0
    errors: int = 0
    before: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    eta: float | None = None
    gpu_hours: float = 0.0
    ready: int = 0
    wanted: int = 0
    restarts: int = 0
    warnings: tuple[str, ...] = ()
    error: JobFailure | None = None

    @property
    def over(self) -> bool:
        """True if the driver reported its end."""
        return self.state in FINAL_STATES

    @property
    def end(self) -> float | None:
        """Estimated time of the end, in seconds since 1970."""
        return None if self.eta is None else round(self.updated + self.eta, 3)

    @property
    def accounted(self) -> int:
        """Rows with an answer or an error row."""
        return self.done + self.errors

    def to_json(self) -> dict[str, Any]:
        """Return the content of `progress.json`."""
        fields = {**asdict(self), "warnings": list(self.warnings)}
        replicas = {name: fields.pop(name) for name in ("ready", "wanted")}
        return {"version": VERSION, **fields, "replicas": replicas}


def parse_progress(raw: object) -> Progress:
    """Parse progress of a driver of any version; invalid values become defaults."""
    fields = raw if isinstance(raw, dict) else {}
    replicas, error, warnings = (fields.get(key) for key in ("replicas", "error", "warnings"))
    replicas = replicas if isinstance(replicas, dict) else {}
    fields = {**fields, "ready": replicas.get("ready"), "wanted": replicas.get("wanted")}
    kinds = typing.get_type_hints(Progress)
    del kinds["error"], kinds["warnings"]
    values = {name: coerce(kind, fields.get(name)) for name, kind in kinds.items()}
    if isinstance(warnings, list):
        texts = (to_line(text) for text in warnings if isinstance(text, str))
        values["warnings"] = tuple(texts)[-WARNINGS:]
    if isinstance(error, dict):
        evidence, hint = (error.get(key) for key in ("evidence", "hint"))
        values["error"] = JobFailure(
            message=to_line(error.get("message")), evidence=to_text(evidence), hint=to_text(hint)
        )
    return Progress(**values)


def coerce(kind: Any, value: Any) -> Any:
    """Return a value of the given type within bounds, else that type's empty value."""
    if options := typing.get_args(kind):
        return None if value is None else coerce(options[0], value)
    if kind is str:
        return to_line(value)
    return kind(value) if type(value) in (int, kind) and 0 <= value < MAX_NUMBER else kind()


def to_line(value: object) -> str:
    """Return text as one line of bounded length."""
    return " ".join(value.split())[:MAX_CHARS] if isinstance(value, str) else ""


def to_text(value: object) -> str:
    """Return text of bounded length."""
    return value[:MAX_CHARS].strip() if isinstance(value, str) else ""


def to_plain(text: object, limit: int = TEXT) -> str:
    """Return text safe for a terminal: no control characters except line ends and tabs, bounded."""
    shown = CONTROL.sub("", str(text)).encode("utf-8", "backslashreplace").decode()
    if len(shown) <= limit:
        return shown
    if limit == EVIDENCE:
        return "…" + shown[-(limit - 1) :]
    return shown[: limit - 1] + "…"


class Tracker(Progress):
    """Progress of a running job; thread-safe.

    A context manager with a thread that writes the file every second; `set` and `fail` write at
    once.
    """

    def __init__(self, job: PlacedJob) -> None:
        super().__init__(
            state="starting",
            submission=os.environ.get("VLAUNCH_JOB", ""),
            started=round(time.time(), 3),
        )
        self.path = os.path.join(job.work, "progress.json")
        self.lock = threading.RLock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._write_loop, name="progress", daemon=True)
        self.start_time = time.monotonic()
        self.forecast = Forecast()
        self.gpus, self.gpus_since = 0.0, self.start_time
        self.gpus_per_replica = job.replica_gpus
        self.done_before = self.errors_before = 0
        self.lost, self.gpu_hours = earlier_runs(self.path)
        # time, rows of this run, output tokens
        self.window: deque[tuple[float, int, int]] = deque()
        self.first_result: float | None = None
        self.last_result: float | None = None

    def __enter__(self) -> Tracker:
        self.write()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join(timeout=5)
        self.write()

    def set(self, state: str, text: str = "") -> None:
        """Set the job's state; writes the file."""
        with self.lock:
            if self.over:
                return  # a final state stays: threads of an abandoned pipeline may still report
            self.count_gpus()
            self.state, self.text = state, to_plain(text)
            if state == "running" and not self.window:
                self.window.append((time.monotonic(), 0, 0))
        self.write()

    def say(self, text: str) -> None:
        """Set the detail text; the file follows within a second."""
        with self.lock:
            self.text = to_plain(text)

    def begin(self, rows: int, done: int, errors: int, bytes_left: float = 0.0) -> None:
        """Set the total rows, those accounted for by earlier runs, and the bytes of the others."""
        with self.lock:
            self.forecast.begin(rows - done - errors, bytes_left)
            self.rows, self.done, self.errors, self.before = rows, done, errors, done + errors
            self.done_before, self.errors_before = done, errors

    def count(
        self,
        done: int = 0,
        errors: int = 0,
        tokens_in: int = 0,
        tokens_out: int = 0,
        tokens_cached: int = 0,
        input_bytes: float = 0.0,
    ) -> None:
        """Add results, of rows with these bytes; negative numbers turn answers into errors."""
        now = time.monotonic()
        with self.lock:
            if done + errors > 0:
                self.forecast.add(now, done + errors, input_bytes)
            if self.first_result is None:
                self.first_result = now
            if not self.window:
                self.window.append((now, 0, 0))
            self.last_result = now
            self.done += done
            self.errors += errors
            self.tokens_in += tokens_in
            self.tokens_out += tokens_out
            self.tokens_cached += tokens_cached

    def replicas(self, ready: int, target_count: int, loading: int = 0) -> None:
        """Set the number of replicas; those that are loading hold GPUs, too."""
        with self.lock:
            self.ready, self.wanted = ready, target_count
            self.forecast.set_replicas(time.monotonic(), ready)
            self.count_gpus()
            self.gpus = (ready + loading) * self.gpus_per_replica

    def count_gpus(self) -> None:
        """Count the time of the GPUs in use until now."""
        now = time.monotonic()
        if not self.over:
            self.gpu_hours += self.gpus * (now - self.gpus_since) / 3600
        self.gpus_since = now

    def restarted(self, restarts: int) -> None:
        """Set the number of restarts."""
        with self.lock:
            self.restarts = restarts

    def warn(self, text: str) -> None:
        """Add a warning, once."""
        with self.lock:
            warning = to_plain(text)
            if warning not in self.warnings and len(self.warnings) < WARNINGS:
                self.warnings += (warning,)

    def fail(self, message: str, evidence: str = "", hint: str = "", state: str = "failed") -> None:
        """Set the final error; writes the file."""
        with self.lock:
            self.count_gpus()
            self.state, self.text = state, to_plain(message)
            self.error = JobFailure(
                message=to_plain(message),
                evidence=to_plain(evidence, EVIDENCE),
                hint=to_plain(hint),
            )
        self.write()

    def rates(self) -> tuple[float, float, float | None]:
        """Return rows per second, output tokens per second and the remaining seconds."""
        with self.lock:
            now = time.monotonic()
            finished = self.done + self.errors - self.before
            while len(self.window) > 1 and self.window[1][0] <= now - WINDOW:
                self.window.popleft()
            if not self.window:
                return 0.0, 0.0, None
            when, rows, tokens = self.window[0]
            seconds = max(now - when, 1e-9)
            if self.window[-1][0] <= now - 0.5:
                self.window.append((now, finished, self.tokens_out))
            if seconds < 0.5:
                return 0.0, 0.0, None  # a rate over an instant is noise
            rate = (finished - rows) / seconds
            eta = None
            if self.rows is not None and not self.over:
                read = self.tokens_in - self.tokens_cached
                eta = self.forecast.remaining(now, read, self.tokens_out)
            return (
                round(rate, 3),
                round((self.tokens_out - tokens) / seconds, 3),
                None if eta is None else round(eta, 1),
            )

    def shown(self) -> dict[str, Any]:
        """Return the content of the file."""
        with self.lock:
            self.rows_per_second, self.tokens_per_second, self.eta = self.rates()
            self.count_gpus()
            self.updated = round(time.time(), 3)
            added = [self.done - self.done_before, self.errors - self.errors_before]
            return {**self.to_json(), "pid": os.getpid(), "lost": self.lost, "added": added}

    def write(self) -> None:
        """Write the file atomically.

        A full disk must not end the job from here: the sink reports it better.
        """
        with self.lock:
            hidden = f"{self.path}.new"
            try:
                with open(hidden, "w", encoding="utf-8") as file:
                    json.dump(self.shown(), file, ensure_ascii=False)
                os.replace(hidden, self.path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.unlink(hidden)
                sys.stderr.write(f"{self.path} cannot be written: {error}\n")

    def _write_loop(self) -> None:
        while not self.ended.wait(1.0):
            try:
                self.write()
            except Exception as error:  # retried in a second
                sys.stderr.write(f"progress: {type(error).__name__}: {error}\n")


def earlier_runs(path: str) -> tuple[list[dict[str, Any]], float]:
    """Return earlier runs that exited without a summary, from their last progress, and the GPU
    hours of all.
    """
    hours = 0.0
    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
        last = parse_progress(raw)
        hours = last.gpu_hours
        if last.over:
            return [], hours
        run = {
            "started": last.started,
            "seconds": round(last.updated - last.started, 3),
            "done": raw["added"][0],
            "errors": raw["added"][1],
            **{name: getattr(last, name) for name in TOKENS},
            "ended": "lost",
        }
        return [*raw.get("lost", []), run][-100:], hours
    except (OSError, ValueError, KeyError, TypeError):
        return [], hours
