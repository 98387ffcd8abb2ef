"""Plan of the network check: a probe in every container that will serve, the verdict as a gate, and
a record on the head.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from launcher.core.check import Finding
from launcher.core.domain import Answer, Inventory, Node
from launcher.core.errors import UnreadableAnswer
from launcher.core.expectations import required_level
from launcher.core.plan import Gate, Plan, Stage, Step, precomputed_gate
from launcher.core.transport import Answers, Command
from launcher.hosts.check import Evidence
from launcher.network import expected, network_shape, transport
from launcher.network import probe_command as probe
from launcher.network.network_shape import CheckOptions, CheckResult, Measurement
from launcher.tools import containers, docker
from launcher.tools.shipped import node_files
from launcher.tools.site import Site, network_verdict
from launcher.tools.site.network_verdict import NetworkRecord, ServerLinks

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


def plan_prepare(site: Site) -> Plan:
    """Copy the probe to every node; without a Ray container, a node needs the image."""
    writes = tuple(
        step for node in site.nodes for step in node_files.file_steps(site, node, {}, fresh=False)
    )
    gate = precomputed_gate(
        "container",
        "every node has a container to measure in",
        lambda: [_check_measurable(site, node) for node in site.nodes],
    )
    check = Stage(id="container", title="Find the serving containers", gates=(gate,))
    update = Stage(id="files", title="Update node programs", steps=writes)
    return Plan(verb="check-nccl", stages=(check, update) if writes else (check,))


def _check_measurable(site: Site, node: Node) -> Finding:
    image = site.inventory.image
    if site.running_container(node) is not None or site.image(node, image) is not None:
        return Finding(node=node.name, status="pass", text="")
    return Finding(
        node=node.name,
        status="fail",
        text=f"has neither a running Ray container nor the image {image}",
        fix="run `vlaunch up` first",
    )


def probe_commands(site: Site, options: CheckOptions) -> list[Command]:
    """Return the probe commands of all nodes, to run at once.

    The probe runs in the node's container, or in a temporary one with the same rights and devices.
    """
    return [
        Command(
            node=node.name,
            argv=_probe_argv(site, node, options, rank),
            timeout=probe_deadline(site.inventory, options) + 30,
            stdin=lambda: probe.program_input(options.certificate),
            hold_stdin=True,
            simultaneous=True,
        )
        for rank, node in enumerate(_head_first(site.inventory))
    ]


def probe_deadline(inventory: Inventory, options: CheckOptions) -> float:
    """Return the time limit of all probes in seconds: importing torch, the rendezvous, and the
    worst case of each round.
    """
    start = probe.TORCH + probe.WINDOW
    return options.deadline or start + (options.pair_timeout + 5.0) * (len(inventory.nodes) + 1)


def ranks_per_node(inventory: Inventory, options: CheckOptions) -> int:
    """Return the ranks per node: the requested number, else the smallest number of GPUs."""
    return options.ranks_per_node or min(node.gpus for node in inventory.nodes)


def parse_answers(
    answers: Mapping[str, Sequence[Answer]],
) -> tuple[dict[str, probe.Report], dict[str, str]]:
    """Parse the probes' answers: reports, and reasons for missing ones, by node."""
    reports, missing = {}, {}
    for node, node_answers in answers.items():
        try:
            report = probe.parse_report(node_answers[-1])
            if report.node == node:
                reports[node] = report
            else:
                missing[node] = "the network probe's report is from another node"
        except UnreadableAnswer as error:
            last_line = error.evidence.strip().splitlines()[-1:]
            missing[node] = ": ".join((error.message.removeprefix(f"{node}: "), *last_line))
    return reports, missing


