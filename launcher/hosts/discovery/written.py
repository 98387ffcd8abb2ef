"""An inventory file from what was found: YAML with the reason of every choice beside it, alike
nodes folded into ranges.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TypeVar

from launcher.core import untrusted
from launcher.core.domain import Ssh, fold
from launcher.hosts.discovery.shape import DOCKER, GID, Choice, DiscoveredNode, Discovery
from launcher.inventory import ranges

T = TypeVar("T")

_WIDTH = 110
# What YAML reads as text without quotes, also inside of [] and {}; a number or a word such as
# `true` is not among it.
_PLAIN = re.compile(
    r"(?!(?:true|false|null|yes|no|on|off|y|n)$)"
    r"(?:[A-Za-z/][A-Za-z0-9_./@+-]*(?::[A-Za-z0-9_./@+-]+)*|--?[a-z][a-z0-9.=-]*)",
    re.IGNORECASE,
)


def write(discovery: Discovery) -> str:
    """Return the file's text; `launcher.inventory.load` reads it without a mistake."""
    paragraphs = ("".join(f"{line}\n" for line in lines) for lines in _paragraphs(discovery))
    return "\n".join(filter(None, paragraphs)).replace(" \n", "\n")


def _paragraphs(discovery: Discovery) -> tuple[Iterable[str], ...]:
    """Return the lines of each paragraph; one about something that is as usual has none."""
    docker = _usual([node.docker for node in discovery.nodes])
    interface = _usual([node.interface for node in discovery.nodes])
    hca = _usual([node.hca for node in discovery.nodes])
    slots = "   # `gpus` below are slots" if discovery.accelerator == "cpu" else ""
    store = discovery.object_store
    return (
        _head(discovery),
        [f"cluster: {scalar(discovery.cluster)}"],
        [
            *_choice("image", discovery.image),
            *_entry("accelerator", f"{discovery.accelerator}{slots}", discovery.gpus),
        ],
        _choice("hf_home", discovery.hf_home),
        _choice("state_dir", discovery.state_dir) if discovery.state_dir else (),
        _entry("docker", _list(docker), discovery.docker)
        if discovery.docker or docker != DOCKER
        else (),
        [f"ssh: {_ssh(discovery.ssh)}"] if discovery.ssh != Ssh() else (),
        _entry("ray", f"{{object_store: {store.value}}}", store.why) if store else (),
        [
            line
            for key, choice in discovery.rights.items()
            for line in _entry(key, f"[{choice.value}]", choice.why)
        ],
        _network(discovery, interface, hca),
        _environment(discovery),
        _engine_args(discovery),
        ["# The first is the head.", "nodes:", *_groups(discovery, interface, hca, docker)],
    )


def _head(discovery: Discovery) -> Iterator[str]:
    yield (
        "# Written by `vlaunch init`: what was found, what was chosen, and why. `vlaunch check`"
        " judges the hosts;"
    )
    yield "# inventory/example.yaml explains every key."
    yield "#"
    yield from _said(discovery.summary)
    if discovery.warnings:
        yield "#"
        yield from _said(f"! {warning}" for warning in discovery.warnings)


def _network(discovery: Discovery, interface: str, hca: tuple[str, ...]) -> Iterator[str]:
    yield "network:"
    yield from _entry("fabric", discovery.fabric, discovery.network, "  ")
    yield f"  interface: {scalar(interface)}"
    if hca:
        yield f"  hca: {_list(hca)}"
    yield "  require: auto     # what this hardware can do; `vlaunch check-nccl` proves it"


def _environment(discovery: Discovery) -> Iterator[str]:
    yield from _said(discovery.gid_why)
    if discovery.env:
        yield "env:"
    for name, choice in discovery.env.items():
        yield from _entry(name, f'"{choice.value}"', choice.why, "  ")


def _engine_args(discovery: Discovery) -> Iterator[str]:
    if discovery.engine_args:
        yield "engine_args:"
        yield from _said(discovery.engine_why, "  ")
    for name, value in discovery.engine_args.items():
        yield f"  {name}: {json.dumps(value) if isinstance(value, dict) else value}"


