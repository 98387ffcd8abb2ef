"""`vlaunch up`: start the cluster, or apply changes of the inventory."""

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.inventory_path import remember
from launcher.app.secrets import resolve


@command(
    path=True,
    flags=[
        options.DRY_RUN,
        options.OFFLINE,
        options.LOCK_WAIT,
        options.NO_HOOKS,
        options.JSON,
    ],
)
@options.JOIN_TIMEOUT
def up(call: CommandContext, join_timeout: float) -> None:
    """Start the cluster, or apply changes of the inventory to it.

    Nodes are scanned first; then only what is missing or different is changed. A second run changes
    nothing.
    """
    from launcher.cluster.bring_up import bring_up, plan_changes, plan_offline

    if call.offline and not call.dry_run:
        raise click.UsageError("--offline requires --dry-run")
    inventory = call.inventory
    if call.offline:
        call.print_script(plan_offline(inventory))
        return
    values = resolve(inventory.secrets, inventory.path.parent)
    with call.session(hooks_of="up") as session:
        with call.locked(session) as locked:
            locked.hooks.run_pre(locked.printer)
            if call.dry_run:
                plans = plan_changes(locked, values)
            else:
                bring_up(locked, values, join_timeout=join_timeout)
        if not call.dry_run:
            remember(inventory.path)
            session.hooks.run_post(session.printer)
    if call.dry_run:
        call.print_script(plans)
