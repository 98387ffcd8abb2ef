"""The network check as a plan: a probe in every container that will serve, the verdict as a gate, and a record on the head."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from launcher import placement
from launcher.checks import crossing, expected, network, transport
from launcher.checks.network import Verdict
from launcher.checks.shape import Finding
from launcher.errors import UnreadableAnswer
from launcher.model import Answer, Inventory, Level, Node
from launcher.placement import Placement
from launcher.plan import containers, files
from launcher.plan.shape import Answers, Gate, Plan, Stage, Step
from launcher.tools import docker
from launcher.tools import network as probe
from launcher.tools.expectations import Expectations
from launcher.tools.host import HostFacts
from launcher.transport import Command

FILE = "network.json"
_LEVELS: tuple[Level, ...] = ("any", "rdma", "gdrdma")
# Written whole, as secrets are: a reader never sees half of it.
_STORE = 'umask 022 && mkdir -p "$1" && chmod 711 "$1" && new=$1/.$2.$$ && cat > "$new" && mv "$new" "$1/$2"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """How to check: the required level (`None`: the inventory's), ranks a node (`None`: its GPUs), and deadlines in seconds.

    `nonce` tells this run's ranks from those of another; with `fresh` they run in throw-away containers, whatever runs already:
    `mp` ranks will be new ones. `collective` means that collectives will cross nodes, and `crossing` is the split that makes
    them do so, where the model's shape is known. `known` is what GPUs and network cards should do.
    """

    nonce: str
    require: Level | Literal["auto"] | None = None
    ranks_per_node: int | None = None
    deadline: float | None = None
    pair_timeout: float = 20.0
    collective: bool = True
    crossing: crossing.Crossing | None = None
    known: Expectations = field(default_factory=Expectations)
    fresh: bool = False


@dataclass(slots=True, kw_only=True)
class Proof:
    """What the gate saw, for the step that writes it down and for those who print it."""

    verdict: Verdict | None = None
    reports: dict[str, probe.Report] = field(default_factory=dict)
    ask: Ask | None = None


def prepare(inventory: Inventory, facts: Mapping[str, HostFacts]) -> Plan:
    """Bring the probe to every node; where no Ray container runs, the image must be there for a throw-away one."""

    def judge(_: Answers) -> Sequence[Finding]:
        return [
            Finding(node=node.name, status="pass", text="")
            if containers.own(inventory, node, facts.get(node.name)) or facts[node.name].images.get(inventory.image)
            else Finding(
                node=node.name, status="fail", text=f"has neither a running Ray container nor the image {inventory.image}",
                fix="run `vlaunch up` first",
            )
            for node in inventory.nodes
        ]  # fmt: skip

    writes = tuple(
        step for node in inventory.nodes for step in files.steps(inventory, node, facts.get(node.name), {}, fresh=False)
    )
    gate = Gate(id="container", what="every node has a container to measure in", judge=judge)
    look = Stage(id="container", title="Look for the containers that will serve", gates=(gate,))
    write = Stage(id="files", title="Update helper files", steps=writes)
    return Plan(verb="check-nccl", stages=(look, write) if writes else (look,))


def commands(inventory: Inventory, facts: Mapping[str, HostFacts], ask: Ask) -> list[Command]:
    """Return the probe of every node, to be run all at once.

    It runs in the node's Ray container, or, where none runs, in a throw-away one with the rights and devices of a rank's.
    """
    return [
        Command(
            node=node.name,
            argv=_inside(inventory, node, facts.get(node.name), ask, rank),
            timeout=deadline(inventory, ask) + 30,
            stdin=bytes,
            hold_stdin=True,
            together=True,
        )
        for rank, node in enumerate(_ordered(inventory))
    ]


def deadline(inventory: Inventory, ask: Ask) -> float:
    """Return how many seconds the probes may take in all: time to start and to meet, and each round's at its worst."""
    return ask.deadline or 90.0 + (ask.pair_timeout + 5.0) * (len(inventory.nodes) + 1)


def ranks(inventory: Inventory, ask: Ask) -> int:
    """Return the ranks on each node: as asked, else as many as every node has GPUs."""
    return ask.ranks_per_node or min(node.gpus for node in inventory.nodes)


def read(answers: Mapping[str, Sequence[Answer]]) -> tuple[dict[str, probe.Report], dict[str, str]]:
    """Read the probes' answers: reports, and why there is none, by node."""
    reports, missing = {}, {}
    for node, said in answers.items():
        try:
            reports[node] = probe.parse_report(said[-1])
        except UnreadableAnswer as error:
            told = error.evidence.strip().splitlines()[-1:]
            missing[node] = ": ".join((error.message.removeprefix(f"{node}: "), *told))
    return reports, missing


def gate(inventory: Inventory, facts: Mapping[str, HostFacts], ask: Ask, proof: Proof) -> Gate:
    """Every pair of nodes reaches the required level; what was seen is left in `proof`."""

    def judge(answers: Answers) -> Sequence[Finding]:
        proof.ask = ask
        reports, missing = read(answers)
        first, proof.reports = proof.reports, transport.better(proof.reports, reports)
        level = transport.required(
            inventory,
            gpus=[report.gpu for report in reports.values()],
            rdma=[name for name, report in reports.items() if report.rdma],
            known=ask.known,
            asked=ask.require,
        )
        seen = transport.judge(inventory, proof.reports, missing, level, collective=ask.collective)
        slower = expected.judge(inventory, seen, facts, ask.known, ranks_per_node=ranks(inventory, ask))
        proof.verdict = replace(seen, findings=(*seen.findings, *slower))
        if not first and transport.doubtful(proof.verdict):
            text = "a pair is slower than the others; measuring again to be sure"
            return [Finding(node="", status="wait", text=text)]
        if not proof.verdict.passed:
            return proof.verdict.findings
        passed = Finding(node="", status="pass", text=summary(proof.verdict))
        measured = crossing.figures(proof.verdict)
        costs = [crossing.judge(ask.crossing, measured)] if ask.crossing is not None and measured is not None else []
        return [*proof.verdict.findings, passed, *costs]

    return Gate(
        id="network",
        what="every pair of nodes reaches the required level of the network",
        doing="measuring the network between every pair of nodes, in the containers that will serve",
        ask=tuple(commands(inventory, facts, ask)),
        judge=judge,
        deadline=2 * deadline(inventory, ask) + 60,
    )


def stages(inventory: Inventory, facts: Mapping[str, HostFacts], ask: Ask, proof: Proof, *, taken: str) -> tuple[Stage, ...]:
    """Return the gate, and, behind it, the step that keeps the verdict: what comes after them has a network that was proven."""
    return (
        Stage(id="network", title="Prove the network between the nodes", gates=(gate(inventory, facts, ask, proof),)),
        Stage(id="verdict", title="Keep the verdict", steps=(record(inventory, facts, proof, taken=taken),)),
    )


def split(inventory: Inventory, placed: Placement, config: Mapping[str, Any] | None) -> crossing.Crossing | None:
    """Return the split whose cost is worth telling: its TP groups cross nodes, and the model's shape is known."""
    shape = placement.shape_of(config)
    inside = min(node.gpus for node in inventory.nodes)
    while inside > 1 and placed.world % inside:
        inside -= 1
    if not placed.crosses or shape.layers is None or shape.hidden is None:
        return None
    return crossing.Crossing(
        tp=placed.tp, pp=placed.pp, instead=(inside, placed.world // inside), layers=shape.layers, hidden=shape.hidden
    )


def summary(verdict: Verdict) -> str:
    """Return what was proven in one line."""
    kinds = sorted({cell.transport for cell in verdict.cells if cell.transport}) or ["nothing"]
    rates = [cell.bandwidth for cell in verdict.cells if cell.bandwidth is not None]
    times = [cell.latency for cell in verdict.cells if cell.latency is not None]
    said = [f"{len(verdict.cells) // 2} pairs over {', '.join(kinds)}"]
    if rates:
        low, high = network.rate(min(rates)), network.rate(max(rates))
        said.append(low if low == high else f"{low} to {high}")
    if times:
        said.append(f"{min(times) * 1e6:.0f} to {max(times) * 1e6:.0f} µs")
    return ", ".join(said)


def incarnation(inventory: Inventory, facts: Mapping[str, HostFacts]) -> str:
    """Return a word that changes whenever a Ray container is another one or started again; empty when one does not run."""
    own = [containers.own(inventory, node, facts.get(node.name)) for node in inventory.nodes]
    if None in own:
        return ""
    words = [(each.id, each.started) for each in own if each is not None]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def record(inventory: Inventory, facts: Mapping[str, HostFacts], proof: Proof, *, taken: str) -> Step:
    """Write the verdict down on the head, for `serve` and `status`."""
    head = inventory.head

    def text() -> bytes:
        return json.dumps(as_record(inventory, facts, proof, taken=taken)).encode()

    directory = containers.state_dir(inventory, head, facts.get(head.name))
    return Step(
        title="keeping the verdict on the head",
        command=Command(
            node=head.name, argv=("sh", "-c", _STORE, "keep", directory, FILE), timeout=30, stdin=text,
            shown_stdin="printf '{}'",
        ),
    )  # fmt: skip


def as_record(inventory: Inventory, facts: Mapping[str, HostFacts], proof: Proof, *, taken: str) -> dict[str, Any]:
    """Return a verdict as it is kept: which incarnation it is about, and what was proven."""
    verdict = proof.verdict
    if verdict is None:
        return {}
    ask = proof.ask
    fresh = ask is not None and ask.fresh
    said = {
        # Of throw-away containers nothing is left that the verdict could be about later.
        "incarnation": "" if fresh else incarnation(inventory, facts),
        "taken": taken,
        "passed": verdict.passed,
        "asked": (ask.require if ask is not None else None) or inventory.require,
        "required": verdict.required,
        "collective": verdict.collective is not None and not verdict.collective.error and verdict.collective.correct,
        "summary": summary(verdict),
        **({"figures": asdict(measured)} if (measured := crossing.figures(verdict)) is not None else {}),
    }
    finite: dict[str, Any] = _finite(said)
    return finite


def ask_record(inventory: Inventory, facts: Mapping[str, HostFacts]) -> Command:
    """Ask the head for the last verdict."""
    head = inventory.head
    path = f"{containers.state_dir(inventory, head, facts.get(head.name))}/{FILE}"
    return Command(node=head.name, argv=("sh", "-c", 'cat "$1" 2>/dev/null', "verdict", path), timeout=20)


def parse_record(answer: Answer) -> dict[str, Any]:
    """Read the last verdict; empty where there is none that can be read: then nothing is proven."""
    try:
        found = json.loads(answer.out)
    except (ValueError, RecursionError):
        return {}
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("passed"), bool)
        or not all(isinstance(found.get(word), str) for word in ("incarnation", "taken", "required", "summary"))
        or found["required"] not in _LEVELS
    ):
        return {}
    figures = found.pop("figures", None)
    if isinstance(figures, dict) and all(isinstance(each, (int, float)) and 0 <= each < math.inf for each in figures.values()):
        found |= {"figures": figures} if figures.get("algbw") and figures.get("bandwidth") else {}
    return found