def scalar(text: str) -> str:
    """Write text so that YAML reads it as this very text; a JSON string is a YAML string."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _said(lines: Iterable[str], indent: str = "") -> Iterator[str]:
    """Write comments; words of hosts are among them, so that nothing may end the line or the
    comment.
    """
    for line in lines:
        text = untrusted.plain(" ".join(line.split()))
        yield from textwrap.wrap(
            "".join(character for character in text if character.isprintable()),
            _WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}#   ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def _entry(key: str, value: str, why: Iterable[str], indent: str = "") -> Iterator[str]:
    yield from _said(why, indent)
    yield f"{indent}{key}: {value}"


def _choice(key: str, choice: Choice) -> Iterator[str]:
    return _entry(key, scalar(choice.value), choice.why)


def _list(items: Sequence[str]) -> str:
    return f"[{', '.join(map(scalar, items))}]"


def _ssh(ssh: Ssh) -> str:
    pairs = [
        f"{key}: {value if isinstance(value, int) else scalar(value)}"
        for key, value in asdict(ssh).items()
        if value is not None
    ]
    return f"{{{', '.join(pairs)}}}"


def _usual(values: Sequence[T]) -> T:
    return Counter(values).most_common(1)[0][0]


def _groups(
    discovery: Discovery, interface: str, hca: tuple[str, ...], docker: Sequence[str]
) -> Iterator[str]:
    """Yield the items of `nodes`: alike ones that count in step become one with ranges."""

    def settings_of(node: DiscoveredNode) -> tuple[str, ...]:
        chosen = f"[{', '.join(node.gpu_ids)}]"
        settings = [f"gpus: {chosen if node.gpu_ids else node.gpus}"]
        settings += [f"docker: {_list(node.docker)}"] if node.docker != docker else []
        settings += [f"ssh: {_ssh(node.ssh)}"] if node.ssh != Ssh() else []
        differs = [f"interface: {scalar(node.interface)}"] if node.interface != interface else []
        differs += [f"hca: {_list(node.hca)}"] if node.hca != hca else []
        settings += [f"network: {{{', '.join(differs)}}}"] if differs else []
        env = [f'env: {{{GID}: "{node.gid}"}}']
        settings += env if node.gid is not None and GID not in discovery.env else []
        return tuple(settings)

    for settings, members in groupby(discovery.nodes, settings_of):
        nodes = list(members)
        for group in (nodes,) if _in_step(nodes) else ([node] for node in nodes):
            yield from _item(group, settings)


def _in_step(nodes: Sequence[DiscoveredNode]) -> bool:
    return all(_range(column) is not None for column in _columns(nodes))


def _range(values: Sequence[str]) -> str | None:
    """Write the words as one range that stands for exactly them, in this order; None when there is
    none.
    """
    if len(values) == 1:
        return values[0]
    prefixes = {value.rpartition(".")[0] for value in values}
    # addresses: only the last number may count
    if all(re.fullmatch(r"[0-9.]+", value) for value in values):
        if len(prefixes) > 1:
            return None
        last = fold(["n" + value.rpartition(".")[2] for value in values])
        text = f"{prefixes.pop()}.{last[1:]}"
    else:
        text = fold(list(values))
    try:
        return text if ranges.expand(text) == tuple(values) else None
    except ValueError:
        return None


def _item(nodes: Sequence[DiscoveredNode], settings: Sequence[str]) -> list[str]:
    hosts, names, ips = _columns(nodes)
    keys = [f"host: {scalar(_range(hosts) or '')}"]
    if names != hosts:
        keys.append(f"name: {scalar(_range(names) or '')}")
    keys += [f"ip: {scalar(_range(ips) or '')}", *settings]
    line = f"  - {{{', '.join(keys)}}}"
    if len(line) <= _WIDTH + 10:
        return [line]
    return [f"  {'- ' if index == 0 else '  '}{key}" for index, key in enumerate(keys)]


def _columns(nodes: Sequence[DiscoveredNode]) -> tuple[list[str], list[str], list[str]]:
    """Return what counts in step: hosts, names and addresses."""
    hosts = [node.host for node in nodes]
    names = [node.name for node in nodes]
    return hosts, names, [node.ip for node in nodes]
