"""The flags that several commands share, and the exit codes of `--strict`, spelled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

inventory = click.option(
    "-i",
    "--inventory",
    "inventory",
    metavar="FILE",
    help="The inventory (else: see `vlaunch --help`).",
)
verbose = click.option("--verbose", is_flag=True, help="Show what is sent, and tracebacks.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
accept_new = click.option(
    "--accept-new-host-keys",
    is_flag=True,
    help="Trust and remember hosts whose key is not known yet.",
)
lock_wait = click.option(
    "--lock-wait",
    type=click.IntRange(0),
    default=0,
    metavar="SECONDS",
    help="Wait so long for another operator.",
)
no_hooks = click.option(
    "--no-hooks", is_flag=True, help="Run none of the programs in `hooks/` beside the inventory."
)
strict = click.option("--strict", is_flag=True, help="Exit with 3 when there is a warning.")


def reaching(function: F) -> F:
    """Add the flags of every command that reaches nodes: -i, --accept-new-host-keys, --verbose."""
    return inventory(accept_new(verbose(function)))


def exit_code(*, failed: bool, warned: bool, strict: bool) -> int:
    """Return the exit code of a judgement: 1 for a failure, 3 for a warning with `--strict`."""
    if failed:
        return 1
    return 3 if strict and warned else 0
