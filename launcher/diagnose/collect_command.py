"""`vlaunch collect`: everything that a bug report needs in one file, without secrets."""

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
from launcher.app.command import CommandContext, command
from launcher.app.progress import Printer, SilentPrinter
from launcher.app.secrets import hide_known_values
from launcher.app.session import Session
from launcher.app.terminal import say
from launcher.core.domain import Answer, Inventory
from launcher.core.errors import RequestError, VlaunchError
from launcher.core.events import Event
from launcher.core.secret_patterns import redact_secrets
from launcher.core.transport import run_by_node
from launcher.diagnose import bundle as plan
from launcher.diagnose import doctor_view
from launcher.diagnose.doctor_command import diagnose_nodes
from launcher.hosts.evidence import gather_evidence
from launcher.serving.status_command import observe_cluster

_NAME = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/){0,3}[A-Za-z0-9_-][A-Za-z0-9._-]*")
_BATCH_SIZE = 8  # nodes with logs in memory at once
_LIBRARIES = ("fabric", "paramiko", "docker", "click", "rich", "pydantic", "PyYAML", "requests")
# Groups answered by one survey of a node; the other checks start containers or probe ports.
_GROUPS = ("reach", "host", "docker", "storage")
_README = """\
Output of `vlaunch collect` for cluster {cluster}. Review it before you share it: known secrets and
values that look like secrets are replaced by ***, but names of machines and models, addresses,
paths, and text that users wrote into logs are not.

inventory.yaml   the inventory; secrets are named by their sources only
versions.json    versions of vlaunch, Python and libraries
status.json      `vlaunch status --json`
checks.json      results of the checks that need no container
doctor.json      `vlaunch doctor --json`
events.ndjson    progress and warnings of this command
nodes/           for each node: `docker inspect` of its containers (variables without values), the
                 ends of all logs, stacks that vLLM's watchdog wrote, the supervisor's records,
                 the audit trail, and reasons for missing data
{unknown}"""


