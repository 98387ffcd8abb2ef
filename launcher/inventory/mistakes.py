"""Mistakes in YAML files, and formatting of paths and values in messages."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from launcher.core import similar

YamlPath = tuple[str | int, ...]

_MAX_LENGTH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A mistake at `yaml_path`.

    `line` overrides the path's line. `about_key` means that `text` names the last key itself,
    `unknown` that this key does not exist.
    """

    yaml_path: YamlPath
    text: str
    line: int | None = None
    about_key: bool = False
    unknown: bool = False


def format_path(yaml_path: YamlPath) -> str:
    """Format a path: `('nodes', 1, 'gpus')` → `nodes[1].gpus`."""
    text = ""
    for step in yaml_path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{format_key(step)}" if text else format_key(step)
    return text


def format_key(key: str) -> str:
    """Format a key as printable text on one line."""
    return _shorten(key) if key.isprintable() and key else json.dumps(_shorten(key))


def describe_value(value: object) -> str:
    """Format a value for "not …" in messages: quoted text, or the kind of a collection."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        short = _shorten(value)
        return json.dumps(short, ensure_ascii=not short.isprintable())
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return str(value)


def did_you_mean(text: str, candidates: Iterable[str]) -> str:
    """Return ``; did you mean `similar`?`` for a lowercase candidate similar to `text`, if any."""
    return similar.did_you_mean(text[:_MAX_LENGTH].lower(), candidates)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…"
