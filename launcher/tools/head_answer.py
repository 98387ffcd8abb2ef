"""The form of what `payload/head.py` answers.

Whoever reads such an answer takes it for granted, so it is looked at once, here.

Lists of Ray's own rows are read by `tools/ray.py`, and what the keeper of servers wrote by
`plan/servers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    for name, sound in (("jobs", _is_listed_job), ("replicas", _is_replica)):
        for each in _list(said, name):
            if not sound(each):
                return f"`{name}` has {each!r:.80}"
    return ""


def _is_listed_job(value: Any) -> bool:
    return (
        _is(value, _JOB)
        and isinstance(value.get("submission_id"), str)
        and isinstance(value.get("status"), str)
    )


def _is_replica(value: Any) -> bool:
    return _is(value, _REPLICA) and _REPLICA.keys() <= value.keys()


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
        return isinstance(value, list) and _all_fit(value, kind[0])
    if isinstance(kind, dict):
        return isinstance(value, dict) and _all_fit(value.values(), kind[str])
    if kind is None:
        return value is None
    if kind in (int, _NUMBER):
        return _fits_number(value, kind)
    return type(value) is kind


def _all_fit(values: Iterable[object], kind: Any) -> bool:
    return all(_fits(each, kind) for each in values)


def _fits_number(value: Any, kind: type) -> bool:
    """True for a number of this kind that is none too large; a whole one is a float, too."""
    sort = type(value) is int or (kind is _NUMBER and type(value) is float)
    return sort and -_MOST < value < _MOST
