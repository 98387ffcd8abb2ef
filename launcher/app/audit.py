"""Audit trail of a node: lines without secrets, appended before each change, and their parser."""

import getpass
import hashlib
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import click

from launcher import __version__
from launcher.core import decode, secret_patterns, shell
from launcher.core.domain import Answer, Argv, Inventory, Node, natural_key
from launcher.core.errors import UnreadableAnswer
from launcher.core.redaction import redact
from launcher.core.transport import Command, Transport

FILE = "audit"  # {state_dir}/audit/{cluster}.ndjson
# A line of at most this many bytes is one write of every shell (dash buffers 8 KiB, bash and
# busybox a block of 4 KiB), and one write to a file that is open for appending is never mixed with
# another one's.
LONGEST = 4000
_COMMAND = 1000

_Change = Annotated[str, decode.truncate(2000), decode.DROP_INVALID]
_Text = Annotated[str, decode.truncate(2000), decode.Default("")]

# Options with secret values (`--tokenizer`, `--max-num-batched-tokens` are none), and
# passwords within addresses.
_OPTION = re.compile(
    r"(--[\w-]*(?:token|secrets?|passwo?r?d|api[_-]?keys?|credentials?))(=.*)?",
    re.IGNORECASE | re.DOTALL,
)
_ADDRESS = re.compile(r"(\w://)[^/@\s]+@")
# These clean up: a disk that is full must not keep them from it.
_LENIENT = ("down", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLine:
    """One line: user, host, command and changes.

    `at` is the launcher's clock; `id` is the same for all lines of one command.
    """

    at: Annotated[str, decode.truncate(40)]
    who: Annotated[str, decode.truncate(200)]
    host: Annotated[str, decode.truncate(200)]
    verb: Annotated[str, decode.truncate(40)]
    command: _Text
    node: _Text
    changes: Annotated[tuple[_Change, ...], decode.Default(())] = ()
    id: _Text = ""
    inventory: _Text = ""
    vlaunch: _Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Entry of one command on some nodes: `entry` with the nodes that have the same line."""

    entry: AuditLine
    nodes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        payload = asdict(self.entry)
        del payload["node"]
        return {**payload, "nodes": list(self.nodes), "changes": list(self.entry.changes)}


def append_argv(state_dir: str, cluster: str, entry: AuditLine, *, strict: bool = True) -> Argv:
    """Return a prefix that appends a line; if that fails, the command runs unless `strict`."""
    return (
        "sh",
        "-c",
        shell.program_text("audit_append"),
        "audit",
        state_dir,
        cluster,
        format_line(entry),
        "strict" if strict else "lenient",
    )


def read_argv(state_dir: str, cluster: str, last: int = 0) -> Argv:
    """Print a node's last lines, the newest last; all of them if `last` is 0."""
    count = str(last) if last else "+1"
    return ("sh", "-c", shell.program_text("audit_read"), "audit", state_dir, cluster, count)


def query_audit(cluster: str, nodes: Sequence[Node], last: int = 0) -> list[Command]:
    """Query each node for its last lines."""
    return [
        Command(node=node.name, argv=read_argv(node.state_dir or "", cluster, last), timeout=30)
        for node in nodes
    ]


def format_line(entry: AuditLine) -> str:
    """Return an entry as a line of JSON for one write; changes beyond that are counted."""
    changes = count_titles(entry.changes)
    short = replace(entry, changes=tuple(changes), command=entry.command[:_COMMAND])
    while len(text := json.dumps(asdict(short))) > LONGEST and changes:
        changes.pop()
        short = replace(short, changes=(*changes, f"… {len(entry.changes)} in all"))
    return (
        text
        if len(text) <= LONGEST
        else json.dumps(asdict(replace(short, command=short.command[:100])))
    )


def count_titles(changes: Sequence[str]) -> list[str]:
    """Return each title once, with its count."""
    times = {title: changes.count(title) for title in dict.fromkeys(changes)}
    return [title if count == 1 else f"{title} (× {count})" for title, count in times.items()]


def parse_lines(answer: Answer) -> tuple[list[AuditLine], int]:
    """Parse a node's lines; return the entries, and the number of invalid lines.

    Raises:
        UnreadableAnswer: the node gave none.
    """
    if not answer.ok:
        raise UnreadableAnswer(f"{answer.node}: cannot read its audit trail", evidence=answer.tail)
    entries, unreadable = [], 0
    for text in answer.out.splitlines():
        entry = _parse_line(text, answer.node)
        if entry is not None:
            entries.append(entry)
        elif text.strip():
            unreadable += 1
    return entries, unreadable


def merge_lines(entries: Iterable[AuditLine]) -> list[AuditEntry]:
    """Sort the entries of all nodes by time, and merge equal ones.

    Nodes that share a home share a file, so each of them returns all of it.
    """
    same: dict[AuditLine, list[str]] = {}
    for entry in dict.fromkeys(entries):
        same.setdefault(replace(entry, node=""), []).append(entry.node)
    merged = [
        AuditEntry(entry=entry, nodes=tuple(sorted(nodes, key=natural_key)))
        for entry, nodes in same.items()
    ]
    return sorted(merged, key=lambda item: item.entry.at)


def redact_command(argv: Sequence[str]) -> str:
    """Return a command line for people, without values that look like secrets."""
    redacted: list[str] = []
    hide = False
    for argument in argv:
        option = _OPTION.fullmatch(argument)
        if hide and not argument.startswith("-"):
            redacted.append("***")
        elif option is not None:
            redacted.append(f"{option[1]}=***" if option[2] else argument)
        else:
            redacted.append(_ADDRESS.sub(r"\1***@", secret_patterns.VALUE.sub("***", argument)))
        # One option may have several values (`--api-key A B`).
        hide = not option[2] if option is not None else hide and not argument.startswith("-")
    return " ".join(redacted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """User at a command line; `id` is the same for everything that one command does."""

    user: str
    host: str
    verb: str
    command: str
    id: str


def current_operator() -> Operator:
    """Return the user of the current command."""
    context = click.get_current_context(silent=True)
    argv = context.obj if context is not None and isinstance(context.obj, list) else sys.argv[1:]
    return Operator(
        user=_current_user(),
        host=socket.gethostname(),
        verb=context.command_path.partition(" ")[2] if context is not None else "",
        command=secret_patterns.redact_secrets(redact_command(("vlaunch", *argv))),
        id=secrets.token_hex(4),
    )


class Recorder:
    """Transport that appends an audit line before a plan's change, in the same round trip."""

    def __init__(self, inner: Transport, inventory: Inventory, operator: Operator) -> None:
        self._inner, self._inventory, self._by = inner, inventory, operator

    def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
        """Run all commands; see `Transport.run`."""
        return self._inner.run(commands)

    def record(self, verb: str, changes: Mapping[str, Sequence[str]]) -> Mapping[str, Argv]:
        """Return, for each node, the prefix that appends its line."""
        return {
            name: self.append_argv(self._inventory.node(name), titles, verb)
            for name, titles in changes.items()
        }

    def append_argv(self, node: Node, titles: Sequence[str], verb: str = "") -> Argv:
        """Return the prefix that appends one node's line, and then runs the command."""
        operator = self._by
        entry = AuditLine(
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            who=operator.user,
            host=operator.host,
            verb=operator.verb or verb,
            command=operator.command,
            node=node.name,
            changes=tuple(redact(title) for title in titles),
            id=operator.id,
            inventory=_digest(self._inventory),
            vlaunch=__version__,
        )
        return append_argv(
            node.state_dir or "",
            self._inventory.cluster,
            entry,
            strict=operator.verb not in _LENIENT,
        )


def _parse_line(text: str, node: str) -> AuditLine | None:
    try:
        entry = decode.parse_json(AuditLine, text, "the line")
    except UnreadableAnswer:
        return None
    return replace(entry, node=entry.node or node)


def _current_user() -> str:
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # this user has no name
        name = str(os.getuid())
    sudo_user = os.environ.get("SUDO_USER", "")
    return f"{name} ({sudo_user})" if sudo_user and sudo_user != name else name


def _digest(inventory: Inventory) -> str:
    try:
        return hashlib.sha256(inventory.path.read_bytes()).hexdigest()[:12]
    except OSError:  # it was made in memory, or is gone
        return ""
