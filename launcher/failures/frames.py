"""Frames of log lines: what Docker, Compose, systemd, Kubernetes, Ray and vLLM put before a text.

Sources: the formats as recorded, and `docker logs -t`, `docker compose logs`, journalctl's short
formats, `kubectl logs --prefix`, Docker's json-file driver, Ray 2.60 (_private/ray_logging), vLLM
0.32 (logger.py), torch 2.13 (_logging).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator

_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?: ?(?:Z|[+-]\d\d:?\d\d))?"
_FRAME = re.compile(
    "|".join(
        (
            r"\[pod/[a-z0-9.-]+/[a-z0-9-]+\] ?",
            r"[a-zA-Z0-9][\w.-]*-\d+ +\| ",  # Compose
            # [2026-11-20 20:14:02,123 W 17 17] gcs_rpc_client.h:151: of Ray's processes
            rf"\[{_TIME} [A-Z] \d+ \d+\] (?:\([\w-]+\) )?[\w./-]+:\d+: ",
            rf"{_TIME} [\w.-]+ [\w@./-]+\[\d+\]: ",
            rf"\[{_TIME}(?: [\w-]+)?\]:?\s*",
            rf"{_TIME}(?: UTC)?:?(?:\s+|$)",
            r"std(?:out|err) [FP] ",  # CRI
            r"[A-Z][a-z]{2} [ 0-9]\d \d\d:\d\d:\d\d [\w.-]+ [\w@./-]+(?:\[\d+\])?: ",
            r"\[ *\d+\.\d{3,6}\] ",  # kernel
            # (RayWorkerProc pid=7, ip=10.0.0.2), (raylet), (autoscaler +41s)
            r"\((?:[^()]*\bpid=[^()]*|raylet|gcs_server|autoscaler [^()]*)\) ?",
            r"\[rank\d+\]: ?",
            r"\[[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ [\w.]+:\d+\] ",  # torch
            r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./-]+:\d+\] ?",
            r"(?:DEBUG|INFO|WARNING|ERROR) [\w.]+:\d+ -- ",
            r"(?:\x1b\[[0-9;]*m)+ ?",
        )
    )
)
_MAX_PARTS = 8
_JSON_FIELDS = ("log", "message", "msg", "MESSAGE", "textPayload", "line")
_TERMINAL = range(60, 260)  # columns at which copied text may be broken
_BROKEN = 3  # lines of full width


def strip_frame(line: str) -> str:
    """Return the text of a line without the frames before it."""
    position = 0
    for _ in range(_MAX_PARTS):
        match = _FRAME.match(line, position)
        if match is None:
            break
        position = match.end()
    return line[position:] if position else line


def split_lines(text: str, *, copied: bool = False) -> list[str]:
    """Return the lines of a text, and those within JSON; in text that was `copied` from a terminal,
    lines that it broke are one.
    """
    lines = text.replace("\r", "\n").split("\n")
    if '{"' in text:
        lines = [part for line in lines for part in _split_json(line)]
    return list(_join_broken(lines)) if copied else lines


def _split_json(line: str) -> list[str]:
    """Return the lines of the message in a JSON line; another line as it is."""
    before, brace, rest = line.partition('{"')
    if brace and rest.endswith("}"):
        try:
            fields = json.loads(brace + rest)
        except (ValueError, RecursionError):
            return [line]
        for name in _JSON_FIELDS:
            if isinstance(message := fields.get(name), str):
                return [before + part for part in message.splitlines()] or [line]
    return [line]


def _join_broken(lines: list[str]) -> Iterator[str]:
    """Yield lines, joined where a terminal broke them: several lines have its width, none more."""
    width = max(map(len, lines), default=0)
    is_broken = width in _TERMINAL and Counter(map(len, lines))[width] >= _BROKEN
    joined = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        joined += line
        if not (is_broken and len(line) == width and strip_frame(following) == following):
            yield joined
            joined = ""
