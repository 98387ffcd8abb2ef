"""Checks of connections in both directions: fixed ports, a high port, full-size packets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from launcher.core.check import Finding, failed, passed, skipped
from launcher.core.domain import Inventory, Node, fold
from launcher.hosts.check import Check, Evidence, Host, skip_single_node
from launcher.hosts.checks.addresses import nic_of
from launcher.hosts.checks.ports import ports_of
from launcher.hosts.pairs import PortProbe

_DESCRIPTIONS = {
    "timed out": "timed out: something drops it",
    "refused": "was refused: a firewall rejects it or nothing listens",
    "no route": "found no route",
    "error": "failed",
}

# Returns fault and evidence of one direction, empty without a fault, None if unknown.
_Trouble = Callable[[Evidence, PortProbe], tuple[str, str] | None]
# Returns the fix for source, target, source interface and probe.
_Fix = Callable[[Node, Node, str, PortProbe], str]


def _fixed_port_trouble(evidence: Evidence, probe: PortProbe) -> tuple[str, str] | None:
    return _closed_port_trouble(probe, _fixed_ports_of(evidence.inventory, probe))


def _fixed_ports_of(inventory: Inventory, probe: PortProbe) -> set[int]:
    """Return the probed ports that the inventory sets; kernels pick the others."""
    ports = inventory.ports
    # The head's include the workers'.
    fixed = {*ports_of(inventory, inventory.head), ports.mp_master, ports.dp_rpc, ports.group}
    fixed.add(ports.copy)
    return {
        port
        for port in probe.ports
        if port in fixed or ports.worker_min <= port <= ports.worker_max
    }


def _high_port_trouble(evidence: Evidence, probe: PortProbe) -> tuple[str, str] | None:
    fixed = _fixed_ports_of(evidence.inventory, probe)
    if fixed and all(probe.ports[port] != "open" for port in fixed):
        return None  # everything is blocked: reported once, by `ports-reachable`
    return _closed_port_trouble(probe, set(probe.ports) - fixed)


def _closed_port_trouble(probe: PortProbe, ports: set[int]) -> tuple[str, str] | None:
    if not ports:
        return None
    by_outcome: dict[str, list[int]] = {}
    for port in sorted(ports):
        if probe.ports[port] != "open":
            by_outcome.setdefault(probe.ports[port], []).append(port)
    text = "; ".join(
        f"TCP {', '.join(map(str, closed_ports))} {_DESCRIPTIONS[kind]}"
        for kind, closed_ports in by_outcome.items()
    )
    return text, "\n".join(
        f"{port}: {probe.errors[port]}" for port in sorted(ports) if port in probe.errors
    )


def _packet_size_trouble(evidence: Evidence, probe: PortProbe) -> tuple[str, str] | None:
    # Different MTUs are reported by `mtu`; sizes within both must pass.
    mtus = [
        mtu for name in (probe.source, probe.target) if (mtu := _mtu(evidence, name)) is not None
    ]
    expected = min([*mtus, *([] if probe.mtu is None else [probe.mtu])], default=None)
    if expected is not None and probe.largest is not None and probe.largest < expected:
        return f"packets of more than {probe.largest} bytes are lost; {expected} should pass", ""
    if probe.bulk is False:
        return "connections open, but 1 MB does not arrive", ""
    return None if probe.largest is None or expected is None else ("", "")


def _mtu(evidence: Evidence, name: str) -> int | None:
    host = evidence.host(name)
    nic = nic_of(host) if host is not None else None
    return nic.mtu if nic else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairCheck:
    """A check of each direction, with texts for nodes without results and for healthy ones."""

    find_trouble: _Trouble
    unknown_text: str
    healthy_text: str
    fix: _Fix

    def judge(self, evidence: Evidence) -> Sequence[Finding]:
        """Judge every direction between reachable nodes, then each node without a fault."""
        probes = {(probe.source, probe.target): probe for probe in _relevant_probes(evidence)}
        directions = _Directions(
            {pair: self.find_trouble(evidence, probe) for pair, probe in probes.items()}
        )
        findings = []
        for (source, target), (text, errors) in directions.faulty.items():
            node, interface = evidence.inventory.node, _interface(evidence, source)
            findings.append(
                failed(
                    directions.suspects[source, target],
                    f"{source} → {target}: {text}",
                    evidence=errors,
                    fix=self.fix(node(source), node(target), interface, probes[source, target]),
                )
            )
        blamed = {finding.node for finding in findings}
        others = [host for host in evidence.reached if host.name not in blamed]
        return [*findings, *(self._judge_blameless(host, directions) for host in others)]

    def _judge_blameless(self, host: Host, directions: _Directions) -> Finding:
        """Judge a node without a fault of its own by its verified peers."""
        evidence = host.evidence
        if host.name in evidence.probes_missing:
            return skipped(host, evidence.probes_missing[host.name])
        if verified_peers := directions.verified.get(host.name):
            if len(verified_peers) + 1 >= len(evidence.facts):
                return passed(host, self.healthy_text)
            return passed(host, f"{self.healthy_text} (with {fold(verified_peers)})")
        if host.name in directions.affected:
            return skipped(host, "every connection of this node fails: see the other nodes")
        if evidence.port_probes is None:
            return skipped(host, "no connection was tested: not requested")
        return skipped(host, self.unknown_text)


def _relevant_probes(evidence: Evidence) -> list[PortProbe]:
    """Return the probes between reachable nodes; others are known to fail."""
    return [
        probe
        for probe in evidence.port_probes or ()
        if probe.source in evidence.facts and probe.target in evidence.facts
    ]


@dataclass(frozen=True)
class _Directions:
    """Faults by direction, grouped once: their number grows with the square of the nodes."""

    troubles: Mapping[tuple[str, str], tuple[str, str] | None]

    @cached_property
    def faulty(self) -> dict[tuple[str, str], tuple[str, str]]:
        """The directions with a fault."""
        return {
            pair: trouble
            for pair, trouble in self.troubles.items()
            if trouble is not None and trouble[0]
        }

    @cached_property
    def affected(self) -> set[str]:
        """The nodes at either end of a faulty direction."""
        return {name for pair in self.faulty for name in pair}

    @cached_property
    def suspects(self) -> dict[tuple[str, str], str]:
        """The node to inspect first: the source if only it fails to reach the target, else the
        target.
        """
        total_out, total_into = (Counter(pair[end] for pair in self.troubles) for end in (0, 1))
        faulty_out, faulty_into = (Counter(pair[end] for pair in self.faulty) for end in (0, 1))
        return {
            (source, target): source
            if 1 < total_out[source] == faulty_out[source]
            and faulty_into[target] < total_into[target]
            else target
            for source, target in self.faulty
        }

    @cached_property
    def verified(self) -> dict[str, list[str]]:
        """The peers of each node that are healthy in both directions."""
        healthy = {
            pair
            for pair, trouble in self.troubles.items()
            if trouble is not None and not trouble[0]
        }
        names = dict.fromkeys(peer for pair in self.troubles for peer in pair)
        return {
            name: [peer for peer in names if (name, peer) in healthy and (peer, name) in healthy]
            for name in names
        }


def _interface(evidence: Evidence, name: str) -> str:
    node, host = evidence.inventory.node(name), evidence.host(name)
    interface = host.facts.interface_of(node.ip) if host is not None else None
    return interface or node.interface or "INTERFACE"


def _allow_fix(source: Node, target: Node, _: str, __: PortProbe) -> str:
    return (
        f"allow all TCP from {source.ip} on {target.name} (Ray, NCCL and Gloo pick high ports):"
        f" `sudo iptables -I INPUT -p tcp -s {source.ip} -j ACCEPT`, `sudo ufw allow from"
        f" {source.ip}`, or with firewalld `sudo firewall-cmd --zone=trusted"
        f" --add-source={source.ip}`; check also the outgoing rules of {source.name} and devices in"
        " between"
    )


def _mtu_fix(source: Node, target: Node, interface: str, probe: PortProbe) -> str:
    is_lossy = probe.largest is not None and probe.mtu is not None and probe.largest < probe.mtu
    size = probe.largest if is_lossy and probe.largest is not None else 1400
    return (
        f"raise the MTU between {source.name} and {target.name} (switch, bridge, tunnel), or lower"
        f" it on every node: `sudo ip link set {interface} mtu {size}`; test it with `ping -M do -s"
        f" {size - 28} {target.ip}`"
    )


CHECKS = (
    Check(
        id="ports-reachable",
        what="every node reaches the others' fixed ports",
        why="a port that is open in one direction only lets a worker join and then vanish",
        judge=_PairCheck(
            find_trouble=_fixed_port_trouble,
            unknown_text="no fixed port was tested",
            healthy_text="the fixed ports are open, both ways",
            fix=_allow_fix,
        ).judge,
        group="ports",
        skip_reason=skip_single_node,
    ),
    Check(
        id="high-port",
        what="every node reaches a high port of the others",
        why="NCCL, Gloo and Ray's workers listen on ports that the kernel picks",
        judge=_PairCheck(
            find_trouble=_high_port_trouble,
            unknown_text="no high port was tested",
            healthy_text="a high port is open, both ways",
            fix=_allow_fix,
        ).judge,
        group="ports",
        skip_reason=skip_single_node,
    ),
    Check(
        id="mtu-path",
        what="full-size packets pass between all nodes",
        why=(
            "if large packets are lost, small messages pass, but the first tensor hangs without an"
            " error"
        ),
        judge=_PairCheck(
            find_trouble=_packet_size_trouble,
            unknown_text="no datagram arrived, so packet sizes are not verified",
            healthy_text="full-size packets pass",
            fix=_mtu_fix,
        ).judge,
        group="network",
        skip_reason=skip_single_node,
    ),
)
