"""Audit trail of a node: lines without secrets, appended before each change."""

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
from dataclasses import dataclass
from typing import Any

import click

from launcher import __version__
from launcher.core import secret_patterns, shell, untrusted
from launcher.core.domain import Answer, Argv, Inventory, Node, fold, natural_key
from launcher.core.redaction import redact
from launcher.core.transport import Command, Transport

FILE = "audit"  # {state_dir}/audit/{cluster}.ndjson
# A line of at most this many bytes is one write of every shell (dash buffers 8 KiB, bash and
# busybox a block of 4 KiB), and one write to a file that is open for appending is never mixed with
# another one's.
LONGEST = 4000
_COMMAND = 1000
# What `vlaunch audit` shows of a line; an object without it is none.
_SHOWN = frozenset({"at", "who", "host", "command", "changes"})

# Options with secret values (`--tokenizer`, `--max-num-batched-tokens` are none), and
# passwords within addresses.
_OPTION = re.compile(
    r"(--[\w-]*(?:token|secrets?|passwo?r?d|api[_-]?keys?|credentials?))(=.*)?",
    re.IGNORECASE | re.DOTALL,
)
_ADDRESS = re.compile(r"(\w://)[^/@\s]+@")
# These clean up: a disk that is full must not keep them from it.
_LENIENT = ("down", "stop")


def append_argv(state_dir: str, cluster: str, line: str, *, strict: bool = True) -> Argv:
    """Return a prefix that appends a line; if that fails, the command runs unless `strict`."""
    program = shell.program_text("audit_append")
    mode = "strict" if strict else "lenient"
    return ("sh", "-c", program, "audit", state_dir, cluster, line, mode)


def read_argv(state_dir: str, cluster: str, last: int = 0) -> Argv:
    """Print a node's last lines, the newest last; all of them if `last` is 0."""
    count = str(last) if last else "+1"
    return ("sh", "-c", shell.program_text("audit_read"), "audit", state_dir, cluster, count)


def format_line(entry: Mapping[str, Any]) -> str:
    """Return an entry as a line of JSON for one write; changes beyond that are counted."""
    titles = entry["changes"]
    times = {title: titles.count(title) for title in dict.fromkeys(titles)}
    changes = [title if count == 1 else f"{title} (× {count})" for title, count in times.items()]
    short = {**entry, "changes": changes, "command": entry["command"][:_COMMAND]}
    while len(text := json.dumps(short)) > LONGEST and changes:
        changes.pop()
        short["changes"] = [*changes, f"… {len(titles)} in all"]
    return (
        text if len(text) <= LONGEST else json.dumps({**short, "command": short["command"][:100]})
    )


def parse_lines(node: str, text: str) -> tuple[list[dict[str, Any]], int]:
    """Parse a node's lines; return the entries, and the number of invalid lines."""
    entries, unreadable = [], 0
    for line in filter(str.strip, text.splitlines()):
        try:
            entry = untrusted.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict) and entry.keys() >= _SHOWN:
            entries.append({"node": node, **entry})
        else:
            unreadable += 1
    return entries, unreadable


def merge_lines(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sort the entries of all nodes by time, and merge those that differ only in `node`: the result
    has `nodes`.

    Nodes that share a home share a file, so each of them returns all of it.
    """
    nodes: dict[str, set[str]] = {}
    for entry in entries:
        rest = {key: value for key, value in entry.items() if key != "node"}
        nodes.setdefault(json.dumps(rest), set()).add(str(entry["node"]))
    merged = [
        {**json.loads(text), "nodes": sorted(names, key=natural_key)}
        for text, names in nodes.items()
    ]
    return sorted(merged, key=lambda entry: str(entry["at"]))


def describe_entry(entry: Mapping[str, Any]) -> str:
    """Return a merged entry as one line for people."""
    changes = entry["changes"] if isinstance(entry["changes"], list) else [entry["changes"]]
    line = (
        f"{entry['at']}  {entry['who']}@{entry['host']}  {fold(entry['nodes'])}"
        f"  {entry['command']}: {'; '.join(map(str, changes))}"
    )
    return untrusted.sanitize(line.replace("\n", " "))


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
            name: self._append_argv(self._inventory.node(name), titles, verb)
            for name, titles in changes.items()
        }

    def _append_argv(self, node: Node, titles: Sequence[str], verb: str) -> Argv:
        operator, cluster = self._by, self._inventory.cluster
        entry = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "who": operator.user,
            "host": operator.host,
            "verb": operator.verb or verb,
            "command": operator.command,
            "node": node.name,
            "changes": [redact(title) for title in titles],
            "id": operator.id,
            "inventory": _digest(self._inventory),
            "vlaunch": __version__,
        }
        strict = operator.verb not in _LENIENT
        return append_argv(node.state_dir or "", cluster, format_line(entry), strict=strict)


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
