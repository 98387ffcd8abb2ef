"""Loading of expectations: the built-in files (`core/expectations_data/*.yaml`) and a user's file.

A user's file has the same two lists, `gpus` and `nics`. An entry with a built-in `model` overrides
only the keys it sets; any other entry is a new model and takes precedence.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from launcher.core.errors import RequestError
from launcher.core.expectations import Expectations, ExpectedGpu, ExpectedNic

DATA = Path(__file__).parent / "expectations_data"
FILES = ("gpus.yaml", "nics.yaml")
_MAX_BYTES = 256 * 1024
# libyaml is ten times faster, but deep nesting overflows its stack: only for our own files.
_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
USER_FILE = "expectations.yaml"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    gpus: list[ExpectedGpu] = []
    nics: list[ExpectedNic] = []


def load_expectations(override: Path | None = None) -> Expectations:
    """Load the built-in figures with a user's file over them.

    Raises RequestError with all mistakes in that file.
    """
    defaults: dict[str, list[dict[str, Any]]] = {"gpus": [], "nics": []}
    for name in FILES:
        for key, entries in _read_yaml(DATA / name, _FAST_LOADER).items():
            defaults[key] += entries
    if override is None:
        return _validate(defaults, DATA)
    overrides = _read_yaml(override)
    unknown = [str(key) for key in overrides if key not in defaults]
    if unknown:
        raise _mistakes_error(
            override, [f"{key}: unknown key; use `gpus:` or `nics:`" for key in unknown]
        )
    merged = {
        key: _merge_entries(entries, _list_entries(override, overrides, key))
        for key, entries in defaults.items()
    }
    return _validate(merged, override)


def load_for_user(path: Path | None = None) -> Expectations:
    """Load the figures with the file at `path` over them, else the user's `expectations.yaml`, if
    any.

    Raises RequestError with all mistakes in that file.
    """
    user_file = platformdirs.user_config_path("vlaunch") / USER_FILE
    return load_expectations(path or (user_file if user_file.exists() else None))


def _read_yaml(
    path: Path, loader: type[yaml.SafeLoader | yaml.CSafeLoader] = yaml.SafeLoader
) -> dict[str, Any]:
    try:
        text = path.read_bytes()[: _MAX_BYTES + 1]
        if len(text) > _MAX_BYTES:
            raise _mistakes_error(path, [f"is larger than {_MAX_BYTES // 1024} KiB"])
        data = yaml.load(text.decode(), Loader=loader)  # noqa: S506 - both are safe loaders
    except OSError as error:
        raise _mistakes_error(
            path, [f"cannot be read: {(error.strerror or str(error)).lower()}"]
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _mistakes_error(
            path, ["not valid YAML: " + " ".join(str(error).split())[:200]]
        ) from None
    if not isinstance(data, dict):
        raise _mistakes_error(path, ["should be a mapping with `gpus:` or `nics:`"])
    return data


def _list_entries(path: Path, data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    entries = data.get(key) or []
    if not isinstance(entries, list):
        raise _mistakes_error(path, [f"{key}: should be a list"])
    invalid = [
        index
        for index, entry in enumerate(entries)
        if not isinstance(entry, dict) or not isinstance(entry.get("model"), str)
    ]
    if invalid:
        raise _mistakes_error(
            path, [f"{key}[{index}]: should be a mapping with a `model`" for index in invalid]
        )
    return entries


def _merge_entries(
    defaults: Sequence[dict[str, Any]], overrides: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    merged = {default["model"]: default for default in defaults}
    additions = []
    for entry in overrides:
        if entry["model"] in merged:
            merged[entry["model"]] = {**merged[entry["model"]], **entry}
        else:
            # Without `match`, search for the model's name.
            additions.append(
                {"match": re.escape(entry["model"]), "source": "your own file", **entry}
            )
    return [*additions, *merged.values()]


def _validate(data: Mapping[str, Any], path: Path) -> Expectations:
    try:
        file = _File.model_validate(dict(data))
    except ValidationError as error:
        raise _mistakes_error(
            path, [_describe_error(detail, data) for detail in error.errors(include_url=False)]
        ) from None
    return Expectations(gpus=tuple(file.gpus), nics=tuple(file.nics))


def _describe_error(error: Any, data: Mapping[str, Any]) -> str:
    """Describe a validation error, naming the entry by its model: merging changes its index."""
    key, index, *rest = error["loc"]
    location = ".".join([f"{key}[{data[key][index]['model']}]", *map(str, rest)])
    if error["type"] == "unexpected_keyword_argument":
        return f"{location}: unknown key"
    return (
        f"{location}: {error['msg'].removeprefix('Value error, ').lower()}, not {error['input']!r}"[
            :300
        ]
    )


def _mistakes_error(path: Path, messages: Sequence[str]) -> RequestError:
    number = "1 mistake" if len(messages) == 1 else f"{len(messages)} mistakes"
    return RequestError(
        f"{number} in the expectations file `{path}`",
        evidence=[f"{path}: {message}" for message in messages],
        hint="docs/how-to/prepare-hosts.md lists the keys of an expectations file",
    )
