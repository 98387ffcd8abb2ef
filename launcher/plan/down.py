"""From what is there, everything that `down` removes, and the gate that proves that it is gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from launcher import shell
from launcher.checks.shape import Finding
from launcher.model import Inventory, Node
from launcher.plan import containers, verdict
from launcher.plan.shape import Answers, Gate, Plan, Stage, Step
from launcher.tools import docker
from launcher.tools.host import HostFacts
from launcher.transport import Command

# Only what vlaunch put there: a directory that holds something else is left, and said to be.
# Several nodes may share a home: another one may have been quicker.
_CLEAR = (
    'rm -rf "$1/payload" "$1/secrets" "$1/server" "$1/$2" "$1/.$2."* && { rmdir "$1" 2>/dev/null ||'
    ' [ ! -d "$1" ]; } && { rmdir "${1%/*}" 2>/dev/null || true; }'
)
_FORGET = 'rm -rf "$1/secrets" && rmdir "$1" && { rmdir "${1%/*}" 2>/dev/null || true; }'


def plan_down(inventory: Inventory, facts: Mapping[str, HostFacts]) -> Plan:
    """Remove workers and ranks first, then the head, then files; `facts` has only the nodes that
    could be reached.
    """
    nodes = [node for node in inventory.nodes if node.name in facts]
    workers = tuple(
        step
        for node in nodes
        if not node.head
        for step in _removals(node, facts[node.name], lambda _: True)
    )
    head = [node for node in nodes if node.head]
    ranks = tuple(
        step
        for node in head
        for step in _removals(node, facts[node.name], lambda role: role != "head")
    )
    rest = tuple(
        step
        for node in head
        for step in _removals(node, facts[node.name], lambda role: role == "head")
    )
    clear = tuple(
        Step(
            title="removing helper files and secrets",
            command=Command(
                node=node.name,
                argv=(
                    "sh",
                    "-c",
                    _CLEAR,
                    "clear",
                    containers.state_dir(inventory, node, facts[node.name]),
                    verdict.FILE,
                ),
                timeout=30,
            ),
        )
        for node in nodes
        if facts[node.name].has_directory
    )
    clear += tuple(
        Step(
            title="removing secrets from memory",
            command=Command(
                node=node.name, argv=("sh", "-c", _FORGET, "forget", folder), timeout=30
            ),
        )
        for node in nodes
        for folder in facts[node.name].folders
    )
    stages = (
        Stage(id="workers", title="Remove workers", steps=workers + ranks),
        Stage(id="head", title="Remove the head", steps=rest),
        Stage(id="files", title="Remove files and secrets", steps=clear),
        Stage(
            id="absent",
            title="Verify that nothing is left",
            gates=(_absent(inventory, nodes, facts),) if nodes else (),
        ),
    )
    return Plan(
        verb="down",
        stages=tuple(stage for stage in stages if stage.steps or stage.gates),
        keep_going=True,
    )


def _removals(node: Node, facts: HostFacts, wanted: Callable[[str], bool]) -> list[Step]:
    return [
        Step(
            title=f"removing container {each.name}",
            command=Command(node=node.name, argv=docker.remove(node.docker, each.id), timeout=120),
        )
        for each in facts.containers
        if wanted(each.role)
    ]


def _absent(inventory: Inventory, nodes: Sequence[Node], facts: Mapping[str, HostFacts]) -> Gate:
    def ask(node: Node) -> Command:
        directory = containers.state_dir(inventory, node, facts[node.name])
        program = shell.program("left_behind")
        listing = docker.list_ids(node.docker, inventory.cluster)
        return Command(
            node=node.name,
            argv=("sh", "-c", program, "left", directory, inventory.cluster, *listing),
            timeout=30,
        )

    def judge(answers: Answers) -> Sequence[Finding]:
        return [_judge(node, answers) for node in nodes]

    return Gate(
        id="absent",
        what="no container, file or secret of the cluster is left",
        ask=tuple(ask(node) for node in nodes),
        judge=judge,
        deadline=20,
    )


def _judge(node: Node, answers: Answers) -> Finding:
    answer = answers[node.name][0]
    if not answer.ok:
        return Finding(
            node=node.name,
            status="fail",
            text="cannot be asked whether anything is left",
            evidence=answer.tail,
            fix="run `vlaunch down` again",
        )
    left = answer.out.split("\n") if answer.out.strip() else []
    if not left:
        return Finding(node=node.name, status="pass", text="nothing is left")
    return Finding(
        node=node.name,
        status="wait",
        text="still has " + ", ".join(line for line in left if line),
        fix="run `vlaunch down` again; Docker may still be removing it",
    )
