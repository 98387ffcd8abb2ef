"""A patch for vLLM that makes a rank hang on demand; installed on lab hosts as `sitecustomize.py`
on the PYTHONPATH of their containers.

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
_MODULE = "vllm.v1.worker.gpu_worker"
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


def _patch(module: Any) -> None:
    real = module.Worker.execute_model

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        _hang_if_triggered(self.rank)
        return real(self, *args, **kwargs)

    module.Worker.execute_model = execute_model


class _Finder(importlib.abc.MetaPathFinder):
    """An import hook that patches the module of vLLM's worker after it has been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the worker's module with the other finders, and patch its loader."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
