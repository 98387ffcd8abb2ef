"""`vlaunch serve --recipe` and `--command`: their flags, and the server that they describe."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from launcher.app.command import Call
from launcher.core.domain import Inventory
from launcher.recipes import vllm_command
from launcher.recipes.vllm_command import VllmCommand
from launcher.serving.start import StartSpec
from launcher.tools import observe, placement, vllm
from launcher.tools.placement import Placement

F = TypeVar("F", bound=Callable[..., Any])

_SIZES = ("--tensor", "-tp", "--pipeline", "-pp", "--data-parallel", "-dp")


def complete(ctx: click.Context, parameter: click.Parameter, text: str) -> list[CompletionItem]:
    """Return the packaged recipes whose names begin with `text`, for the shell."""
    from launcher.recipes import library

    names = library.load().recipes
    return [CompletionItem(name) for name in names if name.lower().startswith(text.lower())]


_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--recipe",
        metavar="NAME",
        shell_complete=complete,
        help="Serve a recipe: ORG/MODEL from `vlaunch recipes list`, or a file.",
    ),
    click.option("--variant", metavar="NAME", help="Checkpoint of the recipe, such as fp8."),
    click.option("--hardware", metavar="NAME", help="Hardware of the recipe, such as h100."),
    click.option(
        "--feature",
        "features",
        metavar="NAME[=MODE]",
        multiple=True,
        help="Turn a feature of the recipe on, or off with NAME=off; repeatable.",
    ),
    click.option(
        "--command",
        "pasted",
        metavar="'vllm serve …'",
        help="Serve what this command line starts (-: read it from standard input).",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of a recipe or a pasted command."""

    recipe: str | None = None
    variant: str | None = None
    hardware: str | None = None
    features: tuple[str, ...] = ()
    pasted: str | None = None


def flags(function: F) -> F:
    """Add the flags; the function gets what they say as `describe`, which completes a server."""

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        found = Flags(**{name: given.pop(name) for name in Flags.__dataclass_fields__})
        if found.recipe is None and replace(found, pasted=None) != Flags():
            raise click.UsageError("--variant, --hardware and --feature go with --recipe")
        if found.recipe is not None and found.pasted is not None:
            raise click.UsageError("--recipe and --command exclude each other")
        describe = None if found == Flags() else functools.partial(applied, found)
        return function(*args, describe=describe, **given)

    for option in reversed(_OPTIONS):
        called = option(called)
    return cast("F", called)


def applied(flags: Flags, call: Call, spec: StartSpec) -> StartSpec:
    """Return the server of a recipe or a pasted command, with notes on what vlaunch sets itself.

    Raises RequestError with every problem.
    """
    from launcher.recipes.adapt import adapt

    here = placement.narrow(call.inventory, spec.nodes, spec.gpus)
    if flags.pasted is None:
        command = _of_recipe(call, flags, here)
    else:
        command = vllm_command.parse_pasted(
            sys.stdin.read() if flags.pasted == "-" else flags.pasted
        )
    replicas = spec.dp or here.serve.dp
    found = adapt(command, here, args=spec.args, replicas=replicas, backend=spec.backend)
    model = spec.model or command.model
    spec = replace(spec, model=model, args=found.args, env=found.env)
    split = spec.request(call.inventory, None).placement
    return replace(spec, notes=(*found.notes, *_dropped(found.dropped, spec, split)))


def _dropped(
    options: Sequence[tuple[str, str]], spec: StartSpec, split: Placement
) -> Iterator[str]:
    """Describe dropped options, with the values that are used instead."""
    used = {
        "--model": spec.model,
        "--host": spec.host,
        "--port": str(spec.port),
        "--distributed-executor-backend": spec.backend,
    }
    sizes = "the sizes of the plan" if spec.planned else split.words
    for text, key in options:
        value = sizes if key.startswith(_SIZES) else used.get(key)
        now = f" (vlaunch sets {value})" if value else ""
        yield f"dropped `{text}`{now}; use {vllm.RESERVED[key]}"


def _of_recipe(call: Call, flags: Flags, here: Inventory) -> VllmCommand:
    """Return the command of a recipe, for the GPUs that the nodes report or `--hardware`."""
    from launcher.recipes import library
    from launcher.recipes.merge import merge

    packaged, name = library.load(), flags.recipe or ""
    recipe = packaged.recipe(name)
    known = packaged.hardware_of(here.accelerator)
    nodes = library.Hardware(accelerator=here.accelerator)
    if flags.hardware:
        nodes = library.hardware_named(flags.hardware, known)
    elif not call.offline:
        with call.session() as session:
            facts = observe.observe(session.inventory, session.transport, [])
        gpus = [gpu for node in here.nodes for gpu in facts[node.name].used(node)]
        nodes = (
            library.hardware_of_gpus(gpus, min(node.gpus for node in here.nodes), known) or nodes
        )
    return merge(
        name,
        recipe,
        nodes,
        here.gpus,
        variant=flags.variant,
        features={key: mode for key, _, mode in (each.partition("=") for each in flags.features)},
    )
