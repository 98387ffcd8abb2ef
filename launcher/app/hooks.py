"""The user's own programs around commands: executables in `hooks/` beside the inventory, run on
this machine.

VERB is up, serve or down. `pre-VERB` runs with the cluster's lock held and before the nodes are
queried, and stops the command if it fails. `post-VERB` and `on-failure` run after the lock is
released, so that they may call `vlaunch` themselves; their failure is only reported.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from launcher.app.progress import Printer
from launcher.app.terminal import say
from launcher.core.domain import Inventory
from launcher.core.errors import HookError, LockError, RequestError, VlaunchError
from launcher.core.events import Event
from launcher.core.interrupts import defer_signals
from launcher.core.redaction import redact

FOLDER: Final = "hooks"
FAILURE: Final = "on-failure"
NAMES: Final = ("pre-up", "post-up", "pre-serve", "post-serve", "pre-down", "post-down", FAILURE)
DEADLINE: Final = 300.0  # seconds per hook
# Set to the running hook's name: commands with this variable run no hooks, to avoid recursion.
HOOK_VARIABLE: Final = "VLAUNCH_HOOK"
_GRACE: Final = 5.0  # seconds to exit after each signal
_LINGER: Final = 1.0  # seconds to wait for output that a child in the background still holds open
_LINE_CHARS: Final = 2000  # a longer line is shown as several


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Hooks of one command; `files` has the paths of those that exist, by name."""

    inventory: Inventory
    verb: str
    files: Mapping[str, Path] = field(default_factory=dict)

    def run_pre(self, printer: Printer, **values: str) -> None:
        """Run `pre-VERB`; raise HookError if it fails, before any change."""
        self._run(f"pre-{self.verb}", printer, values)

    def run_post(self, printer: Printer, **values: str) -> None:
        """Run `post-VERB`; only warn if it fails."""
        self._run_leniently(f"post-{self.verb}", printer, values)

    @contextlib.contextmanager
    def run_on_failure(self, printer: Printer, **values: str) -> Iterator[dict[str, str]]:
        """Run `on-failure` if the block fails, also in `pre-VERB`, but not for an invalid request
        or a lock that is busy or lost.

        The block may add to the hook's values.
        """
        try:
            yield values
        except (VlaunchError, OSError) as error:
            if not isinstance(error, (RequestError, LockError)):
                text = error.message if isinstance(error, VlaunchError) else str(error)
                self._run_leniently(FAILURE, printer, {**values, "error": redact(text)})
            raise

    def _run_leniently(self, name: str, printer: Printer, values: Mapping[str, str]) -> None:
        try:
            self._run(name, printer, values)
        except HookError as error:
            printer.show(Event(kind="warning", stage="hook", text=error.message, state="warn"))

    def _run(self, name: str, printer: Printer, values: Mapping[str, str]) -> None:
        path = self.files.get(name)
        if path is None:
            return
        began = time.monotonic()
        printer.show(
            Event(kind="stage", stage="hook", text=f"Run the hook {name}", state="running")
        )
        code = _execute(
            path,
            self._environment(name, values),
            self.inventory.path.parent,
            DEADLINE,
            name,
            printer,
        )
        if code is None:
            text = f"hook {name} timed out after {DEADLINE:g}s and was killed"
            raise HookError(text, hint=_failure_hint(path))
        if code != 0:
            outcome = (
                f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
            )
            raise HookError(f"hook {name} {outcome}", hint=_failure_hint(path))
        seconds = time.monotonic() - began
        printer.show(
            Event(kind="step", stage="hook", text=f"hook {name}", state="ok", seconds=seconds)
        )

    def _environment(self, name: str, values: Mapping[str, str]) -> dict[str, str]:
        """Return a hook's environment, without the variables that are sources of secrets."""
        inventory = self.inventory
        sources = {source.env for source in inventory.secrets.values()}
        return {
            **{key: value for key, value in os.environ.items() if key not in sources},
            HOOK_VARIABLE: name,
            "VLAUNCH_VERB": self.verb,
            "VLAUNCH_CLUSTER": inventory.cluster,
            "VLAUNCH_INVENTORY": str(inventory.path.absolute()),
            "VLAUNCH_NODES": " ".join(node.name for node in inventory.nodes),
            "VLAUNCH_HEAD": inventory.head.name,
            **{f"VLAUNCH_{key.upper()}": value.replace("\0", "") for key, value in values.items()},
        }


