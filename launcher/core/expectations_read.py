"""How expectations are read: ours (`core/expectations_data/*.yaml`), and a user's file over them.

A user's file has the same two lists, `gpus` and `nics`; an entry whose `model` we have changes only
the keys it gives, any other is a new model and is looked at before ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from launcher.core.errors import RequestError
from launcher.core.expectations import Expectations, Gpu, Nic

DATA = Path(__file__).parent / "expectations_data"
FILES = ("gpus.yaml", "nics.yaml")
_MAX_BYTES = 256 * 1024
# libyaml is ten times as quick. Not for what others wrote: deep nesting overflows its stack and
# ends the process.
_QUICK = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
USER_FILE = "expectations.yaml"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    gpus: list[Gpu] = []
    nics: list[Nic] = []


def load(override: Path | None = None) -> Expectations:
    """Read our figures and a user's file over them; raises RequestError with every mistake in that
    file.
    """
    defaults: dict[str, list[dict[str, Any]]] = {"gpus": [], "nics": []}
    for name in FILES:
        for key, entries in _read(DATA / name, _QUICK).items():
            defaults[key] += entries
    if override is None:
        return _checked(defaults, DATA)
    overrides = _read(override)
    unknown = [str(key) for key in overrides if key not in defaults]
    if unknown:
        raise _mistakes(
            override, [f"{key}: is not known; write `gpus:` or `nics:`" for key in unknown]
        )
    merged = {
        key: _merge(entries, _entries(override, overrides, key))
        for key, entries in defaults.items()
    }
    return _checked(merged, override)


def load_for_user(path: Path | None = None) -> Expectations:
    """Return our figures with those of the file that is named over them, else of
    `expectations.yaml` in the user's settings.

    Raises RequestError with every mistake in that file.
    """
    user_file = platformdirs.user_config_path("vlaunch") / USER_FILE
    return load(path or (user_file if user_file.exists() else None))


def _read(
    path: Path, loader: type[yaml.SafeLoader | yaml.CSafeLoader] = yaml.SafeLoader
) -> dict[str, Any]:
    try:
        text = path.read_bytes()[: _MAX_BYTES + 1]
        if len(text) > _MAX_BYTES:
            raise _mistakes(path, [f"is larger than {_MAX_BYTES // 1024} KiB"])
        data = yaml.load(text.decode(), Loader=loader)  # noqa: S506 - both are safe loaders
    except OSError as error:
        raise _mistakes(
            path, [f"cannot be read: {(error.strerror or str(error)).lower()}"]
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _mistakes(path, ["not valid YAML: " + " ".join(str(error).split())[:200]]) from None
    if not isinstance(data, dict):
        raise _mistakes(path, ["should be a mapping with `gpus:` or `nics:`"])
    return data


def _entries(path: Path, data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    entries = data.get(key) or []
    if not isinstance(entries, list):
        raise _mistakes(path, [f"{key}: should be a list"])
    invalid = [
        index
        for index, entry in enumerate(entries)
        if not isinstance(entry, dict) or not isinstance(entry.get("model"), str)
    ]
    if invalid:
        raise _mistakes(
            path, [f"{key}[{index}]: should be a mapping with a `model`" for index in invalid]
        )
    return entries


def _merge(
    defaults: Sequence[dict[str, Any]], overrides: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    merged = {default["model"]: default for default in defaults}
    additions = []
    for entry in overrides:
        if entry["model"] in merged:
            merged[entry["model"]] = {**merged[entry["model"]], **entry}
        else:
            # A new model is found by its name unless the file says how, and its figures are its
            # author's.
            additions.append(
                {"match": re.escape(entry["model"]), "source": "your own file", **entry}
            )
    return [*additions, *merged.values()]


def _checked(data: Mapping[str, Any], path: Path) -> Expectations:
    try:
        file = _File.model_validate(dict(data))
    except ValidationError as error:
        raise _mistakes(
            path, [_told(detail, data) for detail in error.errors(include_url=False)]
        ) from None
    return Expectations(gpus=tuple(file.gpus), nics=tuple(file.nics))


def _told(error: Any, data: Mapping[str, Any]) -> str:
    """Name the entry by its model: after the merge its place in the list is not the one in the
    file.
    """
    key, index, *rest = error["loc"]
    location = ".".join([f"{key}[{data[key][index]['model']}]", *map(str, rest)])
    if error["type"] == "unexpected_keyword_argument":
        return f"{location}: is not known"
    return (
        f"{location}: {error['msg'].removeprefix('Value error, ').lower()}, not {error['input']!r}"[
            :300
        ]
    )


def _mistakes(path: Path, messages: Sequence[str]) -> RequestError:
    number = "1 mistake" if len(messages) == 1 else f"{len(messages)} mistakes"
    return RequestError(
        f"{number} in the expectations `{path}`",
        evidence=[f"{path}: {message}" for message in messages],
        hint="docs/checks.md tells the keys of an expectations file",
    )
