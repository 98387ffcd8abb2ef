"""Recipes of sparkrun and of spark-vllm-docker, in the words that any recipe could use.

The format is that of `RECIPES.md` in github.com/spark-arena/sparkrun; its first version is that of
`recipes/README.md` in github.com/eugr/spark-vllm-docker. Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from launcher.inventory.document import Document
from launcher.inventory.mistakes import Mistake
from launcher.inventory.schema import Section
from launcher.model import Backend, Inventory
from launcher.recipes import read
from launcher.recipes.read import Said
from launcher.recipes.schema import Count, Env
from launcher.recipes.serving import Content, Wrong
from launcher.recipes.split import Sizes
from launcher.recipes.words import Option, last, options
from launcher.tools import vllm
from launcher.values import Model, NonEmpty, Read

_KEY = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_RUNTIMES: Mapping[str, Backend | None] = {
    "": None,
    "vllm": None,
    "vllm-ray": "ray",
    "eugr-vllm": "ray",
    "vllm-distributed": "mp",
}
# What they say, for which vlaunch has another place, or none.
_ELSEWHERE = {
    "containers": "every node runs the inventory's `image`",
    "build_args": "nothing is built here: `image:` in the inventory names an image that is ready",
    "mods": "nothing is patched here: `image:` in the inventory names an image that is ready",
    "builder": "nothing is built here: `image:` in the inventory names an image that is ready",
    "builder_config": "nothing is built here: `image:` in the inventory names one that is ready",
    "pre_exec": "no commands are run in the containers before: put them into the image",
    "post_exec": "no counterpart; `hooks/post-serve` runs on this machine",
    "post_commands": "`hooks/post-serve` beside the inventory",
    "stop_after_post": "no counterpart: `vlaunch stop` ends a server",
    "executor": "the inventory's `docker:`",
    "executor_config": "`shm`, `devices`, `cap_add`, `ulimits`, `privileged` in the inventory",
    "runtime_cache": "`cache_dir:` in the inventory",
    "runtime_config": "no counterpart",
    "distribution_config": "no counterpart: models lie in `hf_home` of each node",
    "cluster_config": "the inventory",
    "volumes": "`mounts:` in the inventory",
    "patches": "nothing is patched here: `image:` in the inventory names an image that is ready",
    "benchmark": "no counterpart",
}
_CACHE = "/cache/huggingface/"  # where sparkrun mounts the nodes' Hugging Face home
_SPLIT = ("tensor_parallel", "pipeline_parallel", "data_parallel")
_NAMES = {
    "tensor_parallel": "--tensor-parallel-size",
    "pipeline_parallel": "--pipeline-parallel-size",
    "data_parallel": "--data-parallel-size",
}


def _text(value: object) -> object:
    return str(value) if isinstance(value, (int, float)) else value


class SparkRecipe(Section):
    """A recipe of sparkrun."""

    model: Model | None = None
    model_revision: NonEmpty | None = None
    runtime: str = ""
    runtime_version: Any = None
    container: NonEmpty | None = None
    command: str | None = None
    defaults: dict[str, Any] = Field(default_factory=dict)
    env: Env = Field(default_factory=dict)
    mode: str | None = None
    min_nodes: Count | None = None
    max_nodes: Count | None = None
    solo_only: bool = False
    cluster_only: bool = False
    recipe_version: Annotated[str, Read(_text, str | int | float)] = "2"
    name: str | None = None
    description: str | None = None
    metadata: Any = None
    containers: Any = None
    build_args: Any = None
    mods: Any = None
    builder: Any = None
    builder_config: Any = None
    pre_exec: Any = None
    post_exec: Any = None
    post_commands: Any = None
    stop_after_post: Any = None
    executor: Any = None
    executor_config: Any = None
    runtime_cache: Any = None
    runtime_config: Any = None
    distribution_config: Any = None
    cluster_config: Any = None
    benchmark: Any = None
    volumes: Any = None
    patches: Any = None
    maintainer: Any = None


def is_one(written: Document) -> bool:
    """True when a file is a recipe of sparkrun, and not one of the vLLM project."""
    said = written.data or {}
    own = {"command", "container", "defaults", "runtime", "recipe_version"} & said.keys()
    return bool(own) and not isinstance(said.get("model"), dict)


def recipe(written: Document, name: str) -> Said[SparkRecipe]:
    """Read a recipe; raises RecipeError with every mistake in it."""
    said = read.checked(written, name, SparkRecipe)
    mistakes = list(_broken(said.value))
    if mistakes:
        raise read.refused(name, written, mistakes)
    return said


def content(said: Said[SparkRecipe], name: str, inventory: Inventory) -> Content:
    """Return what is served on the nodes of `inventory`."""
    value = said.value
    model, found = _command(value)
    args = tuple((option, part) for option, part in found)
    split = _split(value, [option for option, _ in found], len(inventory.nodes))
    flags = (("--tp", split.tp), ("--pp", split.pp), ("--dp", split.dp))
    takes = " ".join(f"{flag} {size}" for flag, size in flags if size > 1 or flag == "--tp")
    return Content(
        name=name,
        model=model,
        args=args,
        env=value.env,
        split=split,
        split_name="tensor_parallel",
        takes=f"`{takes}`",
        image=value.container or "",
        wrong=tuple(_impossible(value, inventory)),
        why=(f"recipe {name}, of sparkrun's form",),
        notes=tuple(_notes(said)),
    )


def backend(value: SparkRecipe) -> Backend | None:
    """Return how the recipe would start its ranks; None where it leaves that open."""
    own = _RUNTIMES.get(value.runtime)
    ray = "distributed-executor-backend ray" in (value.command or "")
    return own or ("ray" if ray or value.recipe_version == "1" else None)


def _broken(value: SparkRecipe) -> Iterator[Mistake]:
    if value.runtime not in _RUNTIMES:
        known = ", ".join(filter(None, _RUNTIMES))
        text = f"is not vLLM's, which alone is started here ({known}): {value.runtime}"
        yield Mistake(where=("runtime",), text=text)
        return
    if value.command is None:
        if value.model is None:
            yield Mistake(where=(), text="has neither `model` nor `command`")
        return
    rendered = _rendered(value)
    missing = sorted(set(_KEY.findall(rendered)))
    if missing:
        text = f"has no value for {', '.join(f'{{{each}}}' for each in missing)} in `defaults`"
        yield Mistake(where=("command",), text=text)
    try:
        words = _line(rendered)
    except ValueError as error:
        yield Mistake(where=("command",), text=f"is no command line: {error}")
        return
    if words[:2] != ["vllm", "serve"] or len(words) < 3:
        yield Mistake(where=("command",), text="should be `vllm serve MODEL …`, and nothing else")
    elif any(set(word) <= set("|&;<>()`") or "$(" in word for word in words):
        yield Mistake(where=("command",), text="should be one command, without a shell's words")


def _rendered(value: SparkRecipe) -> str:
    """Fill in a command: `{key}` where nothing else stands between braces, again and again."""
    text = value.command or ""
    doubled = "{{" in text
    if doubled:
        text = text.replace("{{", "\x01").replace("}}", "\x02")
    known = {**value.defaults, "model": value.model or ""}
    for _ in range(5):
        text = _KEY.sub(lambda key: _shown(known.get(key[1]), key[0]), text)
    return text.replace("\x01", "{").replace("\x02", "}") if doubled else text


def _line(text: str) -> list[str]:
    words = shlex.split(re.sub(r"\\[ \t]*\n", " ", text), comments=True)
    return words[1:] if words[:1] == ["exec"] else words


def _shown(value: Any, otherwise: str) -> str:
    if value is None or value == "":
        return otherwise
    return str(value).lower() if isinstance(value, bool) else str(value)


def _command(value: SparkRecipe) -> tuple[str, list[tuple[Option, str]]]:
    """Return the model, and vLLM's arguments with where each is from."""
    if value.command is not None:
        words = _line(_rendered(value))
        found = [(each, "command") for each in options(words[3:])]
        model = value.model if _in_their_cache(value) and value.model else words[2]
    else:
        model = value.model or ""
        found = [(each, "defaults") for each in options(_words(value.defaults))]
    revision = value.model_revision
    more = options(["--revision", revision]) if revision else []
    found += [(each, "model_revision") for each in more]
    kept = {id(each) for each in last([option for option, _ in found])}
    return model, [each for each in found if id(each[0]) in kept]


