"""Session of a command: the inventory, a connection to each node, and the display of events."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import click

from launcher.app.apply import apply
from launcher.app.audit import Operator, Recorder, current_operator
from launcher.app.hooks import Hooks
from launcher.app.inventory_path import find_inventory
from launcher.app.progress import Printer, show_all, show_through
from launcher.app.secrets import hide_known_values
from launcher.core import untrusted
from launcher.core.domain import Answer, Inventory, Node, fold
from launcher.core.errors import ConnectError, combine_errors
from launcher.core.events import Event, Kind, State
from launcher.core.plan import Plan
from launcher.core.sizes import format_count
from launcher.core.transport import Command, RecordingTransport, Transport
from launcher.failures.explain import docker_error
from launcher.tools.site import Site

if TYPE_CHECKING:
    from launcher.ssh.fleet import Fleet

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """An inventory and open connections to its nodes; `missing` are the unreachable nodes.

    A plan's changes through `transport` leave an audit line on the node, with the name of
    `operator`. `hook_values` are the values for the hook `on-failure`.
    """

    inventory: Inventory
    fleet: Fleet
    transport: RecordingTransport
    printer: Printer
    hooks: Hooks
    hook_values: dict[str, str] = field(default_factory=dict)
    operator: Operator = field(default_factory=current_operator)
    missing: dict[str, ConnectError] = field(default_factory=dict)

    @property
    def site(self) -> Site:
        """The inventory without any facts: enough to query containers."""
        return Site(self.inventory)

    @property
    def reached(self) -> tuple[Node, ...]:
        """The connected nodes, in the inventory's order."""
        return self.reached_of(self.inventory.nodes)

    def reached_of(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """Return the connected ones of some nodes, in their order."""
        return tuple(node for node in nodes if node.name not in self.missing)

    def apply(self, plan: Plan) -> None:
        """Run a plan and show its events; raises like `launcher.app.apply.apply`."""
        show_all(apply(plan, self.transport), self.printer)

    def show(self, events: Generator[Event, None, T]) -> T:
        """Show a stream of events, and return its result."""
        return show_through(events, self.printer)

    # --- events

    def begin(self, stage: str, text: str) -> None:
        """Report the begin of a stage."""
        self._tell("stage", stage, text, state="running")

    def wait(self, stage: str, text: str, *, deadline: float = 0.0) -> None:
        """Report slow work, with its time limit in seconds."""
        self._tell("wait", stage, text, state="running", deadline=deadline)

    def step(
        self, stage: str, text: str, *, node: str = "", state: State = "ok", seconds: float = 0.0
    ) -> None:
        """Report a finished step, or, with the state `running`, one in progress."""
        self._tell("step", stage, text, node=node, state=state, seconds=seconds)

    def note(
        self,
        stage: str,
        text: str,
        *,
        node: str = "",
        state: State = "",
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Report additional information."""
        self._tell("note", stage, text, node=node, state=state, data=data or {})

    def warn(self, stage: str, text: str, *, data: Mapping[str, Any] | None = None) -> None:
        """Report a warning."""
        self._tell("warning", stage, text, state="warn", data=data or {})

    def done(
        self,
        text: str,
        *,
        stage: str = "",
        state: State = "ok",
        seconds: float = 0.0,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Report the result of the command."""
        self._tell("done", stage, text, state=state, seconds=seconds, data=data or {})

    def _tell(self, kind: Kind, stage: str, text: str, **fields: Any) -> None:
        self.printer.show(Event(kind=kind, stage=stage, text=text, **fields))


def load_inventory(argument: str | None, option: str | None) -> Inventory:
    """Find and load the inventory; mask the secrets that it names."""
    from launcher.inventory.load import load

    inventory = load(find_inventory(argument, option))
    hide_known_values(inventory.secrets, inventory.path.parent)
    return inventory


@contextmanager
def open_session(
    inventory: Inventory,
    printer: Printer,
    *,
    accept_new_host_keys: bool = False,
    verbose: bool = False,
    partial: bool = False,
    nodes: Sequence[Node] | None = None,
    hooks: Hooks | None = None,
    hook_values: dict[str, str] | None = None,
) -> Iterator[Session]:
    """Connect to every node, or only to `nodes`: a node that a command does not need cannot stop
    it.

    With `partial`, unreachable nodes are listed in `missing`; otherwise they raise ConnectError,
    with every node's reason.
    """
    from launcher.ssh.fleet import Fleet

    with Fleet(
        inventory,
        accept_new_host_keys=accept_new_host_keys,
        terminal=printer.paused if sys.stdin.isatty() else None,
        explain=docker_error,
    ) as fleet:
        began = time.monotonic()
        names = [node.name for node in (inventory.nodes if nodes is None else nodes)]
        printer.show(
            Event(
                kind="stage",
                stage="connect",
                text=f"Connect to {format_count(len(names), 'node')}",
                state="running",
            )
        )
        missing = fleet.connect(names)
        reached = [name for name in names if name not in missing]
        if reached:
            printer.show(
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
            raise combine_errors(list(missing.values()))
        transport: Transport = VerboseTransport(fleet) if verbose else fleet
        operator = current_operator()
        recorder = Recorder(transport, inventory, operator)
        yield Session(
            inventory=inventory,
            fleet=fleet,
            transport=recorder,
            printer=printer,
            hooks=hooks or Hooks(inventory=inventory, verb=""),
            hook_values={} if hook_values is None else hook_values,
            operator=operator,
            missing=missing,
        )


class VerboseTransport:
    """Transport that prints each command before it sends it (`--verbose`)."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
        """Show each command, then run all of them."""
        for command in commands:
            line = " ".join(
                untrusted.sanitize(argument) if len(argument) < 200 else "'…'"
                for argument in command.argv
            )
            click.echo(f"  + {command.node}: {line}", err=True)
        yield from self._inner.run(commands)
