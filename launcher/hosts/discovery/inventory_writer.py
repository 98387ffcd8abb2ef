"""Formatting of an inventory as YAML, with reasons for choices and ranges of equal nodes."""

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
# Plain YAML scalars that are text, also in [] and {}; not numbers or `true`.
_PLAIN = re.compile(
    r"(?!(?:true|false|null|yes|no|on|off|y|n)$)"
    r"(?:[A-Za-z/][A-Za-z0-9_./@+-]*(?::[A-Za-z0-9_./@+-]+)*|--?[a-z][a-z0-9.=-]*)",
    re.IGNORECASE,
)


def format_inventory(discovery: Discovery) -> str:
    """Return the file's text; `launcher.inventory.load` accepts it."""
    paragraphs = ("".join(f"{line}\n" for line in lines) for lines in _paragraphs(discovery))
    return "\n".join(filter(None, paragraphs)).replace(" \n", "\n")


def _paragraphs(discovery: Discovery) -> tuple[Iterable[str], ...]:
    docker = _most_common([node.docker for node in discovery.nodes])
    interface = _most_common([node.interface for node in discovery.nodes])
    hca = _most_common([node.hca for node in discovery.nodes])
    slots = "   # `gpus` below are slots" if discovery.accelerator == "cpu" else ""
    store = discovery.object_store
    return (
        _header_lines(discovery),
        [f"cluster: {format_scalar(discovery.cluster)}"],
        [
            *_choice_lines("image", discovery.image),
            *_entry_lines("accelerator", f"{discovery.accelerator}{slots}", discovery.gpus),
        ],
        _choice_lines("hf_home", discovery.hf_home),
        _choice_lines("state_dir", discovery.state_dir) if discovery.state_dir else (),
        _entry_lines("docker", _format_list(docker), discovery.docker)
        if discovery.docker or docker != DOCKER
        else (),
        [f"ssh: {_format_ssh(discovery.ssh)}"] if discovery.ssh != Ssh() else (),
        _entry_lines("ray", f"{{object_store: {store.value}}}", store.why) if store else (),
        [
            line
            for key, choice in discovery.rights.items()
            for line in _entry_lines(key, f"[{choice.value}]", choice.why)
        ],
        _network_lines(discovery, interface, hca),
        _env_lines(discovery),
        _engine_arg_lines(discovery),
        ["# The first is the head.", "nodes:", *_node_items(discovery, interface, hca, docker)],
    )


def _header_lines(discovery: Discovery) -> Iterator[str]:
    yield (
        "# Written by `vlaunch init` with its choices and the reasons. `vlaunch check` checks the"
        " hosts;"
    )
    yield "# `vlaunch schema` describes every key."
    yield "#"
    yield from _comment_lines(discovery.summary)
    if discovery.warnings:
        yield "#"
        yield from _comment_lines(f"! {warning}" for warning in discovery.warnings)


def _network_lines(discovery: Discovery, interface: str, hca: tuple[str, ...]) -> Iterator[str]:
    yield "network:"
    yield from _entry_lines("fabric", discovery.fabric, discovery.network, "  ")
    yield f"  interface: {format_scalar(interface)}"
    if hca:
        yield f"  hca: {_format_list(hca)}"
    yield "  require: auto     # what this hardware can do; `vlaunch check-nccl` verifies it"


def _env_lines(discovery: Discovery) -> Iterator[str]:
    yield from _comment_lines(discovery.gid_why)
    if discovery.env:
        yield "env:"
    for name, choice in discovery.env.items():
        yield from _entry_lines(name, f'"{choice.value}"', choice.why, "  ")


def _engine_arg_lines(discovery: Discovery) -> Iterator[str]:
    if discovery.engine_args:
        yield "engine_args:"
        yield from _comment_lines(discovery.engine_why, "  ")
    for name, value in discovery.engine_args.items():
        yield f"  {name}: {json.dumps(value) if isinstance(value, dict) else value}"


