"""The interface that carries a node's address: its MTU and speed, the names that variables give it,
and the node's own name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from launcher.checks.consistency import alike
from launcher.checks.shape import (
    Check,
    Evidence,
    Finding,
    Host,
    each,
    failed,
    passed,
    skipped,
    warned,
)
from launcher.model import Inventory
from launcher.tools.host import HostFacts
from launcher.tools.survey import Nic

_NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def nic_of(host: Host) -> Nic | None:
    """Return the interface that has the node's address."""
    nics = host.survey.nics if host.survey is not None else None
    name = host.facts.interface_of(host.node.ip)
    return next((nic for nic in nics or () if nic.name == name), None)


def _carriers(evidence: Evidence) -> tuple[dict[str, Nic], list[Finding]]:
    found, gaps = dict[str, Nic](), list[Finding]()
    for host in evidence.reached:
        nic = nic_of(host)
        if nic is None:
            gaps.append(skipped(host, f"the interface with {host.node.ip} was not surveyed"))
        else:
            found[host.name] = nic
    return found, gaps


def _mtu(evidence: Evidence) -> Sequence[Finding]:
    carriers, gaps = _carriers(evidence)

    def differs(name: str, mtu: int, common: int, others: str) -> Finding:
        nic = carriers[name].name
        return failed(
            name,
            f"mtu {mtu} on `{nic}`, while {others} has {common}",
            fix=(
                f"run `sudo ip link set {nic} mtu {common}` on {name}, and make it last in its"
                " network configuration"
            ),
        )

    return [
        *gaps,
        *alike(
            {name: nic.mtu for name, nic in carriers.items()},
            differs,
            shown=lambda mtu: f"mtu {mtu}",
        ),
    ]


def _speed(evidence: Evidence) -> Sequence[Finding]:
    carriers, gaps = _carriers(evidence)
    speeds = {
        name: nic.speed for name, nic in carriers.items() if nic.speed is not None and nic.speed > 0
    }
    gaps += [
        skipped(name, f"`{nic.name}` tells no speed (a virtual one)")
        for name, nic in carriers.items()
        if name not in speeds
    ]

    def differs(name: str, speed: int, common: int, others: str) -> Finding:
        nic = carriers[name].name
        return warned(
            name,
            f"`{nic}` runs at {_bits(speed)}, while {others} has {_bits(common)}",
            fix=f"look at `sudo ethtool {nic}` on {name}: cable, switch port, what was negotiated",
        )

    return [*gaps, *alike(speeds, differs, shown=_bits)]


def _bits(mbits: int) -> str:
    return f"{mbits / 1000:g} Gbit/s" if mbits >= 1000 else f"{mbits} Mbit/s"


def _hostname(host: Host) -> Finding:
    node, survey = host.node, host.survey
    if survey is None or survey.own_names is None:
        return skipped(node, "what its own name resolves to is not known")
    name = host.facts.hostname or node.name
    loopback = [address for address in survey.own_names if _loopback(address)]
    if loopback:
        script = f"/^(127[.]|::1)/s/[[:space:]]{name}([[:space:]]|$)/ /g"
        return failed(
            node,
            f"its name `{name}` resolves to {', '.join(loopback)}",
            fix=(
                f"run on {node.name}: `sudo sed -E -i '{script}' /etc/hosts; echo '{node.ip}"
                f" {name}' | sudo tee -a /etc/hosts`"
            ),
        )
    if not survey.own_names:
        return warned(
            node,
            f"its name `{name}` resolves to nothing",
            fix=f"run on {node.name}: `echo '{node.ip} {name}' | sudo tee -a /etc/hosts`",
        )
    return _on_network(host, name, survey.own_names)


