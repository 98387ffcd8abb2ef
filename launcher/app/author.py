"""Who runs this command, where, and as which words: what locks and audit lines say of it, without a
secret.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import click

from launcher import __version__
from launcher.app import audit
from launcher.core.domain import Answer, Argv, Inventory, Node
from launcher.core.redaction import redact
from launcher.core.secret_patterns import clean
from launcher.core.transport import Command, Transport

# These clean up: a disk that is full must not keep them from it.
_LENIENT = ("down", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """A person at a command line; `id` is the same for all that one command does."""

    who: str
    host: str
    verb: str
    command: str
    id: str


def author() -> Author:
    """Return who runs the present command."""
    context = click.get_current_context(silent=True)
    words = context.obj if context is not None and isinstance(context.obj, list) else sys.argv[1:]
    return Author(
        who=_user(),
        host=socket.gethostname(),
        verb=context.command_path.partition(" ")[2] if context is not None else "",
        command=clean(audit.command_line(("vlaunch", *words))),
        id=secrets.token_hex(4),
    )


class Recorder:
    """A transport that has an audit line appended on a node before a plan changes it, in the same
    round trip.
    """

    def __init__(self, inner: Transport, inventory: Inventory, by: Author) -> None:
        self._inner, self._inventory, self._by = inner, inventory, by

    def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
        """Run all commands; see `Transport.run`."""
        return self._inner.run(commands)

    def record(self, verb: str, changes: Mapping[str, Sequence[str]]) -> Mapping[str, Argv]:
        """Return, for each node, the words that append its line."""
        return {
            name: self.words(self._inventory.node(name), titles, verb)
            for name, titles in changes.items()
        }

    def words(self, node: Node, titles: Sequence[str], verb: str = "") -> Argv:
        """Return the words that append one node's line, and then run what follows them."""
        by = self._by
        entry = audit.Entry(
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            who=by.who,
            host=by.host,
            verb=by.verb or verb,
            command=by.command,
            node=node.name,
            changes=tuple(redact(title) for title in titles),
            id=by.id,
            inventory=_digest(self._inventory),
            vlaunch=__version__,
        )
        return audit.append(
            node.state_dir or "", self._inventory.cluster, entry, strict=by.verb not in _LENIENT
        )


def _user() -> str:
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # this user has no name
        name = str(os.getuid())
    asked = os.environ.get("SUDO_USER", "")
    return f"{name} ({asked})" if asked and asked != name else name


def _digest(inventory: Inventory) -> str:
    try:
        return hashlib.sha256(inventory.path.read_bytes()).hexdigest()[:12]
    except OSError:  # it was made in memory, or is gone
        return ""