def _in_their_cache(value: SparkRecipe) -> bool:
    """True where a command names a model by its place in sparkrun's containers."""
    return value.command is not None and _line(_rendered(value))[2].startswith(_CACHE)


def _words(defaults: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for key, value in defaults.items():
        name = _NAMES.get(key, f"--{key.replace('_', '-')}")
        if value is True:
            words.append(name)
        elif value is not False and value is not None:
            words += [name, str(value)]
    return words


def _split(value: SparkRecipe, found: list[Option], nodes: int) -> Sizes:
    """Return the sizes that a recipe names, in its command or in its defaults."""
    words = [word for option in found for word in option.words]
    spelled = (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"))
    sizes = []
    for names, key in zip((*spelled, ("--data-parallel-size", "-dp")), _SPLIT, strict=True):
        said = [*vllm.values(words, *names), str(value.defaults.get(key, ""))]
        sizes.append(next((int(each) for each in said if re.fullmatch("[1-9][0-9]{0,3}", each)), 1))
    tp, pp, dp = sizes
    return Sizes(tp=tp, pp=pp, dp=dp, nodes=min(nodes, tp * pp * dp))


def _impossible(value: SparkRecipe, inventory: Inventory) -> Iterator[Wrong]:
    nodes = len(inventory.nodes)
    least = max(value.min_nodes or 1, 2 if value.cluster_only or value.mode == "cluster" else 1)
    solo = value.solo_only or value.mode == "solo"
    most = min(value.max_nodes or nodes, 1 if solo else nodes)
    if nodes < least:
        yield f"it is for {least} nodes at least; there are {nodes}", "use a cluster with more"
    if nodes > most:
        names = inventory.head.name if most == 1 else "NODES"
        yield (
            f"it is for {most} node{'s' if most > 1 else ''} at most; there are {nodes}",
            f"leave the others out: `--backend mp --nodes {names}`",
        )


def _notes(said: Said[SparkRecipe]) -> Iterator[str]:
    value = said.value
    if _in_their_cache(value):
        taken = f"{value.model} is taken" if value.model else "`--model` names yours"
        yield f"the command's model lies below {_CACHE} of sparkrun's containers: {taken}"
    if own := backend(value):
        yield f"the recipe is for the backend {own}: `--backend {own}`"
    for key, where in _ELSEWHERE.items():
        if getattr(value, key) not in (None, [], {}):
            yield f"`{key}` is not used: {where}"
    for each in said.unknown:
        yield f"`{each}` is not known to vlaunch, and not used"
