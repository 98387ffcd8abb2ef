"""The flags that several commands share, and the exit codes of `--strict`, spelled once."""

from __future__ import annotations

import re

import click

PATH = click.Argument(["path"], metavar="[INVENTORY]", required=False)
INVENTORY = click.Option(
    ["-i", "--inventory", "named"],
    metavar="FILE",
    help="The inventory (else: see `vlaunch --help`).",
)
VERBOSE = click.Option(["--verbose"], is_flag=True, help="Show what is sent, and tracebacks.")
JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON for machines.")
ACCEPT_NEW = click.Option(
    ["--accept-new-host-keys"],
    is_flag=True,
    help="Trust and remember hosts whose key is not known yet.",
)
DRY_RUN = click.Option(
    ["--dry-run"], is_flag=True, help="Print the script that would be sent; change nothing."
)
OFFLINE = click.Option(
    ["--offline"],
    is_flag=True,
    help="With --dry-run: touch no node, and assume that nothing is there yet.",
)
LOCK_WAIT = click.Option(
    ["--lock-wait"],
    type=click.IntRange(0),
    default=0,
    metavar="SECONDS",
    help="Wait so long for another operator.",
)
NO_HOOKS = click.Option(
    ["--no-hooks"], is_flag=True, help="Run none of the programs in `hooks/` beside the inventory."
)
FETCH = click.Option(
    ["--fetch"],
    is_flag=True,
    help=(
        "First bring the model to those of its nodes that lack it: from one that has it, else one"
        " of them downloads it."
    ),
)
PAIR_TIMEOUT = click.Option(
    ["--pair-timeout"],
    type=click.FloatRange(1),
    default=20.0,
    show_default=True,
    help="Seconds for the network check of one pair of nodes.",
)
STRICT = click.Option(["--strict"], is_flag=True, help="Exit with 3 when there is a warning.")

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_duration(_: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Parse a duration such as `1h30m`; a number without a unit is an error."""
    if text is None:
        return None
    if not re.fullmatch(r"(?:\d{1,6}[dhms])+", text.strip().lower()):
        raise click.BadParameter(
            f"`{text}` should be a duration such as `90s`, `30m`, `2h` or `1d`", param=param
        )
    return float(
        sum(
            int(number) * _SECONDS[unit]
            for number, unit in re.findall(r"(\d+)([dhms])", text.lower())
        )
    )


def exit_code(*, failed: bool, warned: bool, strict: bool) -> int:
    """Return the exit code of a judgement: 1 for a failure, 3 for a warning with `--strict`."""
    if failed:
        return 1
    return 3 if strict and warned else 0
