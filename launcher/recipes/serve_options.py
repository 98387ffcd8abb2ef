"""Options of `vlaunch serve --recipe` and `--command`, and the server that they describe."""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from launcher.app.command import CommandContext
from launcher.core.domain import Inventory
from launcher.recipes import vllm_command
from launcher.recipes.vllm_command import VllmCommand
from launcher.serving.start_spec import StartSpec
from launcher.tools import vllm
from launcher.tools.host import node_probes
from launcher.tools.site import placement
from launcher.tools.site.placement import Placement

F = TypeVar("F", bound=Callable[..., Any])

_SIZES = ("--tensor", "-tp", "--pipeline", "-pp", "--data-parallel", "-dp")


def complete_recipes(
    ctx: click.Context, parameter: click.Parameter, text: str
) -> list[CompletionItem]:
    """Return the packaged recipes whose names begin with `text`, for the shell."""
    from launcher.recipes import library

    names = library.load_library().recipes
    return [CompletionItem(name) for name in names if name.lower().startswith(text.lower())]


_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--recipe",
        metavar="NAME",
        shell_complete=complete_recipes,
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
        help="Serve the model of this command line (`-`: read it from standard input).",
    ),
]


@dataclass(frozen=True, kw_only=True)
class RecipeFlags:
    """Options of a recipe or a pasted command."""

    recipe: str | None = None
    variant: str | None = None
    hardware: str | None = None
    features: tuple[str, ...] = ()
    pasted: str | None = None


def flags(function: F) -> F:
    """Add the options; the function receives `describe`, which applies them to a server's spec."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        values = RecipeFlags(
            **{name: kwargs.pop(name) for name in RecipeFlags.__dataclass_fields__}
        )
        if values.recipe is None and replace(values, pasted=None) != RecipeFlags():
            raise click.UsageError("--variant, --hardware and --feature go with --recipe")
        if values.recipe is not None and values.pasted is not None:
            raise click.UsageError("--recipe and --command exclude each other")
        describe = None if values == RecipeFlags() else functools.partial(apply_flags, values)
        return function(*args, describe=describe, **kwargs)

    for option in reversed(_OPTIONS):
        called = option(called)
    return cast("F", called)


def apply_flags(flags: RecipeFlags, call: CommandContext, spec: StartSpec) -> StartSpec:
    """Apply a recipe or a pasted command to a spec, with notes on dropped options.

    Raises RequestError with all problems.
    """
    from launcher.recipes.adapt import adapt_command

    inventory = placement.narrow_inventory(call.inventory, spec.nodes, spec.gpus)
    if flags.pasted is None:
        command = _recipe_command(call, flags, inventory)
    else:
        command = vllm_command.parse_pasted(
            sys.stdin.read() if flags.pasted == "-" else flags.pasted
        )
    replicas = spec.dp or inventory.serve.dp
    adapted = adapt_command(
        command, inventory, args=spec.args, replicas=replicas, backend=spec.backend
    )
    model = spec.model or command.model
    spec = replace(spec, model=model, args=adapted.args, env=adapted.env)
    layout = spec.build_request(call.inventory, None).placement
    return replace(spec, notes=(*adapted.notes, *_describe_dropped(adapted.dropped, spec, layout)))


def _describe_dropped(
    options: Sequence[tuple[str, str]], spec: StartSpec, layout: Placement
) -> Iterator[str]:
    """Describe dropped options, with the values that vlaunch sets instead."""
    values = {
        "--model": spec.model,
        "--host": spec.host,
        "--port": str(spec.port),
        "--distributed-executor-backend": spec.backend,
    }
    sizes = "the sizes of the plan" if spec.planned else layout.label
    for text, key in options:
        value = sizes if key.startswith(_SIZES) else values.get(key)
        replacement = f" (vlaunch sets {value})" if value else ""
        yield f"dropped `{text}`{replacement}; use {vllm.RESERVED[key]}"


def _recipe_command(call: CommandContext, flags: RecipeFlags, inventory: Inventory) -> VllmCommand:
    """Return the command of a recipe, for the GPUs that the nodes report or `--hardware`."""
    from launcher.recipes import library
    from launcher.recipes.merge import merge_recipe

    packaged, name = library.load_library(), flags.recipe or ""
    recipe = packaged.load_recipe(name)
    candidates = packaged.hardware_by_name(inventory.accelerator)
    hardware = library.Hardware(accelerator=inventory.accelerator)
    if flags.hardware:
        hardware = library.find_hardware(flags.hardware, candidates)
    elif not call.offline:
        with call.session() as session:
            facts = node_probes.probe_nodes(session.inventory, session.transport, [])
        gpus = [gpu for node in inventory.nodes for gpu in facts[node.name].used_gpus(node)]
        count = min(node.gpus for node in inventory.nodes)
        hardware = library.match_hardware(gpus, count, candidates) or hardware
    return merge_recipe(
        name,
        recipe,
        hardware,
        inventory.gpus,
        variant=flags.variant,
        features={key: mode for key, _, mode in (text.partition("=") for text in flags.features)},
    )
