"""The shape of a check: a literal with an identity, a reason and a judge that only looks at the
evidence it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Literal, TypeVar, get_args

from launcher.core.check import Finding, passed, skipped
from launcher.core.domain import Inventory, Level, Node, fold
from launcher.core.expectations import Expectations
from launcher.core.expectations import Gpu as ExpectedGpu
from launcher.hosts.inside import Inside
from launcher.hosts.pairs import PortProbe
from launcher.tools.host import HostFacts
from launcher.tools.survey import Survey

T = TypeVar("T", bound=Hashable)
Group = Literal[
    "reach",
    "host",
    "docker",
    "accelerator",
    "ports",
    "network",
    "rdma",
    "image",
    "memory",
    "storage",
    "model",
]


GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """What Hugging Face said about the model with the cluster's token; `text` are its words, or why
    it was not asked.
    """

    status: Literal[
        "ok", "unauthorized", "gated", "not found", "offline", "no token", "not asked"
    ] = "not asked"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that was seen of a cluster, per node. A judge looks at nothing else.

    Nodes that could not be reached are in `missing` with the reason, and in none of the others.
    `port_probes` is `None` when no port was probed, with reasons per node in `probes_missing`;
    `inside` and `inside_missing` likewise for containers. `files` has the model's files (name →
    bytes) per node, `None` where it is not; `model` is its name, empty when none is named.
    `required` is the level that the network must reach, `now` the time of these observations.
    """

    inventory: Inventory
    facts: Mapping[str, HostFacts]
    inside: Mapping[str, Inside] = field(default_factory=dict)
    inside_missing: Mapping[str, str] = field(default_factory=dict)
    port_probes: tuple[PortProbe, ...] | None = None
    probes_missing: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, int] | None] = field(default_factory=dict)
    model: str = ""
    hub: Hub | None = None
    required: Level = "any"
    expectations: Expectations = field(default_factory=Expectations)
    missing: Mapping[str, str] = field(default_factory=dict)
    now: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @property
    def reached(self) -> tuple[Host, ...]:
        """The nodes that answered, in the inventory's order."""
        return tuple(
            Host(node=node, facts=self.facts[node.name], evidence=self)
            for node in self.inventory.nodes
            if node.name in self.facts
        )

    def host(self, name: str) -> Host | None:
        """Return the node of this name, `None` when it did not answer."""
        if name not in self.facts:
            return None
        return Host(node=self.inventory.node(name), facts=self.facts[name], evidence=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One node that answered: as the inventory has it, what it said, and the evidence that this is
    part of.
    """

    node: Node
    facts: HostFacts
    evidence: Evidence

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    @property
    def inventory(self) -> Inventory:
        """The inventory that the node is in."""
        return self.evidence.inventory

    @property
    def survey(self) -> Survey | None:
        """The node's survey, `None` when it was not asked for one."""
        return self.facts.survey

    @property
    def expected_gpu(self) -> ExpectedGpu | None:
        """What is known of the model of its first GPU."""
        gpu = next(iter(self.facts.used(self.node)), None)
        return self.evidence.expectations.gpu(gpu.name) if gpu else None


Judge = Callable[[Evidence], Sequence[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must hold. `what` is a sentence that is true when the check is green.

    `skip_reason` says why a check does not apply to a cluster, and nothing when it does: what was
    not looked at is never green. `needs` names checks without which this one cannot be judged; a
    node that fails one of them is skipped here.
    """

    id: str
    what: str
    why: str
    judge: Judge
    group: Group
    skip_reason: Callable[[Inventory], str] = lambda _: ""
    needs: tuple[str, ...] = ()

    def applies(self, inventory: Inventory) -> bool:
        """Return whether there is anything to judge in this cluster."""
        return not self.skip_reason(inventory)


def each(judge: Callable[[Host], Finding | None]) -> Judge:
    """Make a judge of all nodes from one that looks at a single node; `None` means that nothing is
    wrong.
    """

    def all_nodes(evidence: Evidence) -> Sequence[Finding]:
        return [judge(host) or passed(host) for host in evidence.reached]

    return all_nodes


def surveyed(judge: Callable[[Node, Survey], Finding]) -> Judge:
    """Make a judge of all nodes from one that looks at a single node's survey; nodes without one
    are skipped.
    """

    def one(host: Host) -> Finding:
        return skipped(host, UNSURVEYED) if host.survey is None else judge(host.node, host.survey)

    return each(one)


UNSURVEYED = "the node was not surveyed"


def surveys(evidence: Evidence) -> tuple[dict[str, Survey], list[Finding]]:
    """Return the surveys that are there by node, and a SKIP for each node without one."""
    available = {host.name: host.survey for host in evidence.reached if host.survey is not None}
    return available, [
        skipped(host, UNSURVEYED) for host in evidence.reached if host.name not in available
    ]


def ssh_command(node: Node) -> str:
    """Return the words that log in to a node, as a person types them."""
    login = f"{node.ssh.user}@{node.host}" if node.ssh.user else node.host
    port = f" -p {node.ssh.port}" if node.ssh.port not in (None, 22) else ""
    return f"ssh{port} {login}"


def cpu_has_none(inventory: Inventory) -> str:
    """Say why nothing about accelerators is asked of a cluster of CPUs."""
    return "accelerator: cpu has no device and no driver" if inventory.accelerator == "cpu" else ""


def not_nvidia(inventory: Inventory) -> str:
    """Say why nothing about NVIDIA GPUs is asked."""
    kind = inventory.accelerator
    return "" if kind == "nvidia" else f"accelerator: {kind} has no NVIDIA driver"


def no_rdma(inventory: Inventory) -> str:
    """Say why nothing about RDMA is asked."""
    ethernet = "network: fabric is ethernet, which promises no RDMA"
    return ethernet if inventory.fabric == "ethernet" else ""


def one_node(inventory: Inventory) -> str:
    """Say why nothing is asked between nodes where there is one."""
    return "a single node has nobody to reach" if len(inventory.nodes) < 2 else ""


def alike(
    value: Callable[[Host], T | Finding],
    judge_odd: Callable[[Host, T, T, str], Finding],
    judge_usual: Callable[[Host, T], Finding] | None = None,
) -> Judge:
    """Make a judge of a value that should be one on all nodes.

    `value` returns a node's value, or the finding of a node that has none. `differs` makes the
    finding of an odd one, given the usual value (of equally frequent ones, the first) and the nodes
    that have it; `same` that of the others, which pass with their value by default.
    """

    def judge(evidence: Evidence) -> Sequence[Finding]:
        hosts = evidence.reached
        results = {host.name: value(host) for host in hosts}
        values = {
            name: outcome for name, outcome in results.items() if not isinstance(outcome, Finding)
        }
        counted = list(values.values())
        common = max(counted, key=counted.count, default=None)
        others = fold([name for name, outcome in values.items() if outcome == common])

        def finding(host: Host, outcome: T | Finding) -> Finding:
            if isinstance(outcome, Finding):
                return outcome
            if common is not None and outcome != common:
                return judge_odd(host, outcome, common, others)
            return judge_usual(host, outcome) if judge_usual else passed(host, str(outcome))

        return [finding(host, results[host.name]) for host in hosts]

    return judge