def format_scalar(text: str) -> str:
    """Format text as a YAML scalar; a JSON string is a YAML string."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _comment_lines(lines: Iterable[str], indent: str = "") -> Iterator[str]:
    """Yield comment lines; text from hosts must not end the line or the comment."""
    for line in lines:
        text = untrusted.sanitize(" ".join(line.split()))
        yield from textwrap.wrap(
            "".join(character for character in text if character.isprintable()),
            _WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}#   ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def _entry_lines(key: str, value: str, why: Iterable[str], indent: str = "") -> Iterator[str]:
    yield from _comment_lines(why, indent)
    yield f"{indent}{key}: {value}"


def _choice_lines(key: str, choice: Choice) -> Iterator[str]:
    return _entry_lines(key, format_scalar(choice.value), choice.why)


def _format_list(items: Sequence[str]) -> str:
    return f"[{', '.join(map(format_scalar, items))}]"


def _format_ssh(ssh: Ssh) -> str:
    pairs = [
        f"{key}: {value if isinstance(value, int) else format_scalar(value)}"
        for key, value in asdict(ssh).items()
        if value is not None
    ]
    return f"{{{', '.join(pairs)}}}"


def _most_common(values: Sequence[T]) -> T:
    return Counter(values).most_common(1)[0][0]


def _node_items(
    discovery: Discovery, interface: str, hca: tuple[str, ...], docker: Sequence[str]
) -> Iterator[str]:
    """Yield the items of `nodes`; consecutive equal nodes become one item with ranges."""

    def settings_of(node: DiscoveredNode) -> tuple[str, ...]:
        chosen = f"[{', '.join(node.gpu_ids)}]"
        settings = [f"gpus: {chosen if node.gpu_ids else node.gpus}"]
        settings += [f"docker: {_format_list(node.docker)}"] if node.docker != docker else []
        settings += [f"ssh: {_format_ssh(node.ssh)}"] if node.ssh != Ssh() else []
        differs = (
            [f"interface: {format_scalar(node.interface)}"] if node.interface != interface else []
        )
        differs += [f"hca: {_format_list(node.hca)}"] if node.hca != hca else []
        settings += [f"network: {{{', '.join(differs)}}}"] if differs else []
        env = [f'env: {{{GID}: "{node.gid}"}}']
        settings += env if node.gid is not None and GID not in discovery.env else []
        return tuple(settings)

    for settings, members in groupby(discovery.nodes, settings_of):
        nodes = list(members)
        for group in (nodes,) if _form_ranges(nodes) else ([node] for node in nodes):
            yield from _format_item(group, settings)


def _form_ranges(nodes: Sequence[DiscoveredNode]) -> bool:
    return all(_to_range(column) is not None for column in _node_columns(nodes))


def _to_range(values: Sequence[str]) -> str | None:
    """Return one range for exactly these values, in order; None if there is none."""
    if len(values) == 1:
        return values[0]
    prefixes = {value.rpartition(".")[0] for value in values}
    # addresses: only the last number may vary
    if all(re.fullmatch(r"[0-9.]+", value) for value in values):
        if len(prefixes) > 1:
            return None
        last = fold(["n" + value.rpartition(".")[2] for value in values])
        text = f"{prefixes.pop()}.{last[1:]}"
    else:
        text = fold(list(values))
    try:
        return text if ranges.expand_range(text) == tuple(values) else None
    except ValueError:
        return None


def _format_item(nodes: Sequence[DiscoveredNode], settings: Sequence[str]) -> list[str]:
    hosts, names, ips = _node_columns(nodes)
    keys = [f"host: {format_scalar(_to_range(hosts) or '')}"]
    if names != hosts:
        keys.append(f"name: {format_scalar(_to_range(names) or '')}")
    keys += [f"ip: {format_scalar(_to_range(ips) or '')}", *settings]
    line = f"  - {{{', '.join(keys)}}}"
    if len(line) <= _WIDTH + 10:
        return [line]
    return [f"  {'- ' if index == 0 else '  '}{key}" for index, key in enumerate(keys)]


def _node_columns(nodes: Sequence[DiscoveredNode]) -> tuple[list[str], list[str], list[str]]:
    hosts = [node.host for node in nodes]
    names = [node.name for node in nodes]
    return hosts, names, [node.ip for node in nodes]