def _on_network(host: Host, name: str, own_names: Sequence[str]) -> Finding:
    """Judge that one of the addresses that a node's own name resolves to is on the cluster's
    network.
    """
    node, known = host.node, host.facts.addresses or ()
    networks = [f"{each.ip}/{each.prefix}" for each in known if each.ip == node.ip]
    if any(address == node.ip or _within(address, networks) for address in own_names):
        return passed(node, "its own name resolves to an address on the cluster's network")
    if not networks:
        return skipped(
            node, "its addresses are not known, so what its own name resolves to was not compared"
        )
    return warned(
        node,
        f"its name `{name}` resolves to {', '.join(own_names[:3])}, which is not on the network of"
        f" {node.ip}",
        fix=(
            f"run on {node.name}: `echo '{node.ip} {name}' | sudo tee -a /etc/hosts`, and take out"
            " other lines of the name"
        ),
    )


def _within(address: str, networks: Sequence[str]) -> bool:
    try:
        return any(
            ipaddress.ip_address(address) in ipaddress.ip_interface(each).network
            for each in networks
        )
    except ValueError:
        return False


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _interface(host: Host) -> Finding:
    node, facts = host.node, host.facts
    given = {variable: node.env[variable] for variable in _NAMES if node.env.get(variable)}
    if not given:
        return passed(
            node, "no variable names an interface; vlaunch gives the one with the node's address"
        )
    names = _interfaces(facts)
    if not names:
        return skipped(node, "its interfaces were not asked")
    for variable, value in given.items():
        if unmatched := _unmatched(variable, value, names):
            right = facts.interface_of(node.ip) or "the right one"
            return failed(
                node,
                f"{variable} names `{', '.join(unmatched)}`, which is not there",
                evidence="interfaces: " + ", ".join(sorted(names - {"lo"})),
                fix=(
                    f"take {variable} out of `env:` (vlaunch sets it for each node), or set it to"
                    f" {right} under {node.name}'s own `env:`"
                ),
            )
    return passed(node, ", ".join(f"{variable}={value}" for variable, value in given.items()))


def _interfaces(facts: HostFacts) -> set[str]:
    """Return the names of a node's interfaces, of those with addresses where no survey tells."""
    if facts.survey is not None and facts.survey.nics:
        return {nic.name for nic in facts.survey.nics}
    return {each.interface for each in facts.addresses or ()}


def _unmatched(variable: str, value: str, names: set[str]) -> list[str]:
    """Return what a variable names that is not there; what it excludes (`^`) need not be."""
    if value.startswith("^"):
        return []
    return [
        word
        for word in value.lstrip("^=").split(",")
        if word and not _matches(variable, value, word, names)
    ]


def _matches(variable: str, value: str, word: str, names: set[str]) -> bool:
    """NCCL takes prefixes unless the value starts with `=`; Gloo and TensorPipe take whole
    names.
    """
    exact = variable != "NCCL_SOCKET_IFNAME" or value.lstrip("^").startswith("=")
    return word in names if exact else any(name.startswith(word) for name in names)


def _names_none(inventory: Inventory) -> str:
    given = any(node.env.get(variable) for node in inventory.nodes for variable in _NAMES)
    return (
        "" if given else "env: names no interface; vlaunch gives each node the one with its address"
    )


CHECKS = (
    Check(
        id="hostname",
        what="a node's own name does not resolve to loopback",
        why=(
            "Gloo and other libraries offer peers the address of the own name; 127.0.1.1 makes them"
            " wait for themselves"
        ),
        judge=each(_hostname),
        group="network",
    ),
    Check(
        id="interface",
        what="the interfaces that variables name are there",
        why=(
            "the name of one node's interface, given to all, lets NCCL or Gloo find no interface on"
            " another"
        ),
        judge=each(_interface),
        group="network",
        skip_reason=_names_none,
    ),
    Check(
        id="mtu",
        what="the MTU is the same on all nodes",
        why=(
            "where one side sends larger packets than the other takes, transfers hang though pings"
            " pass"
        ),
        judge=_mtu,
        group="network",
    ),
    Check(
        id="link-speed",
        what="the links run at one speed",
        why="a link that fell back to a lower speed holds up every collective",
        judge=_speed,
        group="network",
    ),
)
