"""vLLM's own watchdog (`--watchdog-config`, since 0.33), which writes the stacks of an engine or a
rank that stands still, and of an engine that is stopped, to files beside the server's log.

Ranks that Ray starts have none (v1/executor/ray_executor_v2.py of 0.33): with Ray only the engine
writes.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import re
from collections.abc import Collection, Sequence
from typing import Any

from ... import upstream

OPTION = "--watchdog-config"
_TIMEOUT = 60  # seconds; vLLM's default is 300
_FILES = 8  # of earlier engines
# vLLM has the option if it has this file: versions of development builds mean nothing.
_MODULE = "config/watchdog_config.py"
_DUMP = re.compile(upstream.text("vllm.watchdog-dump"))


def add_option(argv: Sequence[str], folder: str) -> tuple[str, ...]:
    """Return a command with the watchdog turned on, unless it configures the watchdog itself, or
    vLLM has none.
    """
    if any(map(_configures, argv)) or not _is_available():
        return tuple(argv)
    return (*argv, OPTION, json.dumps({"timeout": _TIMEOUT, "dump_dir": folder}))


def list_dumps(argv: Sequence[str], pids: Collection[int]) -> list[str]:
    """Return the files that the watchdogs of some processes wrote, oldest first, by the settings in
    a command.
    """
    folder = _dump_folder(argv)
    return [
        path
        for path in (_dumps_by_age(folder) if folder else ())
        if (match := _DUMP.fullmatch(os.path.basename(path))) and int(match[1]) in pids
    ]


def remove_old(folder: str) -> None:
    """Remove all but the newest files of a server's folder: each stop of an engine leaves one."""
    for path in _dumps_by_age(folder)[:-_FILES]:
        with contextlib.suppress(OSError):
            os.remove(path)


def _is_available() -> bool:
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("vllm")
        folders = (spec.submodule_search_locations if spec else None) or ()
        return any(os.path.exists(os.path.join(folder, _MODULE)) for folder in folders)
    return False


def _configures(argument: str) -> bool:
    """True for the option in any form: abbreviated, with `=`, or with `.dump_dir`."""
    name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
    return len(name) > 2 and OPTION.startswith(name)


def _dump_folder(argv: Sequence[str]) -> str:
    """Return the folder that a command names; empty if it names none."""
    folder = ""
    for argument, following in zip(argv, [*argv, ""][1:], strict=True):
        if _configures(argument):
            name, equals, value = argument.partition("=")
            value = value if equals else following
            if name.replace("_", "-").endswith(".dump-dir"):
                folder = value
            with contextlib.suppress(ValueError):
                settings: Any = json.loads(value)
                named = settings.get("dump_dir") if isinstance(settings, dict) else None
                folder = named if isinstance(named, str) else folder
    return folder


def _dumps_by_age(folder: str) -> list[str]:
    """Return the files of a folder, oldest first."""
    dated = []
    for path in glob.glob(os.path.join(glob.escape(folder), "VLLM_STACK_DUMP_for_*.log")):
        with contextlib.suppress(OSError):
            dated.append((os.path.getmtime(path), path))
    return [path for _, path in sorted(dated)]
