"""Remove every trace of a practice cluster, whatever state it is in, and look afterwards whether
any is left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from launcher.core.errors import DeadlineError, RequestError
from launcher.lab import layout, machine, network, processes
from launcher.lab.machine import Say

_CGROUPS = Path("/sys/fs/cgroup")


def down(name: str, directory: Path, say: Say) -> None:
    """Remove the lab called `name` that lives in `directory`; nothing to remove is fine.

    Raises RequestError when the directory holds something that is no lab or another lab; nothing is
    touched then.
    """
    _refuse_strange(name, directory)
    running = processes.of_lab(name)
    if running:
        say(f"ending {len(running)} processes")
    while running:  # what is started while its parent is being ended is found on the next look
        processes.end(running)
        running = processes.of_lab(name)
    network.remove(name)
    for path in mounts(directory):
        machine.attempt("umount", "--lazy", path)
    with suppress(DeadlineError):  # then `leftovers` names them
        machine.await_true(
            lambda: _remove_cgroups(name), what="the removal of control groups", timeout=10
        )
    if directory.is_dir():
        say(f"removing `{directory}`")
        shutil.rmtree(directory)


def leftovers(name: str, directory: Path) -> list[str]:
    """Return one line for each trace of the lab that is on this machine; an empty list means that
    none is.
    """
    return [
        *(f"process {process.pid} ({process.name})" for process in processes.of_lab(name)),
        *(f"network namespace {netns}" for netns in network.namespaces(name)),
        *(f"interface {link}" for link in network.links(name)),
        *(f"packet filter rule {' '.join(rule)}" for rule in network.forwarding(name)),
        *(f"mount {path}" for path in mounts(directory)),
        *(f"control group {path}" for path in cgroups(name)),
        *([f"directory {directory}"] if directory.exists() else []),
    ]


def cache(directory: Path) -> None:
    """Remove the kept wheels, images and model, and the directory when nothing else is in it."""
    for path in (
        path
        for kind in ("wheels-*", "image-*", "gpus-*", "model-*", "building-*", "debian13*")
        for path in directory.glob(kind)
    ):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def mounts(directory: Path, table: str | None = None) -> list[str]:
    """Return the machine's mount points below a directory, innermost first."""
    text = Path("/proc/self/mountinfo").read_text() if table is None else table
    found = [_unescape(line.split()[4]) for line in text.splitlines() if len(line.split()) > 4]
    return sorted(
        (path for path in found if Path(path).is_relative_to(directory)), key=len, reverse=True
    )


def _unescape(path: str) -> str:
    """Undo the kernel's octal escapes for space, tab, newline and backslash."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, char)
    return path


def cgroups(name: str) -> list[str]:
    """Return the control groups of a lab's containers, innermost first."""
    return sorted(_walk(name), key=len, reverse=True)


def _remove_cgroups(name: str) -> bool:
    """Remove what can be removed; a group stays busy for a moment after its last process."""
    for path in cgroups(name):
        with suppress(OSError):
            Path(path).rmdir()
    return not cgroups(name)


def _walk(name: str) -> Iterator[str]:
    for top in (_CGROUPS / name, *_CGROUPS.glob(f"*/{name}")):
        yield from (path for path, _, _ in os.walk(top))


def _refuse_strange(name: str, directory: Path) -> None:
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    lab = layout.load(directory)
    if lab is None and not (directory / layout.RECORD).exists():
        raise RequestError(
            f"`{directory}` holds something that is no practice cluster; it is left alone"
        )
    if lab is not None and lab.name != name:
        raise RequestError(
            f"`{directory}` holds the practice cluster `{lab.name}`, not `{name}`",
            hint=f"run `vlaunch lab down --name {lab.name} --dir {directory}`",
        )
