"""`vlaunch rollback`: return to the previous server of a name that answered."""

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.serving.start_spec import StartSpec, start_options, supervision_policy


@command(
    flags=[
        options.FETCH,
        options.PAIR_TIMEOUT,
        options.DRY_RUN,
        options.LOCK_WAIT,
        options.NO_HOOKS,
        options.JSON,
    ]
)
@start_options
@options.SERVER_OR_NAME
@click.argument("name", metavar="[NAME]", required=False)
def rollback(
    call: CommandContext,
    skip_network_check: bool,
    timeout: float | None,
    no_wait: bool,
    server: str | None,
    name: str | None,
) -> int:
    """Return to the last server that worked, and wait for its first answer.

    Model, arguments and parallelism are those of that server; the head stores the last five servers
    that answered for each NAME. The current server of this name is stopped; its replicas return one
    after another, `NAME.2` only this one. NAME can be omitted if there is one server. The hooks are
    those of `serve`.
    """
    from launcher.serving.rollback import choose_previous
    from launcher.serving.run_start import StartRun

    (name,) = options.merge_names(server, [name] if name else []) or (None,)
    with call.session(hooks_of="serve") as session:
        run = StartRun(call=call, session=session)
        with call.locked(session) as locked:
            spec = StartSpec(
                **choose_previous(locked, name, of_group=True).spec_fields(),
                replace_other=True,
                skip_network_check=skip_network_check,
                pair_timeout=call.pair_timeout,
                fetch=call.fetch,
                no_wait=no_wait,
                policy=supervision_policy(call.inventory, timeout),
            )
            session.hook_values.update(spec.hook_variables(call.inventory))
            run.create(locked, spec)
        run.finish(spec)
    run.print_rows()
    return run.code
