"""Data paths through the code: the functions of `launcher/` that receive an object, and their
packages, for an `up`, a `serve` and a batch on simulated nodes.

    pytest -q -s -p tests.conftest benchmarks/data_paths.py

A function counts when an argument is the object, or contains it at most two levels deep in tuples,
lists and dictionaries. The objects: the inventory and the site of an `up`, the model of a `serve`
and everything that has it as its `model`, the job, request and plan of a batch.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from pathlib import Path
from types import FrameType

import launcher
from tests.batch.test_batch_command import Batch, batch
from tests.command_line import Cluster, Ran

__all__ = ["batch"]  # a fixture

ROOT = Path(launcher.__file__).parent
SERVE = ("serve", "--skip-network-check", "--no-wait", "--model", "org/m", "--tp", "4", "--pp", "2")
BATCH_TYPES = ("Job", "Request", "Draft", "BatchSnapshot", "Start", "Job", "Shipped")
DEPTH, LENGTH = 2, 60


def contains(value: object, matches: Callable[[object], bool], depth: int = DEPTH) -> bool:
    """Return whether a value matches or contains a match."""
    if matches(value):
        return True
    items: Iterable[object] = ()
    if isinstance(value, (tuple, list, dict)) and len(value) < LENGTH:
        items = value.values() if isinstance(value, dict) else value
    return depth > 0 and any(contains(item, matches, depth - 1) for item in items)


def is_model(value: object) -> bool:
    """Match the model of a server or a job, and objects that have it."""
    model = getattr(value, "model", "") if is_dataclass(value) else value
    return isinstance(model, str) and model == "org/m"


def is_site(value: object) -> bool:
    """Match an inventory, and a cluster of one."""
    return type(value).__name__ in ("Site", "Inventory")


def is_batch(value: object) -> bool:
    """Match a batch job between its file and its submission."""
    kind = type(value)
    return kind.__module__.startswith("launcher.batch") and kind.__name__ in BATCH_TYPES


def receives(frame: FrameType, matches: Callable[[object], bool]) -> bool:
    """Return whether a frame is a named function of the launcher with the object as an argument."""
    code = frame.f_code
    if code.co_name.startswith("<") or not Path(code.co_filename).is_relative_to(ROOT):
        return False
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any(contains(frame.f_locals.get(name), matches) for name in arguments)


def trace(title: str, matches: Callable[[object], bool], command: Callable[[], Ran]) -> None:
    """Run a command and print the stops on its data path."""
    stops = set[str]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and receives(frame, matches):
            code = frame.f_code
            stops.add(f"{Path(code.co_filename).relative_to(ROOT)} {code.co_name}")

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        result = command()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert result.code == 0, result.err
    packages = defaultdict[str, int](int)
    for stop in stops:
        packages[stop.partition("/")[0]] += 1
    files = {stop.partition(" ")[0] for stop in stops}
    print(f"\n{title}: {len(stops)} functions, {len(files)} files, {len(packages)} packages")
    print("  ".join(f"{package} {count}" for package, count in sorted(packages.items())))


def test_up(cluster: Cluster) -> None:
    """The site of an `up`."""
    trace("up", is_site, lambda: cluster.run("up"))


def test_serve(cluster: Cluster) -> None:
    """The model of a `serve`."""
    assert cluster.run("up").code == 0
    trace("serve", is_model, lambda: cluster.run(*SERVE))


def test_batch(batch: Batch) -> None:
    """The job of a `batch`."""
    trace("batch", is_batch, batch.run)
