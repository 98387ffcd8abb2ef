"""Rules between nodes: unique machines, names and addresses, and one head."""

import ipaddress
from collections.abc import Callable, Iterator

from launcher.core.domain import Node
from launcher.inventory.draft import InventoryDraft
from launcher.inventory.mistakes import Mistake, YamlPath, did_you_mean, format_key

_NAME_LENGTH = 64


def lengths(draft: InventoryDraft) -> Iterator[Mistake]:
    """Require as many names and addresses as hosts in the ranges of an entry."""
    for index, entry in enumerate(draft.file.nodes):
        for key, values, kind in (("name", entry.name, "name"), ("ip", entry.ip, "address")):
            if (
                values is None
                or len(values) == len(entry.host)
                or not draft.is_valid("nodes", index, "host")
            ):
                continue
            yield Mistake(
                yaml_path=("nodes", index, key),
                text=(
                    f"should have one {kind} per host: it has {len(values)}, and `host` stands for"
                    f" {len(entry.host)}"
                ),
            )


def gpus(draft: InventoryDraft) -> Iterator[Mistake]:
    """Require a GPU list that fits: no UUIDs for ranges or AMD, no list for CPUs."""
    accelerator = draft.file.accelerator
    for index, entry in enumerate(draft.file.nodes):
        if isinstance(entry.gpus, int) or not draft.is_valid("nodes", index, "gpus"):
            continue
        uuids = [gpu for gpu in entry.gpus if not gpu.isdigit()]
        text = ""
        if accelerator == "cpu":
            text = "should be a number with `accelerator: cpu`, whose slots are identical"
        elif draft.file.privileged:
            text = "should be a number with `privileged: true`: its container sees every GPU"
        elif uuids and accelerator == "amd":
            text = "should be indexes with `accelerator: amd`, such as [0, 1]"
        elif uuids and len(entry.host) > 1:
            text = (
                f"should be indexes: `host` stands for {len(entry.host)}, and a UUID belongs to one"
                " host"
            )
        if text:
            yield Mistake(yaml_path=("nodes", index, "gpus"), text=text)


def addresses(draft: InventoryDraft) -> Iterator[Mistake]:
    """Require an IPv4 address for each node: `host:port` strings are built from it."""
    for index, entry in enumerate(draft.file.nodes):
        if (
            entry.ip is None
            and draft.is_valid("nodes", index, "host")
            and draft.is_valid("nodes", index, "ip")
        ):
            yield from _missing_addresses(draft, index)
    for index in sorted({item.entry for item in draft.nodes if _is_ipv6(item.node.ip)}):
        yield Mistake(
            yaml_path=_key_path(draft, index, "ip"),
            text=(
                "should be an IPv4 address: Ray and vLLM over IPv6 have not been tested with"
                " vlaunch"
            ),
        )


def _missing_addresses(draft: InventoryDraft, entry: int) -> Iterator[Mistake]:
    names = [item.node.host for item in draft.nodes if item.entry == entry and not item.node.ip]
    if names:
        advice = f"`{names[0]}` is a name, so set `ip` to the address at which other nodes reach it"
        yield Mistake(yaml_path=("nodes", entry, "host"), text=advice)


def _is_ipv6(ip: str) -> bool:
    return bool(ip) and ipaddress.ip_address(ip).version == 6


def duplicates(draft: InventoryDraft) -> Iterator[Mistake]:
    """Require unique names, SSH targets and addresses."""
    for key, value_of in (("name", _by_name), ("host", _by_host), ("ip", _by_ip)):
        yield from _find_duplicates(draft, key, value_of)


def _find_duplicates(
    draft: InventoryDraft, key: str, value_of: Callable[[Node], str]
) -> Iterator[Mistake]:
    first_entry: dict[str, int] = {}
    hosts: set[str] = set()
    for item in draft.nodes:
        # Invalid values have stand-ins, which may coincide.
        value = value_of(item.node) if draft.is_valid("nodes", item.entry, key) else ""
        host = _by_host(item.node)
        derived = key == "name" and draft.file.nodes[item.entry].name is None
        # A name derived from a duplicate host is reported for the host.
        if value in first_entry and not (derived and host in hosts):
            yaml_path = _key_path(draft, item.entry, key)
            line = draft.line_of(*_key_path(draft, first_entry[value], key))
            other = "in this range" if first_entry[value] == item.entry else f"on line {line}"
            text = f"should be unique, but `{value}` is also {other}"
            if derived:
                text = (
                    f"`{value}` is also the name of the node on line {line}: give each a `name` of"
                    " its own"
                )
            yield Mistake(yaml_path=yaml_path, text=text)
        hosts.add(host)
        if value:
            first_entry.setdefault(value, item.entry)


