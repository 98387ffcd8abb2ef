"""Parsing of the host arguments of `vlaunch init`, validated by the inventory rules."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from launcher.core.domain import Argv, Inventory, Ssh
from launcher.core.errors import InventoryError, RequestError
from launcher.hosts.discovery.shape import InitOptions
from launcher.inventory import ranges
from launcher.inventory.load import loads

_HOST = re.compile(
    r"(?:([^@]+)@)?(\[[0-9A-Fa-f:]*:[0-9A-Fa-f:]*\]|[^:@]+"
    r"|[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f]*)(?::(\d{1,5}))?"
)


def parse_hosts(arguments: Sequence[str], options: InitOptions, docker: Argv) -> Inventory:
    """Return an inventory to connect with; its addresses are placeholders.

    `arguments` may be ranges (`gpu[01-16]`) or lists (`gpu01,gpu02`), and have the form
    `user@host:port`. Raises RequestError with all mistakes.
    """
    # `gpu01,gpu02`, but not the commas of a range such as `gpu[01-03,07]`
    names = [name for argument in arguments for name in re.split(r",(?![^\[]*\])", argument)]
    hosts = [login for name in names for login in _expand_argument(name)]
    if len(hosts) > ranges.MAX_NODES:
        raise RequestError(f"{len(hosts)} hosts exceed the limit of {ranges.MAX_NODES} per cluster")
    counts = Counter(host for host, _ in hosts)
    document = {
        "cluster": options.cluster,
        "image": options.image or "vllm/vllm-openai",
        "hf_home": options.hf_home,
        "ssh": _ssh_keys(options.ssh),
        "docker": list(docker),
        "nodes": [
            {
                "host": host,
                "name": _node_name(host, ssh, alone=counts[host] == 1),
                # Benchmarking addresses (RFC 2544), which are never real hosts.
                "ip": f"198.18.{index // 250}.{index % 250 + 1}",
                "gpus": 1,
                "ssh": _ssh_keys(ssh),
            }
            for index, (host, ssh) in enumerate(hosts)
        ],
    }
    try:
        return loads(json.dumps(document), Path("inventory.yaml"))
    except InventoryError as error:
        lines = [line.split(": ", 1)[1] for line in error.mistakes]
        raise RequestError(
            "these hosts or options are invalid",
            evidence=lines,
            hint="see `vlaunch init --help`",
        ) from None


def _node_name(host: str, ssh: Ssh, *, alone: bool) -> str:
    """Return a node's name; a host of several nodes, or an IPv6 address, needs a suffix."""
    if alone and ":" not in host:
        return host
    return f"{host.replace(':', '-')}-{ssh.port or 22}"


def _ssh_keys(ssh: Ssh) -> dict[str, str | int]:
    return {key: value for key, value in asdict(ssh).items() if value is not None}


def ssh_overrides(host_ssh: Ssh, common: Ssh) -> Ssh:
    """Return the SSH settings of a host that differ from the common ones."""
    defaults = asdict(common)
    return Ssh(**{key: value for key, value in asdict(host_ssh).items() if value != defaults[key]})


def _expand_argument(argument: str) -> list[tuple[str, Ssh]]:
    hint = "write NAME, user@NAME:PORT, or a range such as gpu[01-16]"
    match = _HOST.fullmatch(argument)
    if match is None:
        raise RequestError(f"`{argument}` is not a host", hint=hint)
    user, host, port = match[1], match[2], int(match[3]) if match[3] else None
    if host.startswith("[") and ":" in host:
        host = host[1:-1]
    try:
        return [(name, Ssh(user=user, port=port)) for name in ranges.expand_range(host)]
    except ValueError as error:
        raise RequestError(f"`{argument}` {error}", hint=hint) from None
