"""A patch for vLLM that makes a rank hang on demand; installed on lab hosts as `sitecustomize.py`
on the PYTHONPATH of their containers. It also lets servers on CPUs sleep.

The file `trigger` beside it contains "RANK MODE [SECONDS]". In its next step, that rank spins in C
without the GIL (as in cudaStreamSynchronize), spins in Python, or sleeps: for SECONDS, or forever.
It removes the file first, so that the next engine starts normally.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_TRIGGER = Path("/data/huggingface/wedge/trigger")
_ENDLESS_ROUNDS = 2_000_000_000  # of one hash: most of an hour
_SHORT_ROUNDS = 400_000


def _spin_in_c(seconds: float | None) -> None:
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", _ENDLESS_ROUNDS if end is None else _SHORT_ROUNDS)


def _spin_in_python(seconds: float | None) -> None:
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        pass


def _sleep(seconds: float | None) -> None:
    time.sleep(1e6 if seconds is None else seconds)


_MODES = {"c": _spin_in_c, "python": _spin_in_python, "sleep": _sleep}


def _hang_if_triggered(rank: int) -> None:
    try:
        target, mode, *seconds = _TRIGGER.read_text().split()
        if int(target) != rank:
            return
        _TRIGGER.unlink()
    except (OSError, ValueError):
        return
    _MODES[mode](float(seconds[0]) if seconds else None)


def _watch_steps(module: Any) -> None:
    real = module.Worker.execute_model

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        _hang_if_triggered(self.rank)
        return real(self, *args, **kwargs)

    module.Worker.execute_model = execute_model


def _allow_sleep(module: Any) -> None:
    """Let a server on CPUs sleep: vLLM stops its scheduler as on GPUs, and frees no memory."""
    module.Platform.is_sleep_mode_available = lambda _: True


_PATCHES = {
    "vllm.v1.worker.gpu_worker": _watch_steps,
    "vllm.platforms.interface": _allow_sleep,
}


class _Finder(importlib.abc.MetaPathFinder):
    """An import hook that patches modules of vLLM after they have been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of `_PATCHES` with the other finders, and patch its loader."""
        patch = _PATCHES.pop(fullname, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
