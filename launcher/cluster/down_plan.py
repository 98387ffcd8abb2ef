"""From what is there, everything that `down` removes, and the gate that proves that it is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.core import shell
from launcher.core.check import Finding
from launcher.core.domain import Node
from launcher.core.plan import Gate, Plan, Stage, Step
from launcher.core.transport import Answers, Command
from launcher.tools import compile_cache, docker, network_verdict
from launcher.tools.site import Site

# Only what vlaunch put there: a directory that holds something else is left, and said to be.
# Several nodes may share a home: another one may have been quicker. Where nothing was compiled,
# its folders go as well.
_CLEAR = (
    'rm -rf "$1/payload" "$1/secrets" "$1/server" "$1/$2" "$1/.$2."* && {'
    ' rmdir "$3"/* "$3" ${4:+"$4"} 2>/dev/null; rmdir "$1" 2>/dev/null || [ ! -d "$1" ]; } && {'
    ' rmdir "${1%/*}" 2>/dev/null || true; }'
)
_FORGET = 'rm -rf "$1/secrets" && rmdir "$1" && { rmdir "${1%/*}" 2>/dev/null || true; }'


def plan_down(site: Site, *, purge: bool = False) -> Plan:
    """Remove workers and ranks first, then the head, then files, and, with `purge`, what engines
    compiled; what was seen is only of the nodes that could be reached.
    """
    head = [node for node in site.seen if node.head]
    workers = (
        *_removals(site, [node for node in site.seen if not node.head], lambda _: True),
        *_removals(site, head, lambda role: role != "head"),
    )
    stages = (
        Stage(id="workers", title="Remove workers", steps=workers),
        Stage(
            id="head",
            title="Remove the head",
            steps=_removals(site, head, lambda role: role == "head"),
        ),
        Stage(id="files", title="Remove files and secrets", steps=_clearing(site)),
        Stage(
            id="compiled",
            title="Remove what engines compiled",
            steps=_purging(site) if purge else (),
        ),
        Stage(
            id="absent",
            title="Verify that nothing is left",
            gates=(_absent(site),) if site.seen else (),
        ),
    )
    return Plan(
        verb="down",
        stages=tuple(stages),
        keep_going=True,
    )


def _removals(site: Site, nodes: Sequence[Node], wanted: Callable[[str], bool]) -> tuple[Step, ...]:
    """Remove the containers whose role is wanted; one that has another name than its node's own is
    named.
    """
    return tuple(
        Step(
            title=f"removing the {each.role} container"
            if each.name == site.container_name(node)
            else f"removing container {each.name}",
            command=Command(node=node.name, argv=docker.remove(node.docker, each.id), timeout=120),
        )
        for node in nodes
        for each in site.facts[node.name].containers
        if wanted(each.role)
    )


def _clearing(site: Site) -> tuple[Step, ...]:
    """Remove what lies on the disk of each node, then what lies in memory."""
    nodes, facts = site.seen, site.facts
    disk = [_clear(site, node) for node in nodes if facts[node.name].has_directory]
    memory = [_forget(node, folder) for node in nodes for folder in facts[node.name].folders]
    return (*disk, *memory)


def _purging(site: Site) -> tuple[Step, ...]:
    return tuple(
        _purge(site, node)
        for node in site.seen
        if (found := site.facts[node.name].compiled) is None or found.size is not None
    )


def _purge(site: Site, node: Node) -> Step:
    images = site.facts[node.name].images
    image = next((name for name, image in images.items() if image is not None), "")
    folder, around = _compiled(site, node)
    argv = compile_cache.purge(node.docker, folder, around=around, image=image)
    return Step(
        title="removing what engines compiled",
        command=Command(node=node.name, argv=argv, timeout=600),
    )


def _compiled(site: Site, node: Node) -> tuple[str, str]:
    """Return the folder of what a cluster's engines compiled, and the one around it, where that is
    no folder that the inventory names.
    """
    folder = site.cache_dir(node)
    return folder, "" if node.cache_dir else folder.rpartition("/")[0]


def _clear(site: Site, node: Node) -> Step:
    directory = site.state_dir(node)
    argv = ("sh", "-c", _CLEAR, "clear", directory, network_verdict.FILE, *_compiled(site, node))
    return Step(
        title="removing helper files and secrets",
        command=Command(node=node.name, argv=argv, timeout=30),
    )


def _forget(node: Node, folder: str) -> Step:
    argv = ("sh", "-c", _FORGET, "forget", folder)
    return Step(
        title="removing secrets from memory",
        command=Command(node=node.name, argv=argv, timeout=30),
    )


def _absent(site: Site) -> Gate:
    def ask(node: Node) -> Command:
        directory, cluster = site.state_dir(node), site.inventory.cluster
        program = shell.program("left_behind")
        listing = docker.list_ids(node.docker, cluster)
        return Command(
            node=node.name,
            argv=("sh", "-c", program, "left", directory, cluster, *listing),
            timeout=30,
        )

    def judge(answers: Answers) -> Sequence[Finding]:
        return [_judge(node, answers) for node in site.seen]

    return Gate(
        id="absent",
        what="no container, file or secret of the cluster is left",
        ask=tuple(ask(node) for node in site.seen),
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
