"""How far a job is: counters, rates and what it is doing, as `progress.json`, written whole once a
second.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections import deque
from typing import Any

from .job import Job

VERSION = 1
WINDOW = 30.0  # seconds over which rates are taken
WARNINGS = 50
TEXT, EVIDENCE = 1000, 8000  # characters
OVER = ("done", "failed", "refused", "stopped")
CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def plain(text: object, limit: int = TEXT) -> str:
    """Text that a terminal shows as it is: no control characters but line ends and tabs, and not
    too long.
    """
    said = CONTROL.sub("", str(text)).encode("utf-8", "backslashreplace").decode()
    if len(said) <= limit:
        return said
    if limit == EVIDENCE:
        return "…" + said[-(limit - 1) :]
    return said[: limit - 1] + "…"


class Progress:
    """Thread-safe.

    Use it as a context manager: inside, a thread writes the file each second; `set`, `fail` write
    at once.
    """

    def __init__(self, job: Job) -> None:
        self.path = os.path.join(job.work, "progress.json")
        self.lock = threading.RLock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._each_second, name="progress", daemon=True)
        self.started = time.time()
        self.begun = time.monotonic()
        self.state, self.text = "starting", ""
        self.rows: int | None = None
        self.before = self.done = self.errors = self.restarts = 0
        self.tokens_in = self.tokens_out = self.tokens_cached = 0
        self.done_before = self.errors_before = 0
        self.ready = self.wanted = 0
        self.warnings: list[str] = []
        self.error: dict[str, str] | None = None
        self.lost = lost(self.path)
        # when, rows of this run, output tokens
        self.window: deque[tuple[float, int, int]] = deque()
        self.first_result: float | None = None
        self.last_result: float | None = None

    def __enter__(self) -> Progress:
        self.write()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join(timeout=5)
        self.write()

    def set(self, state: str, text: str = "") -> None:
        """Say what the job is doing; writes the file."""
        with self.lock:
            if self.state in OVER:
                return  # how it ended stays: threads of a pipeline that was given up still speak
            self.state, self.text = state, plain(text)
            if state == "running" and not self.window:
                self.window.append((time.monotonic(), 0, 0))
        self.write()

    def say(self, text: str) -> None:
        """Change the detail alone; the file follows within a second."""
        with self.lock:
            self.text = plain(text)

    def begin(self, rows: int, done: int, errors: int) -> None:
        """Say how many rows there are and how many earlier runs accounted for."""
        with self.lock:
            self.rows, self.done, self.errors, self.before = rows, done, errors, done + errors
            self.done_before, self.errors_before = done, errors

    def count(
        self,
        done: int = 0,
        errors: int = 0,
        tokens_in: int = 0,
        tokens_out: int = 0,
        tokens_cached: int = 0,
    ) -> None:
        """Add results; the numbers may be negative when an answer turns out to be an error."""
        now = time.monotonic()
        with self.lock:
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

    def replicas(self, ready: int, wanted: int) -> None:
        with self.lock:
            self.ready, self.wanted = ready, wanted

    def restarted(self, restarts: int) -> None:
        """Set how many restarts there were so far."""
        with self.lock:
            self.restarts = restarts

    def warn(self, text: str) -> None:
        """Add a warning, once."""
        with self.lock:
            said = plain(text)
            if said not in self.warnings and len(self.warnings) < WARNINGS:
                self.warnings.append(said)

    def fail(self, message: str, evidence: str = "", hint: str = "", state: str = "failed") -> None:
        """End with an error; writes the file."""
        with self.lock:
            self.state, self.text = state, plain(message)
            self.error = {
                "message": plain(message),
                "evidence": plain(evidence, EVIDENCE),
                "hint": plain(hint),
            }
        self.write()

    def rates(self) -> tuple[float, float, float | None]:
        """Rows and output tokens in a second, and the seconds that are left at that rate."""
        with self.lock:
            now = time.monotonic()
            made = self.done + self.errors - self.before
            while len(self.window) > 1 and self.window[1][0] <= now - WINDOW:
                self.window.popleft()
            if not self.window:
                return 0.0, 0.0, None
            when, rows, tokens = self.window[0]
            seconds = max(now - when, 1e-9)
            if self.window[-1][0] <= now - 0.5:
                self.window.append((now, made, self.tokens_out))
            if seconds < 0.5:
                return 0.0, 0.0, None  # a rate over an instant is noise
            rate = (made - rows) / seconds
            left = None if self.rows is None else self.rows - self.done - self.errors
            eta = None if left is None or rate <= 0 or self.state in OVER else round(left / rate, 1)
            return round(rate, 3), round((self.tokens_out - tokens) / seconds, 3), eta

    def shown(self) -> dict[str, Any]:
        """What the file says."""
        with self.lock:
            rate, tokens, eta = self.rates()
            return {
                "version": VERSION,
                "state": self.state,
                "text": self.text,
                "submission": os.environ.get("VLAUNCH_JOB", ""),
                "pid": os.getpid(),
                "started": round(self.started, 3),
                "updated": round(time.time(), 3),
                "rows": self.rows,
                "done": self.done,
                "errors": self.errors,
                "before": self.before,
                "tokens_in": self.tokens_in,
                "tokens_out": self.tokens_out,
                "tokens_cached": self.tokens_cached,
                "rows_per_second": rate,
                "tokens_per_second": tokens,
                "eta": eta,
                "replicas": {"ready": self.ready, "wanted": self.wanted},
                "restarts": self.restarts,
                "warnings": list(self.warnings),
                "error": self.error,
                "lost": self.lost,
                "added": [self.done - self.done_before, self.errors - self.errors_before],
            }

    def write(self) -> None:
        """Write the file whole.

        A disk that is full must not end the job from here: the sink says so better.
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

    def _each_second(self) -> None:
        while not self.ended.wait(1.0):
            try:
                self.write()
            except Exception as error:  # the next second is another try
                sys.stderr.write(f"progress: {type(error).__name__}: {error}\n")


def lost(path: str) -> list[dict[str, Any]]:
    """Runs that ended without a word, by the progress that the last of them left: a killed driver
    writes no summary.
    """
    try:
        with open(path, encoding="utf-8") as file:
            said = json.load(file)
        if said["state"] in OVER:
            return []
        run = {
            "started": said["started"],
            "seconds": round(said["updated"] - said["started"], 3),
            "done": said["added"][0],
            "errors": said["added"][1],
            "tokens_in": said["tokens_in"],
            "tokens_out": said["tokens_out"],
            "tokens_cached": said.get("tokens_cached", 0),
            "ended": "lost",
        }
        return [*said.get("lost", []), run][-100:]
    except (OSError, ValueError, KeyError, TypeError):
        return []
