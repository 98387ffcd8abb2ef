"""`vlaunch check`: run the catalogue and show each finding with its fix."""

from collections.abc import Sequence
from pathlib import Path

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.hosts.evidence import gather_evidence


@command(shows="people", flags=[options.STRICT, options.JSON])
@click.option(
    "--only",
    metavar="ID",
    multiple=True,
    help="Run only these checks (a,b); repeatable.",
)
@click.option("--skip", metavar="ID", multiple=True, help="Skip these checks (a,b); repeatable.")
@click.option(
    "--group",
    metavar="GROUP",
    multiple=True,
    help="Run only the checks of these groups (a,b); repeatable.",
)
@click.option("--model", metavar="MODEL", help="Check for this model (default: the inventory's).")
@options.EXPECT
@click.option("--no-hub", is_flag=True, help="Skip the request to the Hugging Face Hub.")
@click.option(
    "--list", "listed", is_flag=True, help="List all checks with what they test; contact no node."
)
def check(
    call: CommandContext,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    group: tuple[str, ...],
    model: str | None,
    expect: Path | None,
    no_hub: bool,
    listed: bool,
) -> int:
    """Check the nodes and the network between them for everything that can stop a cluster.

    Nothing changes on a node. Each check ends as PASS, WARN, FAIL, or SKIP with the reason; what
    could not be checked is never PASS.
    """
    from launcher.core import expectations_file
    from launcher.hosts import checks_view as ui
    from launcher.hosts.checks import catalogue

    checks = catalogue.select_checks(
        only=_split_ids("--only", only),
        skip=_split_ids("--skip", skip),
        group=_split_ids("--group", group),
    )
    if not checks:
        raise click.UsageError("no checks are selected")
    if listed:
        ui.show_list(checks, as_json=call.as_json)
        return 0
    inventory = call.inventory
    expectations = expectations_file.load_for_user(expect)
    with call.session(partial=True) as session:
        evidence = gather_evidence(
            session,
            checks,
            model=model or inventory.serve.model or "",
            expectations=expectations,
            offline=no_hub,
        )
    results = catalogue.run_checks(evidence, [selected_check.id for selected_check in checks])
    ui.show_results(results, as_json=call.as_json)
    statuses = {result.status for result in results}
    return options.exit_code(
        failed="fail" in statuses, warned="warn" in statuses, strict=call.strict
    )


def _split_ids(option: str, values: Sequence[str]) -> tuple[str, ...]:
    ids = tuple(item.strip() for value in values for item in value.split(",") if item.strip())
    if values and not ids:
        raise click.UsageError(f"{option} needs a value; see `vlaunch check --list`")
    return ids
