"""Checks of connections between nodes, for each direction of each pair: fixed ports, a high port,
full-size packets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from launcher.core.check import Finding, failed, passed, skipped
from launcher.core.domain import Inventory, Node, fold
from launcher.hosts.check import Check, Evidence, Host, one_node
from launcher.hosts.checks.addresses import nic_of
from launcher.hosts.checks.ports import ports_of
from launcher.hosts.pairs import PortProbe

_MEANING = {
    "timed out": "timed out, so that something drops it",
    "refused": "was refused, so that a firewall rejects it or nothing listens",
    "no route": "found no route",
    "error": "failed",
}

# What is wrong with one direction in words, nothing when it is well, `None` when it cannot be said.
_Trouble = Callable[[Evidence, PortProbe], tuple[str, str] | None]
# The remedy, from source, target, the source's interface and what it saw.
_Fix = Callable[[Node, Node, str, PortProbe], str]


def _fixed_ports(evidence: Evidence, probe: PortProbe) -> tuple[str, str] | None:
    return _closed(probe, _fixed(evidence.inventory, probe))


def _fixed(inventory: Inventory, probe: PortProbe) -> set[int]:
    """Return the ports of a probe that the inventory gives; the others were picked by a kernel, as
    NCCL's and Gloo's are.
    """
    ports = inventory.ports
    # The head has the workers' ports, too.
    fixed = {*ports_of(inventory, inventory.head), ports.mp_master, ports.dp_rpc, ports.group}
    fixed.add(ports.copy)
    return {
        port
        for port in probe.ports
        if port in fixed or ports.worker_min <= port <= ports.worker_max
    }


def _high_port(evidence: Evidence, probe: PortProbe) -> tuple[str, str] | None:
    fixed = _fixed(evidence.inventory, probe)
    if fixed and all(probe.ports[port] != "open" for port in fixed):
        return None  # Nothing at all passes: `ports-reachable` says so, and one fault is told once.
    return _closed(probe, set(probe.ports) - fixed)


def _closed(probe: PortProbe, ports: set[int]) -> tuple[str, str] | None:
    if not ports:
        return None
    by_outcome: dict[str, list[int]] = {}
    for port in sorted(ports):
        if probe.ports[port] != "open":
            by_outcome.setdefault(probe.ports[port], []).append(port)
    text = "; ".join(
        f"TCP {', '.join(map(str, closed_ports))} {_MEANING[kind]}"
        for kind, closed_ports in by_outcome.items()
    )
    return text, "\n".join(
        f"{port}: {probe.errors[port]}" for port in sorted(ports) if port in probe.errors
    )


def _full_size(evidence: Evidence, probe: PortProbe) -> tuple[str, str] | None:
    # A sender with a larger MTU than the receiver's is what `mtu` is for; what both can take must
    # pass.
    mtus = [
        mtu for name in (probe.source, probe.target) if (mtu := _mtu(evidence, name)) is not None
    ]
    expected = min([*mtus, *([] if probe.wanted is None else [probe.wanted])], default=None)
    if expected is not None and probe.largest is not None and probe.largest < expected:
        return f"packets of more than {probe.largest} bytes are lost; {expected} should pass", ""
    if probe.bulk is False:
        return "a connection opens, but a megabyte does not come through", ""
    return None if probe.largest is None or expected is None else ("", "")


def _mtu(evidence: Evidence, name: str) -> int | None:
    host = evidence.host(name)
    nic = nic_of(host) if host is not None else None
    return nic.mtu if nic else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A check of each direction. `unknown` and `well` are the texts for nodes of which nothing is
    known, and of which all is well.
    """

    trouble: _Trouble
    unknown: str
    well: str
    fix: _Fix

    def judge(self, evidence: Evidence) -> Sequence[Finding]:
        """Judge every direction between nodes that answered, then each node that is not to blame
        for any.
        """
        probes = {(probe.source, probe.target): probe for probe in _port_probes(evidence)}
        directions = _Directions(
            {pair: self.trouble(evidence, probe) for pair, probe in probes.items()}
        )
        findings = []
        for (source, target), (text, errors) in directions.bad.items():
            node, interface = evidence.inventory.node, _interface(evidence, source)
            findings.append(
                failed(
                    directions.culprits[source, target],
                    f"{source} → {target}: {text}",
                    evidence=errors,
                    fix=self.fix(node(source), node(target), interface, probes[source, target]),
                )
            )
        blamed = {finding.node for finding in findings}
        others = [host for host in evidence.reached if host.name not in blamed]
        return [*findings, *(self._blameless(host, directions) for host in others)]

    def _blameless(self, host: Host, directions: _Directions) -> Finding:
        """Judge a node that is not to blame for any direction: well with those of which that is
        proven.
        """
        evidence = host.evidence
        if host.name in evidence.probes_missing:
            return skipped(host, evidence.probes_missing[host.name])
        if verified_peers := directions.proven.get(host.name):
            is_complete = len(verified_peers) + 1 >= len(evidence.facts)
            return passed(
                host, self.well if is_complete else f"{self.well} (with {fold(verified_peers)})"
            )
        if host.name in directions.touched:
            return skipped(host, "no pair with it is well; the findings name the other node")
        if evidence.port_probes is None:
            return skipped(host, "nobody knocked: this was not asked")
        return skipped(host, self.unknown)