def proven(
    inventory: Inventory, facts: Mapping[str, HostFacts], kept: Mapping[str, Any], *, require: Level | None, collective: bool
) -> bool:
    """True when the kept verdict is about this very incarnation and covers what is asked.

    What `auto` stands for depends on what was found on the nodes: only a verdict on `auto` covers it, and the highest level.
    """
    here, wanted, level = incarnation(inventory, facts), require or inventory.require, kept.get("required")
    if level not in _LEVELS:
        return False
    covers = (
        kept.get("asked") == "auto" or level == _LEVELS[-1]
        if wanted == "auto"
        else _LEVELS.index(level) >= _LEVELS.index(wanted)
    )
    return (
        bool(here)
        and kept.get("incarnation") == here
        and kept.get("passed") is True
        and (not collective or kept.get("collective") is True)
        and covers
    )


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict ready for JSON: bandwidth in bytes per second, latency in seconds."""
    said: dict[str, Any] = _finite({**asdict(verdict), "passed": verdict.passed, "summary": summary(verdict)})
    return said


def _finite(said: Any) -> Any:
    """Return plain data without numbers that JSON does not have."""
    if isinstance(said, Mapping):
        return {key: _finite(value) for key, value in said.items()}
    if isinstance(said, (list, tuple)):
        return [_finite(each) for each in said]
    return None if isinstance(said, float) and not math.isfinite(said) else said


def _ordered(inventory: Inventory) -> tuple[Node, ...]:
    return (inventory.head, *inventory.workers)


def _inside(inventory: Inventory, node: Node, facts: HostFacts | None, ask: Ask, rank: int) -> tuple[str, ...]:
    nodes = _ordered(inventory)
    own = None if ask.fresh else containers.own(inventory, node, facts)
    argv = probe.probe(
        node=node.name,
        node_rank=rank,
        nodes={one.name: one.ip for one in nodes},
        ranks_per_node=ranks(inventory, ask),
        master=inventory.head.ip,
        port=inventory.ports.probe,
        backend="gloo" if inventory.accelerator == "cpu" else "nccl",
        deadline=deadline(inventory, ask),
        pair_timeout=ask.pair_timeout,
        nonce=ask.nonce,
        running=own is not None,
    )
    if own is not None:
        return docker.exec_(node.docker, own.name, *argv, stdin=True)
    spec = containers.probe_spec(inventory, node, facts, argv)
    return docker.run(node.docker, spec, once=True)
