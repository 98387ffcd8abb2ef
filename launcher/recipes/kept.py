"""The copy of recipes that this machine keeps: one file, with all of them, their list, and a sum of
it all, by which damage is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.errors import RequestError, UnreadableAnswer
from launcher.recipes.library import Entry, Library, Origin, digest
from launcher.tools import decode

FILE = "recipes.json"
_FORM = 1
_HINT = "take them anew: `vlaunch recipes update`, or `--from` a folder, an archive or a URL"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    form: int
    origin: Origin
    entries: tuple[Entry, ...]
    files: Mapping[str, str]
    sum: str


def write(path: Path, library: Library) -> None:
    """Keep recipes at `path`, as a whole or not at all."""
    content = {
        "form": _FORM,
        "origin": asdict(library.origin),
        "entries": [asdict(each) for each in library.entries],
        "files": dict(library.files),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({**content, "sum": _sum(content)}), encoding="utf-8")
    part.replace(path)


def load(path: Path) -> Library:
    """Return the recipes that are kept at `path`.

    Raises RequestError: there are none, or the file is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RequestError(
            "no recipes are kept on this machine",
            hint="take them: `vlaunch recipes update`; without internet, `--from` a folder or an"
            " archive of github.com/vllm-project/recipes",
        ) from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read", evidence=str(error), hint=_HINT) from None
    try:
        found = decode.read(_Copy, text, str(path))
        content = {key: value for key, value in json.loads(text).items() if key != "sum"}
    except UnreadableAnswer as error:
        raise RequestError(
            f"the recipes kept in {path} are damaged", evidence=error.message, hint=_HINT
        ) from None
    if found.form != _FORM or found.sum != _sum(content):
        raise RequestError(
            f"the recipes kept in {path} are damaged: they are not what was written",
            hint=_HINT,
        )
    if digest(found.files) != found.origin.digest:
        raise RequestError(f"the recipes kept in {path} are damaged", hint=_HINT)
    return Library(files=found.files, origin=found.origin, made=found.entries)


def _sum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
