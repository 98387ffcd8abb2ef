"""From what was asked and what was seen, everything that `up` will do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from launcher.checks import host, images
from launcher.checks.shape import Check, Evidence, Finding
from launcher.model import Inventory, Node, Secret
from launcher.plan import containers, files, gates
from launcher.plan.shape import Answers, Gate, Plan, Stage, Step, not_empty
from launcher.tools import derived, docker
from launcher.tools.host import HostFacts
from launcher.transport import Command

Facts = Mapping[str, HostFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayImage:
    """The image that the containers run, and how to make it where it is missing.

    When the base image has all that is needed, or the cluster has no Ray, `tag` is the base image
    and there is no recipe. `shown` is the shell command that prints the build context.
    """

    tag: str
    ray_version: str
    python_version: str
    recipe: derived.Recipe | None = None
    shown: str = ""


def base_image(inventory: Inventory) -> RayImage:
    """Return the inventory's own image: what the containers of a cluster without Ray run."""
    return RayImage(tag=inventory.image, ray_version="", python_version="")


def plan_image(inventory: Inventory, facts: Facts) -> Plan:
    """Preflight, then the inventory's image present on every node."""
    missing = [node for node in inventory.nodes if not _image(facts, node, inventory.image)]
    pulls = tuple(
        Step(
            title=f"pulling {inventory.image}",
            command=Command(
                node=node.name, argv=docker.pull(node.docker, inventory.image), timeout=3600
            ),
        )
        for node in missing
    )
    stages = (
        [Stage(id="preflight", title="Look at the nodes", gates=_preflight(inventory, facts))]
        if facts
        else []
    )
    if pulls:
        stages.append(Stage(id="image", title="Have the image on every node", steps=pulls))
    return Plan(verb="up", stages=tuple(stages))


def plan_up(
    inventory: Inventory,
    facts: Facts,
    secrets: Mapping[str, Secret],
    image: RayImage,
    *,
    join_timeout: float = 180,
) -> Plan:
    """Ray's image, files, head, workers, and the gates that nothing passes without N living nodes.

    A container whose spec hash is unchanged and that runs is left alone; a changed or stopped head
    takes the workers with it, because their Ray session ends with the head's. Rank containers,
    which an earlier vlaunch started beside it, are removed.
    """
    specs = {
        node.name: containers.node_spec(inventory, node, facts.get(node.name), image.tag, secrets)
        for node in inventory.nodes
    }
    reasons = _reasons_by_node(inventory, facts, specs, secrets)
    changed = [node for node in inventory.nodes if reasons[node.name] is not None]
    there = _present(facts, specs)
    replaced = [there[node.name] for node in changed if node.name in there]
    stages = (
        *_image_stages(inventory, facts, changed, image),
        Stage(
            id="files",
            title="Write helper files and secrets",
            steps=_writes(inventory, facts, secrets, changed),
        ),
        Stage(
            id="ranks",
            title="Remove what an earlier vlaunch started",
            steps=_old_ranks(inventory, facts),
        ),
        *_start_stages(inventory, facts, changed, specs),
        *_verify_stages(inventory, changed, there, join_timeout),
    )
    return Plan(
        verb="up",
        stages=not_empty(stages),
        notes=(*_differing(facts, reasons), *_ending(replaced)),
    )


def _reasons_by_node(
    inventory: Inventory,
    facts: Facts,
    specs: Mapping[str, docker.ContainerSpec],
    secrets: Mapping[str, Secret],
) -> dict[str, list[str] | None]:
    """Why each node's container must start anew: every one's, when the head's must."""
    reasons = {
        node.name: _reasons(inventory, facts, node, specs[node.name], secrets)
        for node in inventory.nodes
    }
    if reasons[inventory.head.name] is not None:
        for node in inventory.workers:
            reasons[node.name] = reasons[node.name] or ["the head starts anew"]
    return reasons


