"""The network check as a plan: a probe in every container that will serve, the verdict as a gate,
and a record on the head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from launcher.core.check import Finding
from launcher.core.domain import Answer, Inventory, Node
from launcher.core.errors import UnreadableAnswer
from launcher.core.expectations import required_level
from launcher.core.plan import Gate, Plan, Stage, Step, observed
from launcher.core.transport import Answers, Command
from launcher.hosts.check import Evidence
from launcher.network import expected, network_shape, transport
from launcher.network import probe_command as probe
from launcher.network.network_shape import Ask, Measurement, Proof
from launcher.tools import containers, docker, network_verdict, node_files
from launcher.tools.network_verdict import Record, ServerLinks
from launcher.tools.site import Site

# Written whole, as secrets are: a reader never sees half of it.
_STORE = (
    'umask 022 && mkdir -p "$1" && chmod 711 "$1" && new=$1/.$2.$$ && cat > "$new" && mv "$new"'
    ' "$1/$2"'
)
# The agent sees its own folder alone: for its metrics it gets a copy, where `up` has made that
# folder.
_COPY = (
    ' && { [ ! -d "$1/server" ] || { cp "$1/$2" "$1/server/.$2.$$" && mv "$1/server/.$2.$$"'
    ' "$1/server/$2"; } || true; }'
)


def prepare(site: Site) -> Plan:
    """Bring the probe to every node; where no Ray container runs, the image must be there for a
    throw-away one.
    """
    writes = tuple(
        step for node in site.nodes for step in node_files.steps(site, node, {}, fresh=False)
    )
    gate = observed(
        "container",
        "every node has a container to measure in",
        lambda: [_measurable(site, node) for node in site.nodes],
    )
    container_stage = Stage(
        id="container", title="Look for the containers that will serve", gates=(gate,)
    )
    files_stage = Stage(id="files", title="Update helper files", steps=writes)
    return Plan(
        verb="check-nccl", stages=(container_stage, files_stage) if writes else (container_stage,)
    )


def _measurable(site: Site, node: Node) -> Finding:
    image = site.inventory.image
    if site.running(node) is not None or site.image(node, image) is not None:
        return Finding(node=node.name, status="pass", text="")
    return Finding(
        node=node.name,
        status="fail",
        text=f"has neither a running Ray container nor the image {image}",
        fix="run `vlaunch up` first",
    )


def commands(site: Site, options: Ask) -> list[Command]:
    """Return the probe of every node, to be run all at once.

    It runs in the node's container, or, where none runs, in a throw-away one with the same rights
    and devices.
    """
    return [
        Command(
            node=node.name,
            argv=_inside(site, node, options, rank),
            timeout=deadline(site.inventory, options) + 30,
            stdin=lambda: probe.program_input(options.certificate),
            hold_stdin=True,
            together=True,
        )
        for rank, node in enumerate(_ordered(site.inventory))
    ]


def deadline(inventory: Inventory, options: Ask) -> float:
    """Return how many seconds the probes may take in all: time to import torch and to meet, and
    each round's at its worst.
    """
    start = probe.TORCH + probe.WINDOW
    return options.deadline or start + (options.pair_timeout + 5.0) * (len(inventory.nodes) + 1)


def ranks(inventory: Inventory, options: Ask) -> int:
    """Return the ranks on each node: as asked, else as many as every node has GPUs."""
    return options.ranks_per_node or min(node.gpus for node in inventory.nodes)


def read(answers: Mapping[str, Sequence[Answer]]) -> tuple[dict[str, probe.Report], dict[str, str]]:
    """Read the probes' answers: reports, and why there is none, by node."""
    reports, missing = {}, {}
    for node, node_answers in answers.items():
        try:
            report = probe.parse_report(node_answers[-1])
            if report.node == node:
                reports[node] = report
            else:
                missing[node] = "the network probe answered for another node"
        except UnreadableAnswer as error:
            last_line = error.evidence.strip().splitlines()[-1:]
            missing[node] = ": ".join((error.message.removeprefix(f"{node}: "), *last_line))
    return reports, missing


