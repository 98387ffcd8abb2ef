"""`vlaunch collect`: everything that a bug report needs in one file, without secrets."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import secrets
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from launcher import __version__
from launcher.app.command import Call, command
from launcher.app.progress import Printer, Silent
from launcher.app.secrets import recall
from launcher.app.session import Session
from launcher.app.terminal import say
from launcher.core.domain import Answer, Inventory
from launcher.core.errors import RequestError, VlaunchError
from launcher.core.events import Event
from launcher.core.secret_patterns import clean
from launcher.core.transport import by_node
from launcher.diagnose import bundle as plan
from launcher.diagnose import doctor_view as ui
from launcher.diagnose.doctor_command import examine
from launcher.hosts.evidence import gather
from launcher.serving.status_command import look

_NAME = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/){0,3}[A-Za-z0-9_-][A-Za-z0-9._-]*")
_AT_ONCE = 8  # nodes whose logs are held in memory
_LIBRARIES = ("fabric", "paramiko", "docker", "click", "rich", "pydantic", "PyYAML", "requests")
# What one survey of a node answers; the other checks start containers or knock at ports.
_GROUPS = ("reach", "host", "docker", "storage")
_README = """\
What `vlaunch collect` found on cluster {cluster}. Look at it before you share it: values that
vlaunch knows as secrets and what looks like one are replaced by ***, but names of machines and
models, addresses, paths, and what users wrote into logs are not.

inventory.yaml   as it was given; secrets are named by their sources only
versions.json    vlaunch, Python, its libraries
status.json      `vlaunch status --json`
checks.json      the checks that need no container
doctor.json      `vlaunch doctor --json`
events.ndjson    what happened while this was collected
nodes/           for each node: Docker's word on its containers (variables without their values),
                 the ends of all logs, what the keeper of servers wrote down, the audit trail, and
                 what could not be seen
{unknown}"""


class Bundle:
    """An archive that is being written. Every text goes through redaction on its way in."""

    def __init__(self, archive: tarfile.TarFile, root: str) -> None:
        self._archive, self._root, self._at = archive, root, int(time.time())
        self.sizes: dict[str, int] = {}

    def add(self, name: str, text: str) -> None:
        """Add one file."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a name of ours: {name!r}")
        data = clean(text).encode("utf-8", "replace")
        entry = tarfile.TarInfo(f"{self._root}/{name}")
        entry.size, entry.mode, entry.mtime = len(data), 0o600, self._at
        self._archive.addfile(entry, io.BytesIO(data))
        self.sizes[name] = len(data)


class _Kept(Silent):
    """Shows events as another printer does, and keeps them."""

    def __init__(self, inner: Printer) -> None:
        self._inner = inner
        self.events: list[dict[str, Any]] = []

    def show(self, event: Event) -> None:
        """Keep and show one event."""
        self.events.append(dict(event.as_json()))
        self._inner.show(event)


@command()
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="The file to write (default: a new `vlaunch-CLUSTER-TIME.tar.gz` here).",
)
def collect(call: Call, output: str | None) -> None:
    """Write a bundle for a bug report: inventory, versions, status, checks, diagnosis, and the logs
    of all nodes.

    Secrets are taken out by their values, and so is what looks like one; no command is run and
    nobody asked to learn a value. Look at it before you share it. Nothing is changed on any node;
    nodes that cannot be reached are told of in it.
    """
    path = _target(output, call.inventory.cluster)
    # The inventory may be somebody else's: no command of its secrets is run for a bug report.
    unknown = recall(call.inventory.secrets, call.inventory.path.parent)
    with call.printer() as shown, _writing(path) as bundle:
        kept = _Kept(shown)
        with call.session(to=kept, partial=True) as session:
            _gather(session, bundle, unknown)
        bundle.add("events.ndjson", "".join(f"{json.dumps(each)}\n" for each in kept.events))
    click.echo(path)
    for name, size in sorted(bundle.sizes.items()):
        click.echo(f"  {size:>10,}  {name}", err=True)
    if unknown:
        say(f"not known here, and so only recognised by their form: {', '.join(unknown)}")
    say(f"look at it before you share it: `tar -xzOf {path} | less`")


