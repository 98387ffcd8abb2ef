"""Recipes as people read them: a name in front of each row, what is said of it behind."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.recipes.library import Entry
from launcher.recipes.serving import Serving
from launcher.tools import untrusted

_LEAD = 12


def listed(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a row for each recipe."""
    width = max((len(each.name) for each in entries), default=0)
    for each in entries:
        if each.wrong:
            yield _plain(f"{each.name:<{width}}  cannot be read: {each.wrong.splitlines()[0]}")
            continue
        variants = ", ".join(
            f"{name} {gb:g} GB" if gb else name for name, (_, _, gb) in each.variants.items()
        )
        verified = [name for name, word in each.hardware.items() if word == "verified"]
        parts = [variants, f"vLLM {each.version}" if each.version else ""]
        parts += ["vLLM-Omni, not started here" if "omni" in each.tasks else ""]
        parts += [f"verified on {', '.join(verified)}" if verified else ""]
        yield _plain(f"{each.name:<{width}}  {'; '.join(filter(None, parts))}")


def shown(said: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rows of one recipe."""
    yield _row("recipe", f"{said['recipe']}, from {said['source']}")
    kind = [said["title"], said["architecture"], *_parameters(said)]
    kind += [f"context {said['context']:,}" if said["context"] else "", *said["tasks"]]
    yield _row("model", ", ".join(filter(None, [said["model"], *kind])))
    for at, (name, each) in enumerate(said["variants"].items()):
        yield _row("" if at else "variants", _variant(name, each))
    strategies = [
        f"{each} (its default)" if each == said["default_strategy"] else each
        for each in said["strategies"]
    ]
    yield _row("strategies", ", ".join(strategies) or "none are named")
    features = [_feature(name, each) for name, each in said["features"].items()]
    yield _row("features", ", ".join(features) or "none")
    hardware = [f"{name} {word}" for name, word in said["hardware"].items()]
    yield _row("hardware", ", ".join(hardware) or "none is confirmed")
    nightly = ", a nightly build when it was written" if said["nightly_required"] else ""
    yield _row("vLLM", f"{said['min_vllm_version'] or 'not said'} or newer{nightly}")
    images = [f"{image} ({brand})" for brand, image in said["images"].items()]
    yield _row("image", ", ".join(images) or "none of its own")
    for at, each in enumerate(said["dependencies"]):
        text = " ".join(each["command"].split())
        yield _row("" if at else "installs", text + (" (optional)" if each["optional"] else ""))
    for at, (name, why) in enumerate(said["not_used"].items()):
        yield _row("" if at else "not used", f"`{name}`: {why}")
    for at, name in enumerate(said["unknown"]):
        yield _row("" if at else "not known", f"`{name}`")


def served(serving: Serving, run: str) -> Iterator[str]:
    """Yield what vlaunch would start, and why it is that."""
    env = " ".join(f"{name}={shlex.quote(text)}" for name, text in sorted(serving.env.items()))
    yield _row("would serve", serving.model)
    yield _row("arguments", shlex.join(serving.args) or "none")
    yield _row("variables", env or "none")
    for at, note in enumerate(serving.notes):
        yield _row("" if at else "because", note)
    yield _row("run", run)


def _variant(name: str, each: Mapping[str, Any]) -> str:
    parts = [f"{name}: {each['model']}", each["precision"]]
    parts += [f"{each['vram_minimum_gb']:g} GB" if each["vram_minimum_gb"] else ""]
    parts += [f"vLLM {each['min_vllm_version']}" if each["min_vllm_version"] else ""]
    parts += [f"for {', '.join(each['hardware'])}" if each["hardware"] else ""]
    return ", ".join(filter(None, parts))


def _feature(name: str, each: Mapping[str, Any]) -> str:
    modes = f" ({', '.join(each['modes'])})" if each["modes"] else ""
    return name + modes + ("" if each["on"] else " off")


def _parameters(said: Mapping[str, Any]) -> Iterator[str]:
    whole, active = said["parameters"], said["active_parameters"]
    if whole:
        yield f"{whole} parameters" + (f", {active} active" if active not in (None, whole) else "")


def _row(name: str, text: str) -> str:
    return _plain(f"{name:<{_LEAD - 1}}  {text}" if name else " " * (_LEAD + 1) + text)


def _plain(text: str) -> str:
    return untrusted.plain(text)
