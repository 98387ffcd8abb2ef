"""`vlaunch rollback`: return to the server that answered before the present one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from launcher.cli import options

if TYPE_CHECKING:
    from launcher.cli.hooks import Hooks
    from launcher.cli.session import Session
    from launcher.cli.start import Asked, Begun
    from launcher.plan.rollback import Answered


@click.command()
@options.reaching
@options.as_json
@click.option("--skip-network-check", is_flag=True, help="Start on a network that nobody has proven.")
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds to wait for the first answer.")
@click.option("--no-wait", is_flag=True, help="Start it and return at once.")
@click.option("--dry-run", is_flag=True, help="Print the script that would be sent; change nothing.")
@options.lock_wait
@options.no_hooks
def rollback(
    inventory: str | None,
    accept_new_host_keys: bool,
    verbose: bool,
    as_json: bool,
    skip_network_check: bool,
    timeout: float,
    no_wait: bool,
    dry_run: bool,
    lock_wait: int,
    no_hooks: bool,
) -> int:
    """Start the server that answered last, other than the one that is wanted now, and wait until it has answered again.

    Model, arguments and split are those of then; the head keeps them of the last five supervised servers that have answered.
    What runs now is stopped. The hooks are those of `serve`.
    """
    from launcher.cli import session
    from launcher.cli.hooks import hooks
    from launcher.cli.start import finish
    from launcher.ui.progress import printer

    wanted = session.read(None, inventory)
    programs = hooks(wanted, "serve", skip=no_hooks, dry_run=dry_run)
    with (
        printer(as_json=as_json, quiet=dry_run) as to,
        programs.watching(to) as told,
        session.reach(wanted, to, accept_new_host_keys=accept_new_host_keys, verbose=verbose) as reached,
    ):
        _, asked, begun = _begin(
            reached, programs, told, lock_wait=lock_wait, timeout=timeout, skip_network_check=skip_network_check,
            dry_run=dry_run,
        )  # fmt: skip
        code, rows = finish(reached, asked, begun, programs, timeout=timeout, no_wait=no_wait)
    if not as_json:
        for row in rows:
            click.echo(row)
    return code


def or_back(
    session: Session, asked: Asked, hooks: Hooks, *, lock_wait: int, timeout: float, no_wait: bool = False
) -> tuple[int, list[str]]:
    """Start a server as `start` does; when it does not answer, return to the one that answered before.

    Raises VlaunchError when it did not answer, whether the other one does again or not.
    """
    from launcher.cli.start import finish, start
    from launcher.errors import GateError, HookError, LockError, RequestError, VlaunchError
    from launcher.events import Event

    try:
        return start(session, asked, hooks, lock_wait=lock_wait, timeout=timeout, no_wait=no_wait)
    except (RequestError, LockError, HookError):
        raise  # nothing was touched
    except VlaunchError as error:
        failed = error
    text = f"{asked.model} does not answer: {failed.message}"
    session.to.show(Event(kind="warning", stage="serve", text=text, state="warn"))
    try:
        before, again, begun = _begin(
            session, hooks, {}, without=asked.request(session.inventory, None).digest, lock_wait=max(lock_wait, 60),
            timeout=timeout, skip_network_check=asked.skip_network_check,
        )  # fmt: skip
        finish(session, again, begun, hooks, timeout=timeout, no_wait=False)
    except VlaunchError as error:
        raise GateError(
            f"{failed.message}; and the server before does not answer either",
            evidence=[failed.evidence, error.message, error.evidence],
            hint=error.hint or failed.hint,
        ) from failed
    raise GateError(
        f"{asked.model} did not answer, so {before.what} answers again",
        evidence=[failed.message, failed.evidence],
        hint=failed.hint,
    ) from failed


def _begin(
    session: Session,
    hooks: Hooks,
    told: dict[str, str],
    *,
    lock_wait: int,
    timeout: float,
    without: str = "",
    skip_network_check: bool = False,
    dry_run: bool = False,
) -> tuple[Answered, Asked, Begun | None]:
    """Choose what answered before and start it, with the cluster's lock held all the while; hooks are told of it by `told`."""
    from launcher.cli.locked import locked
    from launcher.cli.start import begin
    from launcher.remote.secrets import ask_first

    with locked(session, wait=lock_wait, unless=dry_run) as ours:
        before = _before(ours, without=without)
        asked = _asked(ours, before, timeout=timeout, skip_network_check=skip_network_check, dry_run=dry_run)
        told.update(asked.about(session.inventory))
        if asked.backend == "mp":
            ask_first(session.inventory.secrets)
        return before, asked, begin(ours, asked, hooks)


def _before(session: Session, *, without: str) -> Answered:
    """Return the server that answered last, other than the present one, or the one `without`; raises RequestError."""
    from launcher.plan import rollback as plans
    from launcher.plan.observe import observe
    from launcher.watch import by_node

    inventory = session.inventory
    facts = observe(inventory, session.transport, [inventory.image])
    head = inventory.head.name
    answered, wanted = plans.read(by_node(session.transport, [plans.ask(inventory, facts)])[head][0])
    image = facts[head].images.get(inventory.image)
    return plans.choose(answered, without or wanted, image.identity if image else "")


def _asked(session: Session, before: Answered, *, timeout: float, skip_network_check: bool, dry_run: bool) -> Asked:
    """Ask for what answered then, and say so."""
    from datetime import datetime

    from launcher.cli.start import Asked, policy
    from launcher.events import Event

    inventory = session.inventory
    when = datetime.fromtimestamp(before.at).strftime("%Y-%m-%d %H:%M:%S")
    text = f"back to {before.what}, which answered last at {when}"
    session.to.show(Event(kind="note", stage="rollback", text=text, data={"id": before.id, "at": before.at}))
    return Asked(
        model=before.model, tp=before.tp, pp=before.pp, dp=before.dp, backend=before.backend, host=before.host,
        port=before.port, args=before.args, replace_other=True, skip_network_check=skip_network_check, dry_run=dry_run,
        supervise=policy(inventory, timeout) if inventory.serve.supervise else None,
    )  # fmt: skip
