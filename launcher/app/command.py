"""Declaration of commands on a cluster: shared flags, and the object with their values."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import click

from launcher.app import options
from launcher.app.hooks import Hooks, find_hooks
from launcher.app.lock import locked
from launcher.app.progress import Printer, make_printer
from launcher.app.refusal import record_refusal
from launcher.app.session import Session, load_inventory, open_session
from launcher.app.terminal import confirm
from launcher.core.domain import Inventory, Node
from launcher.core.plan import Plan

# Audience of events: all (with --json, machines), people only (--json prints the answer), or none.
Shows = Literal["all", "people", "none"]


@dataclass(frozen=True, kw_only=True)
class CommandContext:
    """Values of the shared flags of one command line; a command has the flags that it declares.

    `path` and `named` are the inventory's name: as an argument, and with `-i`.
    """

    shows: Shows = "all"
    path: str | None = None
    named: str | None = None
    accept_new_host_keys: bool = False
    quiet: bool = False
    verbose: bool = False
    as_json: bool = False
    dry_run: bool = False
    offline: bool = False
    lock_wait: float = 0.0
    fetch: bool = False
    no_hooks: bool = False
    strict: bool = False
    yes: bool = False
    pair_timeout: float = 20.0

    @functools.cached_property
    def inventory(self) -> Inventory:
        """The inventory, found and loaded on first use; raises VlaunchError."""
        return load_inventory(self.path, self.named)

    def printer(self) -> Printer:
        """Return the printer of events for this command's audience."""
        if self.shows == "all":
            return make_printer(as_json=self.as_json, silent=self.dry_run, quiet=self.quiet)
        return make_printer(silent=self.as_json or self.shows == "none", quiet=self.quiet)

    @contextmanager
    def session(
        self,
        *,
        nodes: Sequence[Node] | None = None,
        partial: bool = False,
        hooks_of: str = "",
        hook_about: Mapping[str, str] | None = None,
        printer: Printer | None = None,
        inventory: Inventory | None = None,
    ) -> Iterator[Session]:
        """Connect to every node of the inventory, or to `nodes` (see `open_session`); events go to
        `printer`, by default the command's own.

        With `hooks_of`, the session has the hooks of that verb, with the values in `hook_about`;
        `on-failure` runs if the block fails.
        """
        inventory = inventory or self.inventory
        programs = Hooks(inventory=inventory, verb=hooks_of)
        if hooks_of:
            programs = find_hooks(inventory, hooks_of, skip=self.no_hooks, dry_run=self.dry_run)
        with ExitStack() as stack:
            if self.shows == "all" and not self.dry_run:
                stack.enter_context(record_refusal(inventory.cluster))
            shown = stack.enter_context(self.printer()) if printer is None else printer
            hook_values = stack.enter_context(programs.run_on_failure(shown, **(hook_about or {})))
            yield stack.enter_context(
                open_session(
                    inventory,
                    shown,
                    accept_new_host_keys=self.accept_new_host_keys,
                    verbose=self.verbose,
                    partial=partial,
                    nodes=nodes,
                    hooks=programs,
                    hook_values=hook_values,
                )
            )

    def locked(
        self, session: Session, *, skip: bool = False, required: bool = True
    ) -> AbstractContextManager[Session]:
        """Hold the cluster's lock (see `launcher.app.lock`); a dry run takes none."""
        wait = max(self.lock_wait, session.inventory.lock_wait)
        return locked(session, wait=wait, skip=self.dry_run or skip, required=required)

    def confirm(self, session: Session, question: str, *, hint: str = "") -> None:
        """Ask before something is destroyed, unless `--yes` or this is a dry run; raise Exit(1) for
        a no, and RequestError without a terminal.
        """
        if not (self.yes or self.dry_run):
            with session.printer.paused():
                confirm(question, hint=hint)

    def print_script(self, plans: Sequence[Plan]) -> None:
        """Print the script of a dry run."""
        from launcher.app.script import render_script

        click.echo(render_script(self.inventory, plans), nl=False)


class DefaultGroup(click.Group):
    """A group that runs its first command if none is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; options without a command are those of the first command."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


def command(
    name: str | None = None,
    *,
    under: click.Group | None = None,
    kind: type[click.Command] = click.Command,
    shows: Shows = "all",
    inventory: bool = True,
    path: bool = False,
    flags: Sequence[click.Option] = (),
    **attributes: Any,
) -> Callable[[Callable[..., Any]], click.Command]:
    """Create a command from a function that takes a `CommandContext` and its own flags.

    Each connects to nodes, and can name its inventory unless `inventory` is false (with `path` also
    as an argument); `flags` are its other shared flags. In the help they follow its own.
    """
    first = [options.PATH] if path else []
    last = [
        *flags,
        *([options.INVENTORY] if inventory else ()),
        options.ACCEPT_NEW,
        options.QUIET,
        options.VERBOSE,
    ]
    shared = {str(option.name) for option in (*first, *last)}

    def make(function: Callable[..., Any]) -> click.Command:
        @functools.wraps(function)
        def called(**own: Any) -> Any:
            shared_values = {key: own.pop(key) for key in shared}
            return function(CommandContext(shows=shows, **shared_values), **own)

        built = click.command(name, cls=kind, **attributes)(called)
        built.params = [*first, *built.params, *last]
        if under is not None:
            under.add_command(built)
        return built

    return make
