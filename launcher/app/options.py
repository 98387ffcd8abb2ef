"""Flags that several commands share, and the exit codes of `--strict`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from launcher.core.descriptions import field_descriptions
from launcher.core.sizes import parse_duration
from launcher.core.values import Bounds

F = TypeVar("F", bound=Callable[..., Any])


def _engine_args(_: click.Context, __: click.Parameter, args: tuple[str, ...]) -> tuple[str, ...]:
    """Raise UsageError for arguments that are no options."""
    if args and not args[0].startswith("-"):
        raise click.UsageError(
            f"`{args[0]}` is not an argument of `vllm serve`; pass the inventory with -i"
        )
    return args


ENGINE_ARGS = click.argument(
    "args", metavar="[-- VLLM ARGS]", nargs=-1, type=click.UNPROCESSED, callback=_engine_args
)


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in new versions only
    """A duration in seconds, written as `90s`, `1h30m` or plain seconds; the bounds likewise."""

    name = "duration"

    def __init__(self, least: str = "0s", most: str = "") -> None:
        self._least, self._most = least, most

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the seconds."""
        try:
            seconds = parse_duration(value)
        except ValueError:
            self.fail(f"`{value}` is not a duration such as `90s`, `30m`, `2h` or `1d`", param, ctx)
        if seconds < parse_duration(self._least):
            self.fail(f"`{value}` is too short: at least {self._least}", param, ctx)
        if self._most and seconds > parse_duration(self._most):
            self.fail(f"`{value}` is too long: at most {self._most}", param, ctx)
        return seconds


PATH = click.Argument(["path"], metavar="[INVENTORY]", required=False)
INVENTORY = click.Option(
    ["-i", "--inventory", "named"],
    metavar="FILE",
    help="Inventory file (default: see `vlaunch --help`).",
)
QUIET = click.Option(
    ["-q", "--quiet"], is_flag=True, help="Show no progress, only warnings and errors."
)
VERBOSE = click.Option(["--verbose"], is_flag=True, help="Log remote commands; show tracebacks.")
JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")
ACCEPT_NEW = click.Option(
    ["--accept-new-host-keys"],
    is_flag=True,
    help="Add unknown host keys to known_hosts.",
)
DRY_RUN = click.Option(
    ["--dry-run"], is_flag=True, help="Print the script that would run; change nothing."
)
YES = click.Option(["--yes"], is_flag=True, help="Skip the confirmation.")
OFFLINE = click.Option(
    ["--offline"],
    is_flag=True,
    help="With --dry-run: contact no node; assume empty nodes.",
)
LOCK_WAIT = click.Option(
    ["--lock-wait"],
    type=Duration(),
    default="0s",
    help="Wait up to DURATION for the cluster lock, or `lock_wait:` of the inventory if longer.",
)
NO_HOOKS = click.Option(
    ["--no-hooks"], is_flag=True, help="Skip the programs in `hooks/` beside the inventory."
)
FETCH = click.Option(
    ["--fetch"],
    is_flag=True,
    help=("Copy the model to nodes where it is missing; download it if no node has it."),
)
PAIR_TIMEOUT = click.Option(
    ["--pair-timeout"],
    type=Duration("1s"),
    default="20s",
    show_default=True,
    help="Time limit for the network check of one pair of nodes.",
)
NODES = click.option(
    "-n",
    "--node",
    "nodes",
    multiple=True,
    metavar="NAME",
    help="Use only this node; repeatable (default: all).",
)
SERVER = click.option("--server", metavar="NAME", help="Server to use; needed when several run.")
SERVER_OR_NAME = click.option("--server", metavar="NAME", help="The server, instead of NAME.")
JOIN_TIMEOUT = click.option(
    "--join-timeout",
    type=Duration(),
    default="3m",
    show_default=True,
    help="Time limit for all nodes to join.",
)
START_TIMEOUT = click.option(
    "--timeout",
    type=Duration("1s", "24h"),
    help="Time limit for the first answer (default: the inventory's).",
)
EXPECT = click.option(
    "--expect",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="YAML file with expected values of GPUs and NICs.",
)
NO_WAIT = click.option("--no-wait", "--detach", is_flag=True, help="Start it and return at once.")
DP_FLAGS = ("--dp", "--data-parallel-size", "dp")
STRICT = click.Option(["--strict"], is_flag=True, help="Exit with 3 if there are warnings.")


class Tail(click.IntRange):
    """A number of lines, or `all`."""

    name = "number, or `all`"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse it; `all` is a number that no log reaches."""
        return 10**9 if value == "all" else super().convert(value, param, ctx)


def merge_names(server: str | None, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names given as arguments and with `--server`; raise UsageError if they differ."""
    if server and set(names) - {server}:
        raise click.UsageError(f"--server {server} and {' '.join(names)} differ: choose one")
    return (server,) if server else tuple(names)


def inventory_option(
    section: type, name: str, *flags: str, default: str = "", **attributes: Any
) -> Callable[[F], F]:
    """Return the option for a key of the inventory, with the key's type, bounds and description;
    `default` is the text for its default. `attributes` override these.
    """
    annotation = get_type_hints(section, include_extras=True)[name]
    text = field_descriptions(section)[name]
    if default:
        text = f"{text.rstrip('.')} (default: {default})."
    kind = _click_type(annotation)
    return click.option(*(flags or [f"--{name}"]), **{"type": kind, "help": text, **attributes})


def _click_type(annotation: Any) -> Any:
    """Return click's type of a field: a choice, or a number within its bounds; else text."""
    if get_origin(annotation) is Literal:
        return click.Choice(get_args(annotation))
    inner = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) is not Annotated:
        return _click_type(inner[0]) if inner else click.STRING
    for bounds in inner[1:]:
        if isinstance(bounds, Bounds):
            number_type: Any = click.IntRange if inner[0] is int else click.FloatRange
            return number_type(bounds.ge, bounds.le)
    return click.STRING


def exit_code(*, failed: bool, warned: bool, strict: bool) -> int:
    """Return the exit code of a check: 1 for a failure, 3 for a warning with `--strict`."""
    if failed:
        return 1
    return 3 if strict and warned else 0