def _port_probes(evidence: Evidence) -> list[PortProbe]:
    """Return what was seen between nodes that answered; a node that did not cannot be reached by
    the others either.
    """
    return [
        probe
        for probe in evidence.port_probes or ()
        if probe.source in evidence.facts and probe.target in evidence.facts
    ]


@dataclass(frozen=True)
class _Directions:
    """The trouble of each direction, as `_Trouble` returns it. Directions grow with the square of
    the nodes: they are grouped once, not for each node.
    """

    seen: Mapping[tuple[str, str], tuple[str, str] | None]

    @cached_property
    def bad(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Those with which something is wrong."""
        return {
            pair: trouble
            for pair, trouble in self.seen.items()
            if trouble is not None and trouble[0]
        }

    @cached_property
    def touched(self) -> set[str]:
        """The nodes at an end of those."""
        return {name for pair in self.bad for name in pair}

    @cached_property
    def culprits(self) -> dict[tuple[str, str], str]:
        """The node to look at first for each of those: the source when it reaches nobody though
        others reach the target, else the target.
        """
        total_out, total_into = (Counter(pair[end] for pair in self.seen) for end in (0, 1))
        faulty_out, faulty_into = (Counter(pair[end] for pair in self.bad) for end in (0, 1))
        return {
            (source, target): source
            if 1 < total_out[source] == faulty_out[source]
            and faulty_into[target] < total_into[target]
            else target
            for source, target in self.bad
        }

    @cached_property
    def proven(self) -> dict[str, list[str]]:
        """The nodes that each node reaches and is reached by."""
        healthy = {
            pair for pair, trouble in self.seen.items() if trouble is not None and not trouble[0]
        }
        names = dict.fromkeys(peer for pair in self.seen for peer in pair)
        return {
            name: [peer for peer in names if (name, peer) in healthy and (peer, name) in healthy]
            for name in names
        }


def _interface(evidence: Evidence, name: str) -> str:
    node, host = evidence.inventory.node(name), evidence.host(name)
    interface = host.facts.interface_of(node.ip) if host is not None else None
    return interface or node.interface or "INTERFACE"


def _open(source: Node, target: Node, _: str, __: PortProbe) -> str:
    return (
        f"allow all TCP from {source.ip} on {target.name} (Ray, NCCL and Gloo pick high ports):"
        f" `sudo iptables -I INPUT -p tcp -s {source.ip} -j ACCEPT`, `sudo ufw allow from"
        f" {source.ip}`, or with firewalld `sudo firewall-cmd --zone=trusted"
        f" --add-source={source.ip}`; look also at what {source.name} may send and at what lies"
        " between"
    )


def _pass_large(source: Node, target: Node, interface: str, probe: PortProbe) -> str:
    is_lossy = (
        probe.largest is not None and probe.wanted is not None and probe.largest < probe.wanted
    )
    size = probe.largest if is_lossy and probe.largest is not None else 1400
    return (
        f"raise the MTU of what lies between {source.name} and {target.name} (switch, bridge,"
        f" tunnel), or lower it on every node: `sudo ip link set {interface} mtu {size}`; try it"
        f" with `ping -M do -s {size - 28} {target.ip}`"
    )


CHECKS = (
    Check(
        id="ports-reachable",
        what="every node reaches the others' fixed ports",
        why="a port that is open in one direction only lets a worker join and then vanish",
        judge=_Question(
            trouble=_fixed_ports,
            unknown="no fixed port was tried",
            well="the fixed ports are open, both ways",
            fix=_open,
        ).judge,
        group="ports",
        skip_reason=one_node,
    ),
    Check(
        id="high-port",
        what="every node reaches a high port of the others",
        why="NCCL, Gloo and Ray's workers listen on ports that the kernel picks",
        judge=_Question(
            trouble=_high_port,
            unknown="no high port was tried",
            well="a high port is open, both ways",
            fix=_open,
        ).judge,
        group="ports",
        skip_reason=one_node,
    ),
    Check(
        id="mtu-path",
        what="packets of the interface's full size pass between the nodes",
        why=(
            "small messages pass and the first tensor hangs, without an error, where large packets"
            " are lost"
        ),
        judge=_Question(
            trouble=_full_size,
            unknown="no datagram came through, so that packet sizes are not proven",
            well="full-size packets pass",
            fix=_pass_large,
        ).judge,
        group="network",
        skip_reason=one_node,
    ),
)