def gate(site: Site, options: Ask, result: Proof) -> Gate:
    """Every pair of nodes reaches the required level; what was seen is left in `proof`."""
    inventory = site.inventory

    def judge(answers: Answers) -> Sequence[Finding]:
        result.ask = options
        reports, missing = read(answers)
        first, result.reports = result.reports, transport.better(result.reports, reports)
        level = required_level(
            inventory,
            gpus=[report.gpu for report in reports.values()],
            rdma=[name for name, report in reports.items() if report.rdma],
            expectations=options.known,
            distant_nodes=[
                name for name, report in reports.items() if report.shared_switch is False
            ],
            requested=options.require,
        )
        measurement = Measurement(inventory=inventory, reports=result.reports, missing=missing)
        verdict = transport.judge(measurement, level, collective=options.collective)
        surveyed = Evidence(inventory=inventory, facts=site.facts, expectations=options.known)
        slower = expected.judge(verdict, surveyed, ranks_per_node=ranks(inventory, options))
        result.verdict = replace(verdict, findings=(*verdict.findings, *slower))
        if not first and transport.doubtful(result.verdict):
            text = "a pair is slower than the others; measuring again to be sure"
            return [Finding(node="", status="wait", text=text)]
        if not result.verdict.passed:
            return result.verdict.findings
        passed = Finding(node="", status="pass", text=network_shape.summary(result.verdict))
        return [*result.verdict.findings, passed]

    return Gate(
        id="network",
        what="every pair of nodes reaches the required level of the network",
        doing=(
            "measuring the network between every pair of nodes, in the containers that will serve"
        ),
        ask=tuple(commands(site, options)),
        judge=judge,
        deadline=2 * deadline(inventory, options) + 60,
    )


def stages(site: Site, options: Ask, result: Proof, *, measured_at: str) -> tuple[Stage, ...]:
    """Return the gate, and, behind it, the step that keeps the verdict: what comes after them has a
    network that was proven.
    """
    partial_site = network_verdict.only(site, options.nodes)
    return (
        Stage(
            id="network",
            title="Prove the network between the nodes",
            steps=(forget(site),),
            gates=(gate(partial_site, options, result),),
        ),
        Stage(
            id="verdict",
            title="Keep the verdict",
            steps=(record(site, result, measured_at=measured_at),),
        ),
    )


def record(site: Site, result: Proof, *, measured_at: str) -> Step:
    """Write the verdict down on the head, for `serve` and `status`."""
    return _store(site, lambda: network_shape.as_record(site, result, measured_at=measured_at))


def confirmed(site: Site, record: Record, *, server: str, id: str, links: str) -> Step:
    """Write down, beside the verdict, what the own logs of a server say of its ranks' links."""
    servers = {**record.servers, server: ServerLinks(id=id, said=transport)}
    return _store(site, lambda: replace(record, servers=servers))


def _store(site: Site, record: Callable[[], Record]) -> Step:
    return Step(
        title="keeping the verdict on the head",
        command=Command(
            node=site.head.name,
            argv=(
                "sh",
                "-c",
                _STORE + _COPY,
                "keep",
                site.state_dir(site.head),
                network_verdict.FILE,
            ),
            timeout=30,
            stdin=lambda: json.dumps(asdict(record())).encode(),
            shown_stdin="printf '{}'",
        ),
    )


def forget(site: Site) -> Step:
    """Remove the last verdict before another is made: a check that fails must not leave an older
    proof behind.
    """
    folder = site.state_dir(site.head)
    argv = (
        "rm",
        "-f",
        f"{folder}/{network_verdict.FILE}",
        f"{folder}/server/{network_verdict.FILE}",
    )
    return Step(
        title="forgetting the last verdict",
        command=Command(node=site.head.name, argv=argv, timeout=30),
    )


def _ordered(inventory: Inventory) -> tuple[Node, ...]:
    return (inventory.head, *inventory.workers)


def _inside(site: Site, node: Node, options: Ask, rank: int) -> tuple[str, ...]:
    inventory, container = site.inventory, site.running(node)
    argv = probe.probe(
        node=node.name,
        node_rank=rank,
        nodes={peer.name: peer.ip for peer in _ordered(inventory)},
        ranks_per_node=ranks(inventory, options),
        master=inventory.head.ip,
        port=inventory.ports.probe,
        backend="gloo" if inventory.accelerator == "cpu" else "nccl",
        deadline=deadline(inventory, options),
        pair_timeout=options.pair_timeout,
        nonce=options.nonce,
    )
    if container is not None:
        return docker.exec_(node.docker, container.name, *argv, stdin=True)
    spec = containers.probe_spec(site, node, argv)
    return docker.run(node.docker, spec, once=True)