def _present(
    facts: Facts, specs: Mapping[str, docker.ContainerSpec]
) -> dict[str, docker.Container]:
    """Return the container that is there on each node under its spec's name."""
    found = {
        name: facts[name].container(spec.name) for name, spec in specs.items() if name in facts
    }
    return {name: each for name, each in found.items() if each is not None}


def _image_stages(
    inventory: Inventory, facts: Facts, changed: Sequence[Node], image: RayImage
) -> list[Stage]:
    """Return what sees to the image before any container starts."""
    stages = []
    if facts:
        stages.append(same_image(inventory, facts))
    if not inventory.ray.off:
        stages.append(_ray_image(inventory, facts, image))
    if inventory.accelerator == "nvidia" and facts:
        stages.append(_gpus(inventory, changed, image))
    return stages


def _writes(
    inventory: Inventory, facts: Facts, secrets: Mapping[str, Secret], changed: Sequence[Node]
) -> tuple[Step, ...]:
    return tuple(
        step
        for node in inventory.nodes
        for step in files.steps(
            inventory, node, facts.get(node.name), secrets, fresh=node in changed
        )
    )


def _start_stages(
    inventory: Inventory,
    facts: Facts,
    changed: Sequence[Node],
    specs: Mapping[str, docker.ContainerSpec],
) -> list[Stage]:
    """Start the head, and the workers as soon as it answers."""
    ray = "" if inventory.ray.off else "Ray "
    starts = {
        node.name: _start(facts.get(node.name), node, specs[node.name], ray) for node in changed
    }
    head = starts.get(inventory.head.name, [])
    workers = [step for node in inventory.workers for step in starts.get(node.name, ())]
    return [
        Stage(
            id="head",
            title=f"Start the {ray}head",
            steps=tuple(head),
            gates=(gates.head(inventory),) if head else (),
        ),
        Stage(id="workers", title=f"Start the {ray}workers", steps=tuple(workers)),
    ]


def _verify_stages(
    inventory: Inventory,
    changed: Sequence[Node],
    there: Mapping[str, docker.Container],
    join_timeout: float,
) -> list[Stage]:
    """See that all nodes have joined, and that what was left alone stays as it is."""
    stages = []
    if not inventory.ray.off:
        started = {node.name for node in changed}
        restarts = {name: each.restarts for name, each in there.items() if name not in started}
        stages.append(_ray_stage(inventory, restarts, join_timeout, changed=bool(changed)))
    agents = gates.agents(inventory, deadline=join_timeout)
    return [*stages, Stage(id="agents", title="Verify the agents", gates=(agents,))]


def _differing(facts: Facts, reasons: Mapping[str, Sequence[str] | None]) -> list[str]:
    return [
        f"{node}: {reason}"
        for node, why in reasons.items()
        for reason in why or ()
        if facts.get(node) is not None
    ]


def _ending(containers_: Sequence[docker.Container]) -> list[str]:
    """Say what becomes of what runs in containers that are replaced."""
    if not containers_:
        return []
    if all(containers.renewed(each) for each in containers_):
        return [
            "a server that runs in these containers starts again in the new ones; a batch job ends"
            " with them"
        ]
    return [
        "they are of an earlier vlaunch: a server or job that runs in them ends; start it again"
        " with `vlaunch serve`"
    ]


def _ray_image(inventory: Inventory, facts: Facts, image: RayImage) -> Stage:
    return Stage(
        id="ray-image",
        title=f"Have Ray {image.ray_version} in the image",
        steps=_builds(inventory, facts, image),
        gates=_image_gates(inventory, facts, image),
    )


def _ray_stage(
    inventory: Inventory, restarts: Mapping[str, int], deadline: float, *, changed: bool
) -> Stage:
    gate = gates.cluster(inventory, restarts, deadline=deadline, hold=1.0 if changed else 0.0)
    return Stage(id="ray", title="Verify the Ray cluster", gates=(gate,))


def _old_ranks(inventory: Inventory, facts: Facts) -> tuple[Step, ...]:
    return tuple(
        Step(
            title=f"removing container {each.name}, which runs outside the node's own",
            command=Command(node=node.name, argv=docker.remove(node.docker, each.id), timeout=120),
        )
        for node in inventory.nodes
        if node.name in facts
        for each in facts[node.name].containers
        if each.role == "rank"
    )


