"""A rank of vLLM that stops working on demand; lies on lab hosts as `sitecustomize.py`, on the
PYTHONPATH of their containers.

When the file `trigger` beside it says "RANK MODE [SECONDS]", that rank does so in its next step:
spin in C without the GIL, as in cudaStreamSynchronize, spin in Python, or sleep; without SECONDS
for ever. The rank removes the file first, so that the next engine starts well.
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
_ROUNDS = 2_000_000_000  # of one hash, which takes most of an hour
_SHORT = 400_000


def _spin_in_c(seconds: float | None) -> None:
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", _ROUNDS if end is None else _SHORT)


def _spin_in_python(seconds: float | None) -> None:
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        pass


def _sleep(seconds: float | None) -> None:
    time.sleep(1e6 if seconds is None else seconds)


_MODES = {"c": _spin_in_c, "python": _spin_in_python, "sleep": _sleep}


def _obey(rank: int) -> None:
    try:
        wanted, mode, *seconds = _TRIGGER.read_text().split()
        if int(wanted) != rank:
            return
        _TRIGGER.unlink()
    except (OSError, ValueError):
        return
    _MODES[mode](float(seconds[0]) if seconds else None)


def _patch(module: Any) -> None:
    real = module.Worker.execute_model

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        _obey(self.rank)
        return real(self, *args, **kwargs)

    module.Worker.execute_model = execute_model


class _Finder(importlib.abc.MetaPathFinder):
    """Patch the module of vLLM's worker once it has been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the worker's module as others would, and nothing else."""
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
