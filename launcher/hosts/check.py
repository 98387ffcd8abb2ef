"""Checks of nodes: an id, a reason, and a judge that depends only on the evidence."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Literal, TypeVar, get_args

from launcher.core.check import Finding, passed, skipped
from launcher.core.domain import Inventory, Level, Node, fold
from launcher.core.expectations import Expectations, ExpectedGpu
from launcher.hosts.container_view import ContainerView
from launcher.hosts.pairs import PortProbe
from launcher.tools.host import HostFacts
from launcher.tools.host.survey import Survey

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
class HubAccess:
    """Hugging Face's response for model and token; `text` is its message, or the reason."""

    status: Literal[
        "ok", "unauthorized", "gated", "not found", "offline", "no token", "not asked"
    ] = "not asked"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All observations of a cluster by node, the only input of judges.

    Unreachable nodes are only in `missing`, with the reason. `port_probes` is None if no port was
    probed, with reasons per node in `probes_missing`; `inside` and `inside_missing` likewise for
    containers. `files` maps each node to the model's files (name → bytes), None without them;
    `model` may be empty. `required` is the network level to reach, `now` the time of observation.
    """

    inventory: Inventory
    facts: Mapping[str, HostFacts]
    inside: Mapping[str, ContainerView] = field(default_factory=dict)
    inside_missing: Mapping[str, str] = field(default_factory=dict)
    port_probes: tuple[PortProbe, ...] | None = None
    probes_missing: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, int] | None] = field(default_factory=dict)
    model: str = ""
    hub: HubAccess | None = None
    required: Level = "any"
    expectations: Expectations = field(default_factory=Expectations)
    missing: Mapping[str, str] = field(default_factory=dict)
    now: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @property
    def reached(self) -> tuple[Host, ...]:
        """The reachable nodes, in inventory order."""
        return tuple(
            Host(node=node, facts=self.facts[node.name], evidence=self)
            for node in self.inventory.nodes
            if node.name in self.facts
        )

    def host(self, name: str) -> Host | None:
        """Return the node with this name, None if unreachable."""
        if name not in self.facts:
            return None
        return Host(node=self.inventory.node(name), facts=self.facts[name], evidence=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A reachable node: its inventory entry, its facts, and the evidence of the whole cluster."""

    node: Node
    facts: HostFacts
    evidence: Evidence

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    @property
    def inventory(self) -> Inventory:
        """The node's inventory."""
        return self.evidence.inventory

    @property
    def survey(self) -> Survey | None:
        """The node's survey, None if it was not surveyed."""
        return self.facts.survey

    @property
    def expected_gpu(self) -> ExpectedGpu | None:
        """The expected figures of its first GPU."""
        gpu = next(iter(self.facts.used_gpus(self.node)), None)
        return self.evidence.expectations.gpu(gpu.name) if gpu else None


Judge = Callable[[Evidence], Sequence[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A condition to verify; `what` states it as a fact.

    `skip_reason` returns the reason if the check does not apply to a cluster, else an empty string.
    `needs` lists checks that must not fail before this one: nodes that fail them are skipped.
    """

    id: str
    what: str
    why: str
    judge: Judge
    group: Group
    skip_reason: Callable[[Inventory], str] = lambda _: ""
    needs: tuple[str, ...] = ()

    def applies(self, inventory: Inventory) -> bool:
        """Return whether the check applies to this cluster."""
        return not self.skip_reason(inventory)


def per_host(judge: Callable[[Host], Finding | None]) -> Judge:
    """Make a judge of all nodes from one of a single node; None passes."""

    def all_nodes(evidence: Evidence) -> Sequence[Finding]:
        return [judge(host) or passed(host) for host in evidence.reached]

    return all_nodes


def per_survey(judge: Callable[[Node, Survey], Finding]) -> Judge:
    """Make a judge of all nodes from one of a node's survey; nodes without a survey are skipped."""

    def judge_host(host: Host) -> Finding:
        return skipped(host, NOT_SURVEYED) if host.survey is None else judge(host.node, host.survey)

    return per_host(judge_host)


NOT_SURVEYED = "the node was not surveyed"


def collect_surveys(evidence: Evidence) -> tuple[dict[str, Survey], list[Finding]]:
    """Return the surveys by node, and a SKIP for each node without one."""
    available = {host.name: host.survey for host in evidence.reached if host.survey is not None}
    return available, [
        skipped(host, NOT_SURVEYED) for host in evidence.reached if host.name not in available
    ]


def ssh_command(node: Node) -> str:
    """Return the SSH command for a node, as a user types it."""
    login = f"{node.ssh.user}@{node.host}" if node.ssh.user else node.host
    port = f" -p {node.ssh.port}" if node.ssh.port not in (None, 22) else ""
    return f"ssh{port} {login}"


def skip_on_cpu(inventory: Inventory) -> str:
    """Return the reason to skip accelerator checks on a CPU cluster."""
    return "accelerator: cpu has no device and no driver" if inventory.accelerator == "cpu" else ""


def skip_unless_nvidia(inventory: Inventory) -> str:
    """Return the reason to skip NVIDIA checks."""
    kind = inventory.accelerator
    return "" if kind == "nvidia" else f"accelerator: {kind} has no NVIDIA driver"


def skip_without_rdma(inventory: Inventory) -> str:
    """Return the reason to skip RDMA checks."""
    ethernet = "network: fabric is ethernet, which promises no RDMA"
    return ethernet if inventory.fabric == "ethernet" else ""


def skip_single_node(inventory: Inventory) -> str:
    """Return the reason to skip checks between nodes."""
    return "a single node has no peers" if len(inventory.nodes) < 2 else ""


def uniform_value(
    value: Callable[[Host], T | Finding],
    judge_odd: Callable[[Host, T, T, str], Finding],
    judge_usual: Callable[[Host, T], Finding] | None = None,
) -> Judge:
    """Make a judge of a value that should be equal on all nodes.

    `value` returns a node's value, or its finding. `judge_odd` judges a deviating value; it
    receives the most common value (the first of equally common ones) and the nodes that have it.
    `judge_usual` judges the others, which pass by default.
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
