"""What every command that reaches nodes begins with: the inventory, a connection to each node, a
place to show events.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from launcher.cli.author import Author, Recorder, author
from launcher.cli.find import find_inventory
from launcher.errors import ConnectError, together
from launcher.events import Event
from launcher.inventory.load import load
from launcher.model import Answer, Inventory, Node, fold
from launcher.tools import symptoms
from launcher.transport import Command, Recording, Transport
from launcher.ui.progress import Printer

if TYPE_CHECKING:
    from launcher.remote.fleet import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """An inventory and open connections to its nodes; `missing` are the nodes that could not be
    reached.

    What is changed through `transport` by a plan leaves a line on the node, with the name of
    `author`.
    """

    inventory: Inventory
    fleet: Fleet
    transport: Recording
    to: Printer
    author: Author = field(default_factory=author)
    missing: dict[str, ConnectError] = field(default_factory=dict)


def read(argument: str | None, option: str | None) -> Inventory:
    """Find and load the inventory, as every command does; the secrets it names are not shown from
    here on.
    """
    from launcher.remote.secrets import recall

    inventory = load(find_inventory(argument, option))
    recall(inventory.secrets, inventory.path.parent)
    return inventory


@contextmanager
def reach(
    inventory: Inventory,
    to: Printer,
    *,
    accept_new_host_keys: bool = False,
    verbose: bool = False,
    partial: bool = False,
    nodes: Sequence[Node] | None = None,
) -> Iterator[Session]:
    """Connect to every node, or only to `nodes`: a node that a command does not need cannot stop
    it.

    With `partial`, nodes that cannot be reached are left to the caller in `missing`; otherwise they
    raise ConnectError, every node's story told.
    """
    from launcher.remote.fleet import Fleet

    with Fleet(
        inventory, accept_new_host_keys=accept_new_host_keys, ask_passphrase=_ask_passphrase(to)
    ) as fleet:
        began = time.monotonic()
        names = [node.name for node in (inventory.nodes if nodes is None else nodes)]
        to.show(
            Event(
                kind="stage",
                stage="connect",
                text=f"Connect to {len(names)} nodes",
                state="running",
            )
        )
        missing = fleet.connect(names)
        reached = [name for name in names if name not in missing]
        if reached:
            to.show(
                Event(
                    kind="step",
                    stage="connect",
                    node=fold(reached),
                    text="connected",
                    state="ok",
                    seconds=time.monotonic() - began,
                )
            )
        if missing and not partial:
            raise together(list(missing.values()))
        transport: Transport = Verbose(fleet) if verbose else fleet
        by = author()
        recorder = Recorder(transport, inventory, by)
        yield Session(
            inventory=inventory, fleet=fleet, transport=recorder, to=to, author=by, missing=missing
        )


class Verbose:
    """A transport that says what it sends before it sends it (`--verbose`)."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
        """Show each command, then run all of them."""
        for command in commands:
            words = " ".join(
                symptoms.plain(word) if len(word) < 200 else "'…'" for word in command.argv
            )
            click.echo(f"  + {command.node}: {words}", err=True)
        yield from self._inner.run(commands)


def _ask_passphrase(to: Printer) -> Callable[[str], str | None]:
    def ask(path: str) -> str | None:
        if not sys.stdin.isatty():
            return None
        with to.paused():
            answer: str = click.prompt(f"Passphrase of {path}", hide_input=True, err=True)
        return answer

    return ask