def network_gate(site: Site, options: CheckOptions, result: CheckResult) -> Gate:
    """Require that every pair of nodes reaches the level; results are stored in `result`."""
    inventory = site.inventory

    def judge(answers: Answers) -> Sequence[Finding]:
        result.options = options
        reports, missing = parse_answers(answers)
        first, result.reports = result.reports, transport.merge_best(result.reports, reports)
        level = required_level(
            inventory,
            gpus=[report.gpu for report in reports.values()],
            rdma=[name for name, report in reports.items() if report.rdma],
            expectations=options.expectations,
            distant_nodes=[
                name for name, report in reports.items() if report.shared_switch is False
            ],
            requested=options.require,
        )
        measured = Measurement(inventory=inventory, reports=result.reports, missing=missing)
        verdict = transport.judge(measured, level, collective=options.collective)
        evidence = Evidence(
            inventory=inventory, facts=site.facts, expectations=options.expectations
        )
        slower = expected.judge(
            verdict, evidence, ranks_per_node=ranks_per_node(inventory, options)
        )
        result.verdict = replace(verdict, findings=(*verdict.findings, *slower))
        if not first and transport.is_only_slow(result.verdict):
            text = "a pair is slower than the others; measuring again to be sure"
            return [Finding(node="", status="wait", text=text)]
        if not result.verdict.passed:
            return result.verdict.findings
        passed = Finding(node="", status="pass", text=network_shape.summarize(result.verdict))
        return [*result.verdict.findings, passed]

    return Gate(
        id="network",
        what="every pair of nodes reaches the required level of the network",
        progress_text=(
            "measuring the network between every pair of nodes, in the containers that will serve"
        ),
        queries=tuple(probe_commands(site, options)),
        judge=judge,
        deadline=2 * probe_deadline(inventory, options) + 60,
    )


def check_stages(
    site: Site, options: CheckOptions, result: CheckResult, *, measured_at: str
) -> tuple[Stage, ...]:
    """Return the gate's stage, and the stage that saves the verdict behind it."""
    partial_site = network_verdict.narrow_site(site, options.nodes)
    return (
        Stage(
            id="network",
            title="Check the network between the nodes",
            steps=(forget_verdict(site),),
            gates=(network_gate(partial_site, options, result),),
        ),
        Stage(
            id="verdict",
            title="Save the verdict",
            steps=(record_verdict(site, result, measured_at=measured_at),),
        ),
    )


def record_verdict(site: Site, result: CheckResult, *, measured_at: str) -> Step:
    """Save the verdict on the head, for `serve` and `status`."""
    return _store_record(
        site, lambda: network_shape.to_record(site, result, measured_at=measured_at)
    )


def record_confirmation(
    site: Site, record: NetworkRecord, *, server: str, id: str, links: str
) -> Step:
    """Save the links in a server's own logs beside the verdict."""
    servers = {**record.servers, server: ServerLinks(id=id, said=links)}
    return _store_record(site, lambda: replace(record, servers=servers))


def _store_record(site: Site, record: Callable[[], NetworkRecord]) -> Step:
    return Step(
        title="saving the verdict on the head",
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


def forget_verdict(site: Site) -> Step:
    """Remove the last verdict: a failing check must not leave an older one behind."""
    folder = site.state_dir(site.head)
    argv = (
        "rm",
        "-f",
        f"{folder}/{network_verdict.FILE}",
        f"{folder}/server/{network_verdict.FILE}",
    )
    return Step(
        title="removing the previous verdict",
        command=Command(node=site.head.name, argv=argv, timeout=30),
    )


def _head_first(inventory: Inventory) -> tuple[Node, ...]:
    return (inventory.head, *inventory.workers)


def _probe_argv(site: Site, node: Node, options: CheckOptions, rank: int) -> tuple[str, ...]:
    inventory, container = site.inventory, site.running_container(node)
    argv = probe.probe_argv(
        node=node.name,
        node_rank=rank,
        nodes={peer.name: peer.ip for peer in _head_first(inventory)},
        ranks_per_node=ranks_per_node(inventory, options),
        master=inventory.head.ip,
        port=inventory.ports.probe,
        backend="gloo" if inventory.accelerator == "cpu" else "nccl",
        deadline=probe_deadline(inventory, options),
        pair_timeout=options.pair_timeout,
        nonce=options.nonce,
    )
    if container is not None:
        return docker.exec_(node.docker, container.name, *argv, stdin=True)
    spec = containers.probe_spec(site, node, argv)
    return docker.run(node.docker, spec, once=True)
