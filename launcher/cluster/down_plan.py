"""Plan of `down`: the removal of everything on the nodes, and the gate that verifies it."""

from collections.abc import Callable, Sequence

from launcher.core import shell
from launcher.core.check import Finding
from launcher.core.domain import Node
from launcher.core.plan import Gate, Plan, Stage, Step
from launcher.core.transport import Answers, Command
from launcher.tools import compile_cache, docker
from launcher.tools.site import Site, network_verdict

# Only vlaunch's own files: a directory with other files stays, and is reported. Several nodes may
# share a home: another one may have been quicker. Empty folders of the compile cache go as well.
_CLEAR = (
    'rm -rf "$1/payload" "$1/secrets" "$1/front" "$1/server" "$1/$2" "$1/.$2."* && {'
    ' rmdir "$3"/* "$3" ${4:+"$4"} 2>/dev/null; rmdir "$1" 2>/dev/null || [ ! -d "$1" ]; } && {'
    ' rmdir "${1%/*}" 2>/dev/null || true; }'
)
_FORGET = 'rm -rf "$1/secrets" "$1/front" && rmdir "$1" && { rmdir "${1%/*}" 2>/dev/null || true; }'


def plan_down(site: Site, *, purge: bool = False) -> Plan:
    """Remove workers and ranks first, then the head, then files and, with `purge`, compile caches.
    Only nodes that could be reached are included.
    """
    head = [node for node in site.observed_nodes if node.head]
    workers = [node for node in site.observed_nodes if not node.head]
    ranks = _removal_steps(site, head, lambda role: role != "head")
    stages = (
        Stage(
            id="workers",
            title="Remove workers",
            steps=(*_removal_steps(site, workers, lambda _: True), *ranks),
        ),
        Stage(
            id="head",
            title="Remove the head",
            steps=_removal_steps(site, head, lambda role: role == "head"),
        ),
        Stage(id="files", title="Remove files and secrets", steps=_cleanup_steps(site)),
        Stage(
            id="compiled",
            title="Remove the compile cache",
            steps=_purge_steps(site) if purge else (),
        ),
        Stage(
            id="absent",
            title="Verify that nothing is left",
            gates=(_absent_gate(site),) if site.observed_nodes else (),
        ),
    )
    return Plan(verb="down", stages=stages, keep_going=True)


def _removal_steps(
    site: Site, nodes: Sequence[Node], matches_role: Callable[[str], bool]
) -> tuple[Step, ...]:
    """Remove the containers with a matching role; the title has an unusual name."""
    return tuple(
        Step(
            title=f"removing the {old.role} container"
            if old.name == site.container_name(node)
            else f"removing container {old.name}",
            command=Command(node=node.name, argv=docker.remove(node.docker, old.id), timeout=120),
        )
        for node in nodes
        for old in site.facts[node.name].containers
        if matches_role(old.role)
    )


def _cleanup_steps(site: Site) -> tuple[Step, ...]:
    nodes, facts = site.observed_nodes, site.facts
    disk = [_clear_step(site, node) for node in nodes if facts[node.name].has_directory]
    memory = [_forget_step(node, folder) for node in nodes for folder in facts[node.name].folders]
    return (*disk, *memory)


def _purge_steps(site: Site) -> tuple[Step, ...]:
    return tuple(
        _purge_step(site, node)
        for node in site.observed_nodes
        if (compile_cache := site.facts[node.name].compile_cache) is None
        or compile_cache.size is not None
    )


def _purge_step(site: Site, node: Node) -> Step:
    images = site.facts[node.name].images
    image = next((name for name, image in images.items() if image is not None), "")
    folder, around = _compile_cache_folders(site, node)
    argv = compile_cache.purge(node.docker, folder, parent=around, image=image)
    return Step(
        title="removing the compile cache",
        command=Command(node=node.name, argv=argv, timeout=600),
    )


def _compile_cache_folders(site: Site, node: Node) -> tuple[str, str]:
    """Return the compile cache's folder, and its parent unless the inventory sets it."""
    folder = site.cache_dir(node)
    return folder, "" if node.cache_dir else folder.rpartition("/")[0]


def _clear_step(site: Site, node: Node) -> Step:
    folders = (site.state_dir(node), network_verdict.FILE, *_compile_cache_folders(site, node))
    argv = ("sh", "-c", _CLEAR, "clear", *folders)
    return Step(
        title="removing node programs and secrets",
        command=Command(node=node.name, argv=argv, timeout=30),
    )


def _forget_step(node: Node, folder: str) -> Step:
    argv = ("sh", "-c", _FORGET, "forget", folder)
    return Step(
        title="removing secrets from memory",
        command=Command(node=node.name, argv=argv, timeout=30),
    )


def _absent_gate(site: Site) -> Gate:
    def ask(node: Node) -> Command:
        directory, cluster = site.state_dir(node), site.inventory.cluster
        program = shell.program_text("left_behind")
        listing = docker.list_ids(node.docker, cluster)
        return Command(
            node=node.name,
            argv=("sh", "-c", program, "left", directory, cluster, *listing),
            timeout=30,
        )

    def judge(answers: Answers) -> Sequence[Finding]:
        return [_judge_remains(node, answers) for node in site.observed_nodes]

    return Gate(
        id="absent",
        what="no container, file or secret of the cluster is left",
        queries=tuple(ask(node) for node in site.observed_nodes),
        judge=judge,
        deadline=20,
    )


def _judge_remains(node: Node, answers: Answers) -> Finding:
    answer = answers[node.name][0]
    if not answer.ok:
        return Finding(
            node=node.name,
            status="fail",
            text="cannot be checked for leftovers",
            evidence=answer.tail,
            fix="run `vlaunch down` again",
        )
    remains = answer.out.split("\n") if answer.out.strip() else []
    if not remains:
        return Finding(node=node.name, status="pass", text="nothing is left")
    return Finding(
        node=node.name,
        status="wait",
        text="still has " + ", ".join(line for line in remains if line),
        fix="run `vlaunch down` again; Docker may still be removing it",
    )
