"""Fetch the secrets of an inventory, on the launcher's machine.

Values never reach a message, an argv or a log.
"""

import contextlib
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import click

from launcher.core import redaction
from launcher.core.domain import Secret, SecretSource
from launcher.core.errors import RequestError
from launcher.core.interrupts import defer_signals
from launcher.tools import ray

COMMAND_SECONDS = 30.0
_MAX_BYTES = 64 * 1024
_TOKEN_LENGTH = 32
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def resolve(
    sources: Mapping[str, SecretSource],
    base: Path,
    *,
    seconds: float = COMMAND_SECONDS,
    ask: Callable[[str, str], str] | None = None,
) -> dict[str, Secret]:
    """Return each secret's value, masked in all output from now on.

    Args:
        sources: the source of each secret.
        base: folder of relative files.
        seconds: time limit of a command.
        ask: prompts for a secret, by its name and the question; by default in the terminal, once.

    Raises:
        RequestError: names every secret that is unavailable, and the reason, without any value.
            Prompts come after all other sources have succeeded.
    """
    secrets: dict[str, Secret] = {}
    failures: list[str] = []
    for name, source in sorted(sources.items(), key=lambda item: item[1].prompt is not None):
        if failures and _needs_prompt(source, ask):
            continue
        try:
            value = _check_value(_fetch(name, source, base, seconds, ask or from_terminal))
            if name == ray.TOKEN and len(value) < _TOKEN_LENGTH:
                raise _Unavailable(
                    f"must have at least {_TOKEN_LENGTH} characters: anyone who guesses it runs"
                    " code on the nodes; create one with `openssl rand -hex 32`"
                )
        except _Unavailable as error:
            failures.append(f"{name}: {error}")
        else:
            redaction.add_secrets(value)
            secrets[name] = Secret(value)
    if failures:
        raise _fetch_error(failures)
    return {name: secrets[name] for name in sources}


def _needs_prompt(source: SecretSource, ask: Callable[[str, str], str] | None) -> bool:
    """True if the source would prompt a person."""
    return source.prompt is not None and (ask is not None or sys.stdin.isatty())


def _fetch_error(failures: Sequence[str]) -> RequestError:
    number = "1 secret" if len(failures) == 1 else f"{len(failures)} secrets"
    hint = "`secrets` in the inventory names the source of each value"
    return RequestError(f"cannot fetch {number}", evidence=failures, hint=hint)


def hide_known_values(sources: Mapping[str, SecretSource], base: Path) -> list[str]:
    """Mask the values that are available without a prompt or a command, for commands that do not
    need them; return the names of the others.

    They appear in logs all the same. An unavailable value is no failure here.
    """
    unknown = []
    for name, source in sources.items():
        value = ""
        with contextlib.suppress(_Unavailable):
            if source.env is not None:
                value = _check_value(_from_env(source.env))
            elif source.file is not None:
                value = _check_value(_from_file(source.file, base))
        redaction.add_secrets(value)
        unknown += [] if value else [name]
    return unknown


def redact(text: str, secrets: Mapping[str, Secret] | Iterable[Secret]) -> str:
    """Replace every value of at least six characters by `***`, the longest first, even if the
    program does not know it.
    """
    values = secrets.values() if isinstance(secrets, Mapping) else secrets
    pattern = redaction.secrets_pattern(secret.reveal() for secret in values)
    return text if pattern is None else pattern.sub(redaction.MASK, text)


@cache
def from_terminal(name: str, question: str) -> str:
    """Prompt in the terminal without echo; each question is asked once."""
    if not sys.stdin.isatty():
        text = (
            "needs a terminal for its prompt, and there is none; use one, or name another"
            " source: `env`, `file`, `command`"
        )
        raise _Unavailable(text)
    value: str = click.prompt(
        question if name in question else f"{question} ({name})", hide_input=True, err=True
    )
    return value


class _Unavailable(Exception):
    """Reason why a secret is unavailable."""


def _fetch(
    name: str, source: SecretSource, base: Path, seconds: float, ask: Callable[[str, str], str]
) -> str:
    if source.env is not None:
        return _from_env(source.env)
    if source.file is not None:
        return _from_file(source.file, base)
    if source.command is not None:
        return _from_command(source.command, seconds)
    if source.prompt is not None:
        return ask(name, source.prompt)
    raise _Unavailable("has no source")


def _check_value(value: str) -> str:
    if not value:
        raise _Unavailable("is empty")
    if _CONTROL.search(value):
        raise _Unavailable("must be one line of text without control characters")
    return value


def _from_env(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise _Unavailable(
            f"the environment variable `{name}` is not set; run `export {name}=…` first"
        )
    return value


def _from_file(name: str, base: Path) -> str:
    try:
        path = base / Path(name).expanduser()
        # Checked on the open file, so that it cannot be swapped in between; a pipe must not make
        # the open wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _Unavailable(f"`{name}` cannot be read: {reason.lower()}") from error
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise _Unavailable(f"`{path}` is not a regular file")
        if state.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = f"{stat.S_IMODE(state.st_mode):04o}"
            raise _Unavailable(
                f"`{path}` has mode {mode}; run `chmod 600 {shlex.quote(str(path))}`"
            )
        with open(descriptor, "rb", closefd=False) as file:
            return _decode(file.read(_MAX_BYTES + 1))
    finally:
        os.close(descriptor)


def _from_command(command: str, seconds: float) -> str:
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise _Unavailable(f"`{command}` is not a command: {str(error).lower()}") from error
    if not argv:
        raise _Unavailable("the command is empty")
    with contextlib.ExitStack() as cleanup:
        with defer_signals():  # an interrupt inside `Popen` would leave the program running
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                raise _Unavailable(
                    f"`{argv[0]}` cannot be run: {(error.strerror or str(error)).lower()}"
                ) from error
            cleanup.callback(_kill_group, process)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise _Unavailable(f"`{argv[0]}` timed out after {seconds:g} s") from None
    if process.returncode != 0:
        raise _Unavailable(
            f"`{argv[0]}` failed with exit status {process.returncode}{_reason(out, err)}"
        )
    return _decode(out)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill everything that the command started: it has a process group of its own."""
    if process.returncode is None:
        # `sudo` runs it as another user, which sees the streams close
        with contextlib.suppress(PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)


def _reason(out: bytes, err: bytes) -> str:
    """Return the command's last error line, without any text that it also printed as its answer."""
    lines = err.decode(errors="replace").strip().splitlines()
    line = (
        redact(lines[-1], [Secret(chunk) for chunk in out.decode(errors="replace").split()])
        if lines
        else ""
    )
    return f": {line[:200]}" if line.isprintable() and line else ""


def _decode(content: bytes) -> str:
    if len(content) > _MAX_BYTES:
        raise _Unavailable(f"is larger than {_MAX_BYTES // 1024} KiB")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        # `from None`: the exception carries the bytes.
        raise _Unavailable(f"is not UTF-8 text (byte {error.start + 1})") from None
    return text.removesuffix("\n")
