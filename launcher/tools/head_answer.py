"""The form of what `payload/head.py` answers.

Whoever reads such an answer takes it for granted, so it is looked at once, here.

Lists of Ray's own rows are read by `tools/ray.py`, and what the keeper of servers wrote by
`plan/servers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST = 2**62  # of a count, an offset, an exit code
_NUMBER = float
# A tuple: one of these. A list or a mapping: of such values.
_JOB: Mapping[str, Any] = {
    "submission_id": (str, None),
    "job_id": (str, None),
    "status": (str, None),
    "message": (str, None),
    "metadata": ({str: str}, None),
    "start_time": (_NUMBER, None),
    "end_time": (_NUMBER, None),
    "driver_exit_code": (int, None),
}
_REPLICA: Mapping[str, Any] = {"status": int, "seconds": _NUMBER, "error": str, "answered": bool}
_KINDS: Mapping[str, Any] = {
    "error": str,
    "status": (int, str, None),
    "unreachable": [str],
    "listening": bool,
    "health": int,
    "health_said": str,
    "models": [str],
    "models_status": int,
    "capacity": ({str: str}, None),
    "log": str,
    "offset": int,
    "model": (str, None),
    "text": (str, None),
    "tokens": int,
    "system_fingerprint": (str, None),
    "seconds": _NUMBER,
    "submission_id": str,
    "killed": int,
    "left": [int],
}


def trouble(said: Mapping[str, Any]) -> str:
    """Return which field is not what it should be; empty when all are."""
    for name, kind in _KINDS.items():
        if name in said and not _fits(said[name], kind):
            return f"`{name}` is {said[name]!r:.80}"
    if "job" in said and not _is(said["job"], _JOB):
        return f"`job` is {said['job']!r:.80}"
    for each in _list(said, "jobs"):
        if (
            not _is(each, _JOB)
            or not isinstance(each.get("submission_id"), str)
            or not isinstance(each.get("status"), str)
        ):
            return f"`jobs` has {each!r:.80}"
    for each in _list(said, "replicas"):
        if not _is(each, _REPLICA) or not _REPLICA.keys() <= each.keys():
            return f"`replicas` has {each!r:.80}"
    return ""


def _list(said: Mapping[str, Any], name: str) -> list[Any]:
    value = said.get(name, [])
    return value if isinstance(value, list) else [None]  # which is no such object


def _is(value: object, kinds: Mapping[str, Any]) -> bool:
    return isinstance(value, dict) and all(
        _fits(value[name], kind) for name, kind in kinds.items() if name in value
    )


def _fits(value: object, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(_fits(value, each) for each in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(each, kind[0]) for each in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    if kind is None:
        return value is None
    if kind in (int, _NUMBER):
        sort = type(value) is int or (kind is _NUMBER and type(value) is float)
        return sort and -_MOST < value < _MOST  # type: ignore[operator]
    return type(value) is kind