def find_hooks(
    inventory: Inventory, verb: str, *, skip: bool = False, dry_run: bool = False
) -> Hooks:
    """Find the hooks of a command; a dry run only lists them.

    Raises:
        RequestError: a hook is not an executable file.
    """
    names = (f"pre-{verb}", f"post-{verb}", FAILURE)
    folder = inventory.path.absolute().parent / FOLDER
    if not skip:
        _warn_unknown_names(folder)
    files = {name: folder / name for name in names if os.path.lexists(folder / name)}
    if skip or not files:
        return Hooks(inventory=inventory, verb=verb)
    if inside := os.environ.get(HOOK_VARIABLE):
        say(f"no hooks are run inside the hook {inside}")
        return Hooks(inventory=inventory, verb=verb)
    _require_programs(files.values())
    if dry_run:
        say(f"dry run: hooks not run: {', '.join(files)}")
        return Hooks(inventory=inventory, verb=verb)
    return Hooks(inventory=inventory, verb=verb, files=files)


def _require_programs(paths: Iterable[Path]) -> None:
    unusable = [path for path in paths if not _is_program(path)]
    if unusable:
        raise RequestError(
            "cannot run a hook",
            evidence=[
                f"{path} {'is not executable' if path.is_file() else 'is not a file'}"
                for path in unusable
            ],
            hint=f"run `chmod +x {unusable[0]}`, or remove it; `--no-hooks` skips all hooks",
        )


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _warn_unknown_names(folder: Path) -> None:
    """Warn about programs with misspelled hook names (`pre-up.sh`), which would never run."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    for path in paths:
        if path.stem in NAMES and path.name not in NAMES and _is_program(path):
            say(f"{FOLDER}/{path.name} is ignored: rename it to {path.stem}")


def _failure_hint(path: Path) -> str:
    return f"check {path}; `--no-hooks` skips all hooks"


def _execute(
    path: Path, env: Mapping[str, str], folder: Path, deadline: float, name: str, printer: Printer
) -> int | None:
    """Run a program to its end and show its lines; return its exit code, or None on a timeout.

    It has a process group of its own, which is ended as a whole on a timeout or an interrupt.
    """
    finished = threading.Event()
    with contextlib.ExitStack() as cleanup:
        with defer_signals():  # an interrupt inside `Popen` would leave the program running
            process = _start(path, env, folder, name)
            cleanup.callback(_finish, process, finished)
            reader = threading.Thread(
                target=_show_lines, args=(process, name, printer, finished), daemon=True
            )
            reader.start()
        try:
            process.wait(timeout=deadline)
        except subprocess.TimeoutExpired:
            return None
        reader.join(timeout=_LINGER)
    return process.returncode


def _start(path: Path, env: Mapping[str, str], folder: Path, name: str) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            [path],
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise HookError(
            f"cannot start hook {name}: {(error.strerror or str(error)).lower()}",
            hint=f"if {path} is a script, check its `#!` line; `--no-hooks` skips all hooks",
        ) from None


def _show_lines(
    process: subprocess.Popen[str], name: str, printer: Printer, finished: threading.Event
) -> None:
    """Show the program's output, without later output of a child in the background."""
    with process.stdout as out:  # type: ignore[union-attr]
        for line in iter(lambda: out.readline(_LINE_CHARS), ""):
            if not finished.is_set():
                text = f"{name}: {line.rstrip()}"
                printer.show(Event(kind="note", stage="hook", text=text, data={"hook": name}))


def _finish(process: subprocess.Popen[str], finished: threading.Event) -> None:
    """Show no more output, and end the program if it is still running."""
    finished.set()
    if process.poll() is None:
        _terminate(process)


def _terminate(process: subprocess.Popen[str]) -> None:
    """End the whole group: politely, then with SIGKILL, since a child may ignore SIGTERM."""
    for number, seconds in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