class Bundle:
    """Writer of an archive, which redacts every text."""

    def __init__(self, archive: tarfile.TarFile, root: str) -> None:
        self._archive, self._root, self._at = archive, root, int(time.time())
        self.sizes: dict[str, int] = {}

    def add_file(self, name: str, text: str) -> None:
        """Add one file."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"invalid name in the bundle: {name!r}")
        data = redact_secrets(text).encode("utf-8", "replace")
        entry = tarfile.TarInfo(f"{self._root}/{name}")
        entry.size, entry.mode, entry.mtime = len(data), 0o600, self._at
        self._archive.addfile(entry, io.BytesIO(data))
        self.sizes[name] = len(data)


class _RecordingPrinter(SilentPrinter):
    """Printer that records events, and passes them to another printer."""

    def __init__(self, inner: Printer) -> None:
        self._inner = inner
        self.events: list[dict[str, Any]] = []

    def show(self, event: Event) -> None:
        """Record and show one event."""
        self.events.append(dict(event.as_json()))
        self._inner.show(event)


@command()
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="File to write (default: `vlaunch-CLUSTER-TIME.tar.gz` in this folder).",
)
def collect(call: CommandContext, output: str | None) -> None:
    """Write a bundle for a bug report: inventory, versions, status, checks, diagnosis, and the logs
    of all nodes.

    Known secrets and text that looks like a secret are removed; no command of `secrets:` is run to
    get a value. Read the bundle before you share it. Nothing changes on the nodes; unreachable
    nodes are listed in the bundle.
    """
    path = _output_path(output, call.inventory.cluster)
    # The inventory may be from another user: no command of its secrets is run for a bug report.
    unknown = hide_known_values(call.inventory.secrets, call.inventory.path.parent)
    with call.printer() as inner_printer, _open_bundle(path) as bundle:
        printer = _RecordingPrinter(inner_printer)
        with call.session(printer=printer, partial=True) as session:
            _fill_bundle(session, bundle, unknown)
        events = "".join(f"{json.dumps(event)}\n" for event in printer.events)
        bundle.add_file("events.ndjson", events)
    click.echo(path)
    for name, size in sorted(bundle.sizes.items()):
        click.echo(f"  {size:>10,}  {name}", err=True)
    if unknown:
        say(f"secrets not known on this machine, masked only by their form: {', '.join(unknown)}")
    say(f"review it before you share it: `tar -xzOf {path} | less`")


def _output_path(option: str | None, cluster: str) -> Path:
    """Return the bundle's path, by default a new name in the current folder; raises RequestError
    when it cannot be created.
    """
    path = Path(
        option or f"vlaunch-{cluster}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.tar.gz"
    )
    if not path.parent.is_dir():
        raise RequestError(
            f"`{path.parent}` is not a folder",
            hint="choose a file in an existing folder: `-o FILE.tar.gz`",
        )
    if os.path.lexists(path):
        raise RequestError(f"`{path}` already exists", hint="choose another name: `-o FILE.tar.gz`")
    return path


@contextlib.contextmanager
def _open_bundle(path: Path) -> Iterator[Bundle]:
    """Write a bundle to a temporary file, and rename it when it is complete and on the disk; an
    error leaves no file.
    """
    try:
        # mkstemp: mode 0600, and a unique name.
        descriptor, part = tempfile.mkstemp(prefix=".vlaunch-", dir=path.parent)
    except OSError as error:
        raise RequestError(
            f"cannot write to `{path.parent}`: {(error.strerror or str(error)).lower()}"
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


def _fill_bundle(session: Session, bundle: Bundle, unknown: Sequence[str]) -> None:
    inventory = session.inventory
    unknown_note = (
        f"\nSecrets not known on this machine, masked only by their form: {', '.join(unknown)}\n"
        if unknown
        else ""
    )
    bundle.add_file("README.txt", _README.format(cluster=inventory.cluster, unknown=unknown_note))
    bundle.add_file("versions.json", json.dumps(_collect_versions(inventory), indent=1))
    # Before any log: these queries learn each node's Ray token, which must be redacted in logs.
    bundle.add_file("status.json", _result_json(lambda: observe_cluster(session).as_json()))
    bundle.add_file("checks.json", _result_json(lambda: _run_checks(session)))
    bundle.add_file("inventory.yaml", inventory.path.read_text(encoding="utf-8", errors="replace"))
    bundle.add_file("doctor.json", _result_json(lambda: _diagnose(session)))
    _add_nodes(session, bundle)


def _add_nodes(session: Session, bundle: Bundle) -> None:
    inventory, mark = session.inventory, f"@@{secrets.token_hex(12)}"
    numbers = {node.name: number for number, node in enumerate(inventory.nodes, 1)}
    for name, error in session.missing.items():
        folder = plan.node_folder(numbers[name], inventory.node(name))
        bundle.add_file(f"{folder}/not-collected.txt", f"{error.message}\n{error.evidence}\n")
    nodes = session.reached
    for start in range(0, len(nodes), _BATCH_SIZE):
        batch = nodes[start : start + _BATCH_SIZE]
        answers: dict[str, list[Answer]] = run_by_node(
            session.transport, plan.bundle_commands(inventory.cluster, batch, mark)
        )
        for node in batch:
            for name, text in plan.node_files(answers[node.name], mark).items():
                bundle.add_file(f"{plan.node_folder(numbers[node.name], node)}/{name}", text)
            session.step("collect", "collected", node=node.name)


def _result_json(query: Callable[[], object]) -> str:
    """Return a query's result or error as JSON: a bug report must also contain what fails."""
    try:
        result = query()
    except VlaunchError as error:
        result = {"error": error.message, "evidence": error.evidence}
    return json.dumps(result, indent=1, default=str)


def _diagnose(session: Session) -> object:
    return doctor_view.diagnosis_json(diagnose_nodes(session, session.inventory.nodes))


def _run_checks(session: Session) -> object:
    from launcher.core import expectations_file
    from launcher.hosts import checks_view
    from launcher.hosts.checks import catalogue

    chosen = catalogue.select_checks(group=_GROUPS)
    evidence = gather_evidence(
        session, chosen, model="", expectations=expectations_file.load_for_user(None), offline=True
    )
    return checks_view.results_json(catalogue.run_checks(evidence, [check.id for check in chosen]))


def _collect_versions(inventory: Inventory) -> dict[str, object]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {
        "vlaunch": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "libraries": versions,
        "image": inventory.image,
        "ray": inventory.ray.version,
        "accelerator": inventory.accelerator,
    }
