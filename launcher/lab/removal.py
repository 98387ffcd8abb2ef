"""Removal of a lab cluster in any state, and the search for leftovers."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from launcher.core.errors import DeadlineError, RequestError
from launcher.lab import layout, machine, network, processes
from launcher.lab.machine import Say

_CGROUPS = Path("/sys/fs/cgroup")


def remove_lab(name: str, directory: Path, say: Say) -> None:
    """Remove the lab called `name` in `directory`, if it exists.

    Raises RequestError, without removing anything, when the directory is not that lab's.
    """
    _check_directory(name, directory)
    running = processes.lab_processes(name)
    if running:
        say(f"stopping {len(running)} processes")
    while running:  # processes may start while their parent is being killed
        processes.kill_processes(running)
        running = processes.lab_processes(name)
    network.remove(name)
    for path in mounts(directory):
        machine.attempt("umount", "--lazy", path)
    with suppress(DeadlineError):  # `leftovers` lists them then
        machine.await_true(
            lambda: _remove_cgroups(name), what="the removal of control groups", timeout=10
        )
    if directory.is_dir():
        say(f"removing `{directory}`")
        shutil.rmtree(directory)


def leftovers(name: str, directory: Path) -> list[str]:
    """Return one line for each remaining trace of the lab on this machine."""
    return [
        *(f"process {process.pid} ({process.name})" for process in processes.lab_processes(name)),
        *(f"network namespace {netns}" for netns in network.namespaces(name)),
        *(f"interface {link}" for link in network.links(name)),
        *(f"packet filter rule {' '.join(rule)}" for rule in network.forwarding_rules(name)),
        *(f"mount {path}" for path in mounts(directory)),
        *(f"control group {path}" for path in cgroups(name)),
        *([f"directory {directory}"] if directory.exists() else []),
    ]


def remove_cache(directory: Path) -> None:
    """Remove cached wheels, images and models, and the directory if it is empty then."""
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
    paths = [_unescape(line.split()[4]) for line in text.splitlines() if len(line.split()) > 4]
    return sorted(
        (path for path in paths if Path(path).is_relative_to(directory)), key=len, reverse=True
    )


def _unescape(path: str) -> str:
    """Undo the kernel's octal escapes for space, tab, newline and backslash."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, char)
    return path


def cgroups(name: str) -> list[str]:
    """Return the control groups of a lab's containers, innermost first."""
    return sorted(_walk_cgroups(name), key=len, reverse=True)


def _remove_cgroups(name: str) -> bool:
    """Remove idle groups; True when none is left. Groups stay busy briefly after processes exit."""
    for path in cgroups(name):
        with suppress(OSError):
            Path(path).rmdir()
    return not cgroups(name)


def _walk_cgroups(name: str) -> Iterator[str]:
    for top in (_CGROUPS / name, *_CGROUPS.glob(f"*/{name}")):
        yield from (path for path, _, _ in os.walk(top))


def _check_directory(name: str, directory: Path) -> None:
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    lab = layout.load_lab(directory)
    if lab is None and not (directory / layout.RECORD).exists():
        raise RequestError(f"`{directory}` is not the folder of a lab cluster; it was not changed")
    if lab is not None and lab.name != name:
        raise RequestError(
            f"`{directory}` contains the lab cluster `{lab.name}`, not `{name}`",
            hint=f"run `vlaunch lab down --name {lab.name} --dir {directory}`",
        )