def _target(option: str | None, cluster: str) -> Path:
    """Return where the bundle goes: as asked, else a new name in the current folder; raises
    RequestError when it cannot.
    """
    path = Path(
        option or f"vlaunch-{cluster}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.tar.gz"
    )
    if not path.parent.is_dir():
        raise RequestError(
            f"`{path.parent}` is not a folder",
            hint="name a file in a folder that is there: `-o FILE.tar.gz`",
        )
    if os.path.lexists(path):
        raise RequestError(f"`{path}` is there already", hint="name another one: `-o FILE.tar.gz`")
    return path


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[Bundle]:
    """Write a bundle beside its place, and put it there when all of it is on the disk; after an
    error nothing is left.
    """
    try:
        # mkstemp: mode 0600, and a name that nobody else has.
        descriptor, part = tempfile.mkstemp(prefix=".vlaunch-", dir=path.parent)
    except OSError as error:
        raise RequestError(
            f"`{path.parent}` cannot be written to: {(error.strerror or str(error)).lower()}"
        ) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz") as archive:
                yield Bundle(
                    archive,
                    path.name.removesuffix(".gz").removesuffix(".tar").lstrip(".") or "bundle",
                )
            file.flush()
            os.fsync(file.fileno())
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _gather(session: Session, bundle: Bundle, unknown: Sequence[str]) -> None:
    wanted = session.inventory
    more = (
        f"\nNot known on this machine, and so only recognised by their form: {', '.join(unknown)}\n"
        if unknown
        else ""
    )
    bundle.add("README.txt", _README.format(cluster=wanted.cluster, unknown=more))
    bundle.add("versions.json", json.dumps(_versions(wanted), indent=1))
    # These come before any log: they learn the Ray token of each node, which logs must not show.
    bundle.add("status.json", _said(lambda: look(session).as_json()))
    bundle.add("checks.json", _said(lambda: _checks(session)))
    bundle.add("inventory.yaml", wanted.path.read_text(encoding="utf-8", errors="replace"))
    bundle.add("doctor.json", _said(lambda: ui.plain(examine(session, wanted.nodes))))
    _nodes(session, bundle)


def _nodes(session: Session, bundle: Bundle) -> None:
    wanted, mark = session.inventory, f"@@{secrets.token_hex(12)}"
    numbers = {node.name: number for number, node in enumerate(wanted.nodes, 1)}
    for name, error in session.missing.items():
        folder = plan.folder(numbers[name], wanted.node(name))
        bundle.add(f"{folder}/not-seen.txt", f"{error.message}\n{error.evidence}\n")
    there = session.reached
    for start in range(0, len(there), _AT_ONCE):
        some = there[start : start + _AT_ONCE]
        said: dict[str, list[Answer]] = by_node(
            session.transport, plan.commands(wanted.cluster, some, mark)
        )
        for node in some:
            for name, text in plan.files(said[node.name], mark).items():
                bundle.add(f"{plan.folder(numbers[node.name], node)}/{name}", text)
            session.step("collect", "collected", node=node.name)


def _said(ask: Callable[[], object]) -> str:
    """Return an answer as JSON, or why there is none: what is broken is what a bug report is
    about.
    """

    try:
        answer = ask()
    except VlaunchError as error:
        answer = {"error": error.message, "evidence": error.evidence}
    return json.dumps(answer, indent=1, default=str)


def _checks(session: Session) -> object:
    from launcher.core import expectations_read
    from launcher.hosts import checks_view as ui
    from launcher.hosts.checks import catalogue

    chosen = catalogue.select(group=_GROUPS)
    evidence = gather(
        session, chosen, model="", known=expectations_read.load_for_user(None), offline=True
    )
    return ui.plain(catalogue.run(evidence, [each.id for each in chosen]))


def _versions(wanted: Inventory) -> dict[str, object]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return {
        "vlaunch": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "libraries": found,
        "image": wanted.image,
        "ray": wanted.ray.version,
        "accelerator": wanted.accelerator,
    }
