"""Rules between the nodes: each is one machine with one name and one address, and one of them is
the head.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator

from launcher.core.domain import Node
from launcher.inventory.draft import Draft
from launcher.inventory.mistakes import Mistake, Where, did_you_mean, name

_LONGEST_NAME = 64


def lengths(draft: Draft) -> Iterator[Mistake]:
    """The ranges of one entry go together, one name and one address per host."""
    for index, entry in enumerate(draft.file.nodes):
        for key, values, kind in (("name", entry.name, "name"), ("ip", entry.ip, "address")):
            if (
                values is None
                or len(values) == len(entry.host)
                or not draft.sound("nodes", index, "host")
            ):
                continue
            yield Mistake(
                where=("nodes", index, key),
                text=(
                    f"should have one {kind} per host: it has {len(values)}, and `host` stands for"
                    f" {len(entry.host)}"
                ),
            )


def gpus(draft: Draft) -> Iterator[Mistake]:
    """GPUs are chosen where there are some, by UUID only on one host, and AMD's by index alone:
    their devices are found by it. A privileged container sees all of a node's.
    """
    accelerator = draft.file.accelerator
    for index, entry in enumerate(draft.file.nodes):
        if isinstance(entry.gpus, int) or not draft.sound("nodes", index, "gpus"):
            continue
        uuids = [gpu for gpu in entry.gpus if not gpu.isdigit()]
        text = ""
        if accelerator == "cpu":
            text = "should be a number with `accelerator: cpu`, whose slots are all alike"
        elif draft.file.privileged:
            text = "should be a number with `privileged: true`: its container sees every GPU"
        elif uuids and accelerator == "amd":
            text = "should be indexes with `accelerator: amd`, such as [0, 1]"
        elif uuids and len(entry.host) > 1:
            text = f"should be indexes: `host` stands for {len(entry.host)}, and a UUID is of one"
        if text:
            yield Mistake(where=("nodes", index, "gpus"), text=text)


def addresses(draft: Draft) -> Iterator[Mistake]:
    """Each node has an address of version 4, the only one that has run: `host:port` pairs are put
    together from it.
    """
    for index, entry in enumerate(draft.file.nodes):
        if (
            entry.ip is None
            and draft.sound("nodes", index, "host")
            and draft.sound("nodes", index, "ip")
        ):
            yield from _without_address(draft, index)
    for index in sorted({item.entry for item in draft.placed if _is_ipv6(item.node.ip)}):
        yield Mistake(
            where=_key(draft, index, "ip"),
            text=(
                "should be an IPv4 address: Ray and vLLM over IPv6 have not been tried with vlaunch"
            ),
        )


def _without_address(draft: Draft, entry: int) -> Iterator[Mistake]:
    names = [item.node.host for item in draft.placed if item.entry == entry and not item.node.ip]
    if names:
        advice = (
            f"`{names[0]}` is a name, so `ip` should say which address the other nodes reach it by"
        )
        yield Mistake(where=("nodes", entry, "host"), text=advice)


def _is_ipv6(ip: str) -> bool:
    return bool(ip) and ipaddress.ip_address(ip).version == 6


def duplicates(draft: Draft) -> Iterator[Mistake]:
    """No two nodes share a name, a login or an address."""
    for key, value_of in (("name", _by_name), ("host", _by_host), ("ip", _by_ip)):
        yield from _duplicates(draft, key, value_of)


def _duplicates(draft: Draft, key: str, value_of: Callable[[Node], str]) -> Iterator[Mistake]:
    first_entry: dict[str, int] = {}
    hosts: set[str] = set()
    for item in draft.placed:
        # In the place of what could not be read stands something else.
        value = value_of(item.node) if draft.sound("nodes", item.entry, key) else ""
        host = _by_host(item.node)
        derived = key == "name" and draft.file.nodes[item.entry].name is None
        # A name that comes from a duplicate host is reported there.
        if value in first_entry and not (derived and host in hosts):
            yaml_path = _key(draft, item.entry, key)
            line = draft.line(*_key(draft, first_entry[value], key))
            other = "in this range" if first_entry[value] == item.entry else f"on line {line}"
            text = f"should be used once, and `{value}` is already {other}"
            if derived:
                text = (
                    f"`{value}` is also the name of the node on line {line}: give each a `name` of"
                    " its own"
                )
            yield Mistake(where=yaml_path, text=text)
        hosts.add(host)
        if value:
            first_entry.setdefault(value, item.entry)


def _by_name(node: Node) -> str:
    return node.name


def _by_ip(node: Node) -> str:
    return node.ip


def _by_host(node: Node) -> str:
    # One address with two SSH ports is two machines behind a forwarder.
    return node.host.lower() if node.ssh.port is None else f"{node.host.lower()}:{node.ssh.port}"


def names(draft: Draft) -> Iterator[Mistake]:
    """A node's name is part of its container's name and of its agent's certificate (RFC 5280:
    ub-common-name).
    """
    for index, entry in enumerate(draft.file.nodes):
        if entry.name is None and any(":" in host for host in entry.host):
            yield Mistake(
                where=("nodes", index, "host"),
                text="an IPv6 address cannot name a container: give the node a `name`",
            )
    too_long = {item.entry for item in draft.placed if len(item.node.name) > _LONGEST_NAME}
    for index in sorted(too_long):
        yield Mistake(
            where=_key(draft, index, "name"),
            text=f"should be a name of at most {_LONGEST_NAME} characters: give the node a `name`",
        )


def head(draft: Draft) -> Iterator[Mistake]:
    """There is exactly one head, and it is one of the nodes."""
    claims = [index for index, entry in enumerate(draft.file.nodes) if entry.head]
    for index in claims:
        hosts = draft.file.nodes[index].host
        if len(hosts) > 1:
            text = (
                f"should be on one node, and this entry is {len(hosts)}; write `head: NAME` at the"
                " top level instead"
            )
            yield Mistake(where=("nodes", index, "head"), text=text)
        if index != claims[0]:
            line = draft.line("nodes", claims[0], "head")
            yield Mistake(
                where=("nodes", index, "head"),
                text=f"should be on one node, and it is already on line {line}",
            )
    if draft.file.head is not None:
        yield from _named_head(draft, draft.file.head, claims)


def _named_head(draft: Draft, head_name: str, claims: list[int]) -> Iterator[Mistake]:
    """`head: NAME` names a node, one that the `claims` of entries to be the head leave open."""
    node_names = [item.node.name for item in draft.placed]
    if head_name not in node_names:
        suggestion = did_you_mean(head_name, node_names)
        yield Mistake(
            where=("head",),
            text=f"should be the name of one of the nodes, not `{name(head_name)}`{suggestion}",
        )
    elif claims and all(
        item.node.name != head_name for item in draft.placed if item.entry in claims
    ):
        line = draft.line("nodes", claims[0], "head")
        yield Mistake(
            where=("head",),
            text=f"should agree with `head: true` on line {line}; remove one of the two",
        )


def local(draft: Draft) -> Iterator[Mistake]:
    """Only one node can be the machine the launcher runs on."""
    local_nodes = [item for item in draft.placed if item.node.connection == "local"]
    if len(local_nodes) > 1:
        yaml_path: Where = _key(draft, local_nodes[1].entry, "connection")
        if not draft.written(*yaml_path):
            yaml_path = ("connection",)
        text = (
            f"can be local for one node only, and it is for `{local_nodes[0].node.name}` and"
            f" `{local_nodes[1].node.name}`"
        )
        yield Mistake(where=yaml_path, text=text)


def loopback(draft: Draft) -> Iterator[Mistake]:
    """`lo` reaches no other machine."""
    if len(draft.placed) < 2:
        return
    if draft.file.network.interface == "lo":
        yield Mistake(
            where=("network", "interface"),
            text="should lead to the other nodes, which `lo` does not",
        )
    for index, entry in enumerate(draft.file.nodes):
        if entry.network.interface == "lo":
            yaml_path = ("nodes", index, "network", "interface")
            yield Mistake(
                where=yaml_path, text="should lead to the other nodes, which `lo` does not"
            )


ALL = (lengths, gpus, addresses, duplicates, names, head, local, loopback)


def _key(draft: Draft, entry: int, key: str) -> Where:
    """Where `key` is written, or `host`, from which `name` and `ip` are taken when they are not."""
    yaml_path: Where = ("nodes", entry, key)
    return (
        yaml_path if draft.written(*yaml_path) or key == "connection" else ("nodes", entry, "host")
    )