def _image(facts: Facts, node: Node, image: str) -> docker.Image | None:
    return facts[node.name].images.get(image) if node.name in facts else None


def _preflight(inventory: Inventory, facts: Facts) -> tuple[Gate, ...]:
    checks = [check for check in host.CHECKS if check.applies(inventory)]
    memory = () if inventory.secrets_in == "disk" else (gates.memory(inventory, facts),)
    return (*(_observed_gate(check, inventory, facts) for check in checks), *memory)


def _observed_gate(check: Check, inventory: Inventory, facts: Facts) -> Gate:
    def judge(_: Answers) -> Sequence[Finding]:
        return check.judge(Evidence(inventory=inventory, facts=facts))

    return Gate(id=check.id, what=check.what, judge=judge)


def same_image(inventory: Inventory, facts: Facts) -> Stage:
    def judge(_: Answers) -> Sequence[Finding]:
        return images.same_identity(Evidence(inventory=inventory, facts=facts))

    gate = Gate(id="image", what=f"{inventory.image} is the same on every node", judge=judge)
    return Stage(id="same-image", title="Compare the image between the nodes", gates=(gate,))


def _gpus(inventory: Inventory, changed: Sequence[Node], image: RayImage) -> Stage:
    waiting = [node for node in changed if node.gpus]
    counted = (gates.gpus(inventory, waiting, image.tag),) if waiting else ()
    return Stage(id="gpus", title="Count the GPUs that Docker hands out", gates=counted)


def _builds(inventory: Inventory, facts: Facts, image: RayImage) -> tuple[Step, ...]:
    recipe = image.recipe
    if recipe is None:
        return ()
    # made once, however many nodes build
    context = cache(partial(derived.context, recipe.dockerfile, recipe.wheels))
    return tuple(
        Step(
            title=f"building {image.tag} (no network needed)",
            command=Command(
                node=node.name,
                argv=derived.build(node.docker, recipe),
                timeout=1200,
                stdin=context,
                shown_stdin=image.shown,
            ),
        )
        for node in inventory.nodes
        if not _image(facts, node, image.tag)
    )


def _image_gates(inventory: Inventory, facts: Facts, image: RayImage) -> tuple[Gate, ...]:
    fresh = [node for node in inventory.nodes if not _image(facts, node, image.tag)]
    return (
        (gates.versions(inventory, fresh, image.tag, image.ray_version, image.python_version),)
        if fresh
        else ()
    )


def _reasons(
    inventory: Inventory,
    facts: Facts,
    node: Node,
    spec: docker.ContainerSpec,
    secrets: Mapping[str, Secret],
) -> list[str] | None:
    """Why a node's container must start anew, in words; `None` when it must not."""
    if node.name not in facts:
        return ["not there yet"]
    there = facts[node.name].container(spec.name)
    if there is None:
        return ["not there yet"]
    if there.spec != spec.hash:
        base = facts[node.name].images.get(there.image) or facts[node.name].images.get(spec.image)
        return docker.differences(there, spec, base.env if base else {})
    if not there.running:
        return [f"its container is {there.status} (exit code {there.exit_code})"]
    if inventory.secrets_in == "memory" and not set(secrets) <= set(
        facts[node.name].in_memory or ()
    ):
        return ["its secrets are gone: a reboot empties what lies in memory"]
    return None


def _start(facts: HostFacts | None, node: Node, spec: docker.ContainerSpec, ray: str) -> list[Step]:
    steps = []
    if facts is not None and facts.container(spec.name) is not None:
        steps.append(
            Step(
                title=f"removing the old {spec.role} container",
                command=Command(
                    node=node.name, argv=docker.remove(node.docker, spec.name), timeout=90
                ),
            )
        )
    steps.append(
        Step(
            title=f"starting the {ray}{spec.role}",
            command=Command(node=node.name, argv=docker.run(node.docker, spec), timeout=120),
        )
    )
    return steps
