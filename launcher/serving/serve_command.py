"""`vlaunch serve`: start a server and wait for its first answer."""

import ipaddress
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from launcher.agent.state import GROUP
from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.registry import extend_options
from launcher.app.selection import select_model
from launcher.core.domain import Backend, Ports, ServeDefaults
from launcher.inventory import ranges
from launcher.serving.serve_request import merge_vllm_args
from launcher.serving.start_spec import StartSpec, start_options, supervision_policy
from launcher.tools.site import Site
from launcher.tools.site.snapshot import ClusterSnapshot


class _Command(click.Command):
    """A command whose error for an unknown option explains where vLLM's own options go."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"{error.format_message()}\nvLLM's own options go after `--`", ctx
            ) from None


@command(
    kind=_Command,
    flags=[
        options.FETCH,
        options.PAIR_TIMEOUT,
        options.DRY_RUN,
        options.OFFLINE,
        options.LOCK_WAIT,
        options.NO_HOOKS,
        options.JSON,
    ],
)
@click.option(
    "--model",
    metavar="MODEL",
    help="Model name on Hugging Face, or a path on every node (default: the inventory's).",
)
@click.option(
    "--name",
    "--server",
    "name",
    default="default",
    show_default=True,
    metavar="NAME",
    help="Name of the server.",
)
@click.option(
    "--nodes",
    metavar="NODES",
    help="Nodes to use, such as gpu[01-02]; needs `--backend mp` (default: all).",
)
@click.option(
    "--gpus",
    type=click.IntRange(1),
    help="GPUs to use on each node; needs `--backend mp` (default: all).",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 99),
    metavar="N",
    help="Copies of the server, NAME to NAME.N, on GPUs of their own (default: as many as run).",
)
@options.inventory_option(ServeDefaults, "tp")
@options.inventory_option(ServeDefaults, "pp")
@options.inventory_option(ServeDefaults, "dp", *options.DP_FLAGS)
@options.inventory_option(ServeDefaults, "plan", "--plan", "chosen_by")
@options.inventory_option(
    ServeDefaults,
    "backend",
    help="Executor of vLLM: ray, or mp, which needs no Ray (default: the inventory's).",
)
@options.inventory_option(
    Ports, "api", "--port", help="Port of the API (default: the inventory's)."
)
@options.inventory_option(
    ServeDefaults,
    "bind",
    metavar="IP",
    help="Address the endpoint listens on (default: the inventory's).",
)
@click.option(
    "--no-supervise",
    is_flag=True,
    help="Do not restart the server after a failure.",
)
@click.option(
    "--replace",
    "replace_other",
    is_flag=True,
    help="Replace the running server of this name.",
)
@click.option(
    "--or-rollback",
    is_flag=True,
    help="Return to the last server that worked if this one does not start.",
)
@start_options
@extend_options("serve")
@options.ENGINE_ARGS
def serve(
    call: CommandContext,
    model: str | None,
    name: str,
    nodes: str | None,
    chosen_by: str | None,
    backend: Backend | None,
    port: int | None,
    bind: str | None,
    no_supervise: bool,
    or_rollback: bool,
    timeout: float | None,
    no_wait: bool,
    args: tuple[str, ...],
    describe: Callable[[CommandContext, StartSpec], StartSpec] | None = None,
    **others: Any,
) -> int:
    """Check the network, start a server, wait for its first answer, and print its endpoint and
    capacity.

    Everything after `--` goes to `vllm serve`. Ctrl-C stops watching, not the server; run the same
    command to watch it again. Options that are not given have the values of `serve:` in the
    inventory; any of --tp, --pp and --dp replaces all three.
    """
    from launcher.serving.run_start import StartRun
    from launcher.serving.start import plan_replicas

    _check_options(call, replicas=others["replicas"], or_rollback=or_rollback, no_wait=no_wait)
    inventory = call.inventory
    model_name = model or "" if describe else select_model(model, inventory)
    spec = StartSpec(
        name=_check_name(name),
        model=model_name,
        nodes=_expand_nodes(nodes),
        backend=backend or inventory.serve.backend,
        host=_parse_address(bind) if bind else inventory.serve.bind or "",
        port=port or inventory.ports.api,
        args=merge_vllm_args(inventory, args),
        policy=supervision_policy(inventory, timeout, supervise=not no_supervise),
        unsupervised=no_supervise,
        pair_timeout=call.pair_timeout,
        fetch=call.fetch,
        no_wait=no_wait,
        **others,  # --gpus, --replicas, --tp, --pp, --dp, --replace and --skip-network-check
    )
    spec = replace(spec, planned=_planner_chooses(call, spec, chosen_by))
    if describe:
        spec = describe(call, spec)
    empty = ClusterSnapshot(site=Site(inventory))
    _check_placement(spec, empty)  # before any change
    if call.offline:
        replicas = plan_replicas(spec, empty, requested_at=time.time())
        call.print_script([replicas.creation_plan()])
        return 0
    with call.session(hooks_of="serve", hook_about=spec.hook_variables(inventory)) as session:
        run = StartRun(call=call, session=session)
        run.run(spec, or_rollback=or_rollback)
    run.print_rows()
    return run.code


def _check_placement(spec: StartSpec, empty: ClusterSnapshot) -> None:
    """Raise RequestError or PlacementError if nothing can place the model."""
    from launcher.serving.replicas import place_replicas

    placed: tuple[StartSpec, ...] = (spec,)
    if spec.replicas:  # the planner's layout is not known yet
        numbers = range(1, spec.replicas + 1)
        placed = () if spec.planned else place_replicas(spec, numbers, empty)
    for replica in placed:
        replica.build_request(empty.site.inventory, None)


def _check_options(
    call: CommandContext, *, replicas: int | None, or_rollback: bool, no_wait: bool
) -> None:
    """Raise UsageError for options that do not go together."""
    if call.offline and not call.dry_run:
        raise click.UsageError("--offline requires --dry-run")
    if call.offline and replicas:
        raise click.UsageError("--offline cannot be combined with --replicas")
    if or_rollback and (no_wait or call.dry_run):
        raise click.UsageError("--or-rollback cannot be combined with --no-wait or --dry-run")


def _planner_chooses(call: CommandContext, spec: StartSpec, chosen_by: str | None) -> bool:
    """True if the planner chooses the layout: a layout on the command line or in the inventory
    comes before the inventory's `plan: auto`. Raises UsageError for options that exclude each
    other.
    """
    if chosen_by != "auto":
        is_default = chosen_by is None and call.inventory.serve.plan == "auto"
        return is_default and not spec.has_fixed_layout(call.inventory) and not call.offline
    if any(size is not None for size in (spec.tp, spec.pp, spec.dp)):
        raise click.UsageError(
            "--plan auto cannot be combined with --tp, --pp or --dp: it chooses them"
        )
    if call.offline:
        raise click.UsageError(
            "--plan auto needs the nodes; without them, use `vlaunch plan --no-nodes`"
        )
    return True


def _check_name(name: str) -> str:
    if GROUP.fullmatch(name) is None:
        raise click.UsageError(
            f"--name should be at most 32 lower-case letters, digits and `-`, not `{name}`"
        )
    return name


def _expand_nodes(text: str | None) -> tuple[str, ...]:
    """Expand node ranges in inventory notation, separated by commas."""
    try:
        return tuple(
            name
            for part in re.split(r",(?![^\[]*\])", text or "")
            if part
            for name in ranges.expand_range(part)
        )
    except ValueError as error:
        raise click.UsageError(f"--nodes {error}, not `{text}`") from None


def _parse_address(bind: str) -> str:
    try:
        return str(ipaddress.ip_address(bind))
    except ValueError:
        raise click.UsageError(
            f"--bind should be an IP address of its node, or 0.0.0.0 for all of them, not `{bind}`"
        ) from None
