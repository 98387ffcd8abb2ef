"""The last request that was refused before the start, for `vlaunch doctor`.

Such a request leaves no log on any node, so it is saved on the operator's machine: one file per
cluster, until the same command succeeds.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from launcher.core.errors import GateError, RequestError
from launcher.core.redaction import redact
from launcher.tools.diagnosis import Log, format_time

_LINES = 10  # lines of evidence in a record


@contextmanager
def record_refusal(cluster: str) -> Iterator[None]:
    """Record a refusal of the block; if it succeeds, delete a refusal of the same command."""
    verb = click.get_current_context().command_path.partition(" ")[2]
    try:
        yield
    except (GateError, RequestError) as error:
        evidence = [line.strip() for line in error.evidence.splitlines()[:_LINES]]
        lines = [f"{verb} was refused: {error.message}", *evidence]
        lines += [f"hint: {line}" for line in error.hint.splitlines()]
        _write(
            cluster, {"verb": verb, "at": time.time(), "lines": [redact(line) for line in lines]}
        )
        raise
    if _verb(load(cluster)) == verb:
        _path(cluster).unlink(missing_ok=True)


def load(cluster: str) -> Log | None:
    """Return the refusal as a log; None without a readable one."""
    try:
        payload = json.loads(_path(cluster).read_text(encoding="utf-8"))
        lines = tuple(f"vlaunch: {line}" for line in payload["lines"])
        stamps = dict.fromkeys(range(len(lines)), format_time(float(payload["at"])))
        return Log(part="command", title=f"vlaunch {payload['verb']}", lines=lines, stamps=stamps)
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _verb(log: Log | None) -> str:
    return log.title.removeprefix("vlaunch ") if log is not None else ""


def _write(cluster: str, refusal: dict[str, object]) -> None:
    """Write the file atomically; a state folder that is not writable is no failure."""
    path = _path(cluster)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(refusal, file)
        Path(file.name).replace(path)
    except OSError:
        return


def _path(cluster: str) -> Path:
    import platformdirs

    return Path(platformdirs.user_state_dir("vlaunch")) / f"refused-{cluster}.json"
