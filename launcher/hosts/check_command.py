"""`vlaunch check`: the preflight.

Every check of the catalogue is made, and every finding is told with its fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from launcher.app import options
from launcher.app.command import Call, command
from launcher.hosts.evidence import gather


@command(path=True, shows="people", flags=[options.STRICT, options.JSON])
@click.option(
    "--only",
    metavar="ID",
    multiple=True,
    help="Make only these checks (several: repeat it, or a,b).",
)
@click.option("--skip", metavar="ID", multiple=True, help="Leave these checks out.")
@click.option(
    "--group", metavar="GROUP", multiple=True, help="Make only the checks of these groups."
)
@click.option("--model", metavar="MODEL", help="Look for this model (default: the inventory's).")
@options.EXPECT
@click.option(
    "--offline", is_flag=True, help="Ask no one outside: the Hugging Face token is not tried."
)
@click.option(
    "--list", "listed", is_flag=True, help="List all checks and what they prove; touch no node."
)
def check(
    call: Call,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    group: tuple[str, ...],
    model: str | None,
    expect: Path | None,
    offline: bool,
    listed: bool,
) -> int:
    """Check everything that can be wrong with nodes and the network between them, before it costs
    an hour.

    Nothing is changed on a node. PASS, WARN, FAIL, or SKIP with the reason: what could not be
    looked at is never green.
    """
    from launcher.core import expectations_read
    from launcher.hosts import checks_view as ui
    from launcher.hosts.checks import catalogue

    chosen = catalogue.select(
        only=_words("--only", only), skip=_words("--skip", skip), group=_words("--group", group)
    )
    if not chosen:
        raise click.UsageError("no check is left to make")
    if listed:
        ui.show_list(chosen, as_json=call.as_json)
        return 0
    wanted = call.inventory
    known = expectations_read.load_for_user(expect)
    with call.session(partial=True) as session:
        evidence = gather(
            session, chosen, model=model or wanted.serve.model or "", known=known, offline=offline
        )
    results = catalogue.run(evidence, [each.id for each in chosen])
    ui.show(results, as_json=call.as_json)
    seen = {result.status for result in results}
    return options.exit_code(failed="fail" in seen, warned="warn" in seen, strict=call.strict)


def _words(option: str, given: Sequence[str]) -> tuple[str, ...]:
    words = tuple(word.strip() for each in given for word in each.split(",") if word.strip())
    if given and not words:
        raise click.UsageError(f"{option} names nothing; `vlaunch check --list` has the words")
    return words