def _by_name(node: Node) -> str:
    return node.name


def _by_ip(node: Node) -> str:
    return node.ip


def _by_host(node: Node) -> str:
    # Two SSH ports of one address are two machines behind a forwarder.
    return node.host.lower() if node.ssh.port is None else f"{node.host.lower()}:{node.ssh.port}"


def names(draft: InventoryDraft) -> Iterator[Mistake]:
    """Require names that fit container names and agent certificates (RFC 5280: ub-common-name)."""
    for index, entry in enumerate(draft.file.nodes):
        if entry.name is None and any(":" in host for host in entry.host):
            yield Mistake(
                yaml_path=("nodes", index, "host"),
                text="an IPv6 address cannot name a container: give the node a `name`",
            )
    too_long = {item.entry for item in draft.nodes if len(item.node.name) > _NAME_LENGTH}
    for index in sorted(too_long):
        yield Mistake(
            yaml_path=_key_path(draft, index, "name"),
            text=f"should be a name of at most {_NAME_LENGTH} characters: give the node a `name`",
        )


def head(draft: InventoryDraft) -> Iterator[Mistake]:
    """Require exactly one head among the nodes."""
    claims = [index for index, entry in enumerate(draft.file.nodes) if entry.head]
    for index in claims:
        hosts = draft.file.nodes[index].host
        if len(hosts) > 1:
            text = (
                f"should be on one node, and this entry is {len(hosts)}; write `head: NAME` at the"
                " top level instead"
            )
            yield Mistake(yaml_path=("nodes", index, "head"), text=text)
        if index != claims[0]:
            line = draft.line_of("nodes", claims[0], "head")
            yield Mistake(
                yaml_path=("nodes", index, "head"),
                text=f"should be on one node, and it is already on line {line}",
            )
    if draft.file.head is not None:
        yield from _named_head(draft, draft.file.head, claims)


def _named_head(draft: InventoryDraft, head_name: str, claims: list[int]) -> Iterator[Mistake]:
    """Check that `head: NAME` names a node and agrees with the entries in `claims`."""
    node_names = [item.node.name for item in draft.nodes]
    if head_name not in node_names:
        suggestion = did_you_mean(head_name, node_names)
        yield Mistake(
            yaml_path=("head",),
            text=(
                f"should be the name of one of the nodes, not `{format_key(head_name)}`{suggestion}"
            ),
        )
    elif claims and all(
        item.node.name != head_name for item in draft.nodes if item.entry in claims
    ):
        line = draft.line_of("nodes", claims[0], "head")
        yield Mistake(
            yaml_path=("head",),
            text=f"should agree with `head: true` on line {line}; remove one of the two",
        )


def local(draft: InventoryDraft) -> Iterator[Mistake]:
    """Allow at most one node with a local connection."""
    local_nodes = [item for item in draft.nodes if item.node.connection == "local"]
    if len(local_nodes) > 1:
        yaml_path: YamlPath = _key_path(draft, local_nodes[1].entry, "connection")
        if not draft.is_written(*yaml_path):
            yaml_path = ("connection",)
        text = (
            f"can be local for one node only, and it is for `{local_nodes[0].node.name}` and"
            f" `{local_nodes[1].node.name}`"
        )
        yield Mistake(yaml_path=yaml_path, text=text)


def loopback(draft: InventoryDraft) -> Iterator[Mistake]:
    """Reject `lo` as the network interface of several nodes: NCCL and Gloo use its first address,
    127.0.0.1, also where a routed host has its own there.
    """
    if len(draft.nodes) < 2:
        return
    text = (
        "should reach the other nodes, and NCCL takes 127.0.0.1 of `lo`; move a routed"
        " host's address to a dummy interface: `ip link add dummy0 type dummy`"
    )
    if draft.file.network.interface == "lo":
        yield Mistake(yaml_path=("network", "interface"), text=text)
    for index, entry in enumerate(draft.file.nodes):
        if entry.network.interface == "lo":
            yield Mistake(yaml_path=("nodes", index, "network", "interface"), text=text)


ALL = (lengths, gpus, addresses, duplicates, names, head, local, loopback)


def _key_path(draft: InventoryDraft, entry: int, key: str) -> YamlPath:
    """Return the path of `key`, or of `host` if `name` or `ip` derives from it."""
    yaml_path: YamlPath = ("nodes", entry, key)
    return (
        yaml_path
        if draft.is_written(*yaml_path) or key == "connection"
        else ("nodes", entry, "host")
    )
