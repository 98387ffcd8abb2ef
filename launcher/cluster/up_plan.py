"""Plan of `up`, from the inventory and the observed facts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from launcher.cluster import gates
from launcher.core.domain import Inventory, Node, Secret, fold
from launcher.core.plan import Gate, Plan, Stage, Step, precomputed_gate
from launcher.core.transport import Command
from launcher.front import front_plan
from launcher.hosts.check import Check, Evidence
from launcher.hosts.checks import container
from launcher.hosts.checks.catalogue import ESSENTIAL
from launcher.hosts.checks.gpu_memory import GPU_MEMORY, warn_gpu_memory
from launcher.tools import containers, docker
from launcher.tools.shipped import derived, node_files
from launcher.tools.shipped.certificates import Renewal
from launcher.tools.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class RayImage:
    """The image of the containers, and the recipe to build it where it is missing.

    If the base image has everything, or the cluster has no Ray, `tag` is the base image and there
    is no recipe. `context_command` is the shell command that prints the build context.
    """

    tag: str
    ray_version: str
    python_version: str
    recipe: derived.ImageRecipe | None = None
    context_command: str = ""


def base_image(inventory: Inventory) -> RayImage:
    """Return the inventory's own image, which clusters without Ray run."""
    return RayImage(tag=inventory.image, ray_version="", python_version="")


def plan_image(site: Site) -> Plan:
    """Plan the preflight, then the inventory's image on every node, or on one that copies it to the
    others (`image_source: nodes`).
    """
    image = site.inventory.image
    pulls = tuple(
        Step(
            title=f"pulling {image}",
            command=Command(node=node.name, argv=docker.pull(node.docker, image), timeout=3600),
        )
        for node in _pulling_nodes(site)
    ) + front_plan.pull_steps(site)
    stages = (
        [Stage(id="preflight", title="Scan the nodes", gates=_preflight_gates(site))]
        if site.facts
        else []
    )
    if pulls:
        stages.append(Stage(id="image", title="Pull missing images", steps=pulls))
    notes = (*privilege_notes(site.inventory), *_copy_notes(site))
    return Plan(verb="up", stages=tuple(stages), notes=notes)


def _pulling_nodes(site: Site) -> list[Node]:
    missing = nodes_without_image(site)
    if site.inventory.image_source == "registry":
        return missing
    return [site.head] if len(missing) == len(site.nodes) else []


def nodes_without_image(site: Site) -> list[Node]:
    """Return the nodes that lack the inventory's image, as far as observed."""
    return _nodes_without(site, site.inventory.image)


def _copy_notes(site: Site) -> tuple[str, ...]:
    """Name the nodes that get the image from another node, which a script cannot do."""
    receivers = [node for node in nodes_without_image(site) if node not in _pulling_nodes(site)]
    if site.inventory.image_source == "registry" or not receivers:
        return ()
    names = fold([node.name for node in receivers])
    return (f"the image is copied to {names} from another node, as with `vlaunch image copy`",)


def privilege_notes(inventory: Inventory) -> tuple[str, ...]:
    """Warn that the containers get all rights on their nodes."""
    if not inventory.privileged:
        return ()
    return (
        "PRIVILEGED: `privileged: true` makes root in a container root on the node;"
        " `devices:` and `cap_add:` grant single permissions",
    )


def plan_up(
    site: Site,
    secrets: Mapping[str, Secret],
    image: RayImage,
    renewal: Renewal | None = None,
    *,
    py_spy: Mapping[str, Callable[[], bytes]] | None = None,
    join_timeout: float = 180,
) -> Plan:
    """Plan Ray's image, files, head, workers, and the gates that require all nodes.

    A running container with an unchanged spec hash is left alone; a changed or stopped head also
    replaces the workers, because their Ray session ends with the head's. New certificates restart
    nothing. `py_spy` has loaders of the program by architecture.
    """
    specs = {node.name: containers.node_spec(site, node, image.tag, secrets) for node in site.nodes}
    reasons = _reasons_by_node(site, specs, secrets)
    changed = [node for node in site.nodes if reasons[node.name] is not None]
    present = ((node.name, site.container(node)) for node in site.nodes)
    existing = {name: container for name, container in present if container is not None}
    replaced = [existing[node.name] for node in changed if node.name in existing]
    stages = (
        *_image_stages(site, changed, image),
        Stage(
            id="files",
            title="Write node programs and secrets",
            steps=(
                *_file_steps(site, secrets, changed),
                *node_files.py_spy_steps(site, py_spy or {}),
            ),
        ),
        *node_files.certificate_stages(site, renewal),
        *_drain_stages(site, replaced),
        *_start_stages(site, changed, specs),
        *_verify_stages(site, changed, existing, join_timeout),
    )
    return Plan(
        verb="up",
        stages=tuple(stages),
        notes=(
            *_difference_notes(site, _merge_reasons(reasons, renewal)),
            *_outdated_agent_notes(site, changed),
            *_restart_notes(replaced),
        ),
    )


def plan_certificates(site: Site, renewal: Renewal) -> Plan:
    """Plan new certificates on all nodes; running agents load them."""
    verify = Stage(
        id="agents", title="Verify the agents", gates=(gates.agents_gate(site, deadline=120),)
    )
    return Plan(verb="secrets", stages=(*node_files.certificate_stages(site, renewal), verify))


def _merge_reasons(
    reasons: Mapping[str, Sequence[str] | None], renewal: Renewal | None
) -> Mapping[str, Sequence[str] | None]:
    """Add the reasons to renew certificates, for nodes whose containers stay unchanged."""
    certificates = {name: [reason] for name, reason in renewal.reasons.items()} if renewal else {}
    return {name: existing or certificates.get(name) for name, existing in reasons.items()}


def _reasons_by_node(
    site: Site, specs: Mapping[str, docker.ContainerSpec], secrets: Mapping[str, Secret]
) -> dict[str, list[str] | None]:
    """Return the reasons to recreate each node's container: every one's, if the head's must be."""
    reasons = {
        node.name: _restart_reasons(site, node, specs[node.name], secrets) for node in site.nodes
    }
    if reasons[site.head.name] is not None:
        for node in site.inventory.workers:
            reasons[node.name] = reasons[node.name] or ["the head is recreated"]
    return reasons


def _image_stages(site: Site, changed: Sequence[Node], image: RayImage) -> list[Stage]:
    """Return the stages that prepare the image before any container starts."""
    stages = []
    if site.facts:
        stages.append(_same_image_stage(site))
    if not site.inventory.ray.off:
        stages.append(_ray_image_stage(site, image))
    if site.inventory.accelerator == "nvidia" and site.facts:
        stages.append(_gpu_stage(site, changed, image))
    return stages


def _file_steps(
    site: Site, secrets: Mapping[str, Secret], changed: Sequence[Node]
) -> tuple[Step, ...]:
    started = {node.name for node in changed}
    return tuple(
        step
        for node in site.nodes
        for step in node_files.file_steps(site, node, secrets, fresh=node.name in started)
    )


def _start_stages(
    site: Site,
    changed: Sequence[Node],
    specs: Mapping[str, docker.ContainerSpec],
) -> list[Stage]:
    ray = "" if site.inventory.ray.off else "Ray "
    starts = {node.name: _start_steps(site, node, specs[node.name], ray) for node in changed}
    head = starts.get(site.head.name, [])
    workers = [step for node in site.inventory.workers for step in starts.get(node.name, ())]
    return [
        Stage(
            id="head",
            title=f"Start the {ray}head",
            steps=tuple(head),
            gates=(gates.head_gate(site),) if head else (),
        ),
        Stage(id="workers", title=f"Start the {ray}workers", steps=tuple(workers)),
    ]


def _drain_stages(site: Site, replaced: Sequence[docker.Container]) -> list[Stage]:
    """Drain servers whose containers are replaced, if they may have requests through the front."""
    head = site.container(site.head)
    if site.inventory.front is None or head is None or not head.running or not replaced:
        return []
    gate = gates.drain_gate(site, [node for node in site.nodes if site.container(node) in replaced])
    return [Stage(id="drain", title="Drain the servers", gates=(gate,))]


def _verify_stages(
    site: Site,
    changed: Sequence[Node],
    existing: Mapping[str, docker.Container],
    join_timeout: float,
) -> list[Stage]:
    """Verify that all nodes have joined, and that unchanged containers stay."""
    stages = []
    if not site.inventory.ray.off:
        started = {node.name for node in changed}
        unchanged = {name: old for name, old in existing.items() if name not in started}
        restarts = {name: old.restarts for name, old in unchanged.items()}
        stages.append(_ray_stage(site, restarts, join_timeout, changed=bool(changed)))
    agents = gates.agents_gate(site, deadline=join_timeout)
    return [*stages, Stage(id="agents", title="Verify the agents", gates=(agents,))]


def _difference_notes(site: Site, reasons: Mapping[str, Sequence[str] | None]) -> list[str]:
    """Describe the differences from the inventory, with equal ones of several nodes together."""
    nodes: dict[str, list[str]] = {}
    for node, node_reasons in reasons.items():
        for reason in (node_reasons or ()) if node in site.facts else ():
            nodes.setdefault(reason, []).append(node)
    return [f"{fold(names)}: {reason}" for reason, names in nodes.items()]


def _outdated_agent_notes(site: Site, changed: Sequence[Node]) -> list[str]:
    """Name the agents that keep running their old version while their files are replaced."""
    unchanged = [node for node in site.nodes if node not in changed]
    if not (names := [node.name for node in unchanged if node_files.replaces_agent(site, node)]):
        return []
    return [f"{fold(names)}: the {node_files.OLD_AGENT}"]


def _restart_notes(replaced: Sequence[docker.Container]) -> list[str]:
    """Describe the effect on servers and jobs in containers that are replaced."""
    if not replaced:
        return []
    return ["servers in these containers restart in the new ones; batch jobs stop"]


def _ray_image_stage(site: Site, image: RayImage) -> Stage:
    return Stage(
        id="ray-image",
        title=f"Add Ray {image.ray_version} to the image",
        steps=_build_steps(site, image),
        gates=_image_gates(site, image),
    )


def _ray_stage(site: Site, restarts: Mapping[str, int], deadline: float, *, changed: bool) -> Stage:
    gate = gates.cluster_gate(site, restarts, deadline=deadline, hold=1.0 if changed else 0.0)
    return Stage(id="ray", title="Verify the Ray cluster", gates=(gate,))


def _nodes_without(site: Site, image: str) -> list[Node]:
    return [node for node in site.nodes if site.image(node, image) is None]


def _preflight_gates(site: Site) -> tuple[Gate, ...]:
    checks = [check for check in ESSENTIAL if check.applies(site.inventory)]
    memory = () if site.inventory.secrets_in == "disk" else (gates.memory_gate(site),)
    gpu_memory = (_gpu_memory_gate(site),) if GPU_MEMORY.applies(site.inventory) else ()
    observed = (_observed_gate(check, site) for check in checks)
    return (*observed, *gpu_memory, *memory, *front_plan.preflight_gates(site))


def _gpu_memory_gate(site: Site) -> Gate:
    evidence = Evidence(inventory=site.inventory, facts=site.facts)
    return precomputed_gate(GPU_MEMORY.id, GPU_MEMORY.what, lambda: warn_gpu_memory(evidence))


def _observed_gate(check: Check, site: Site) -> Gate:
    model = site.inventory.serve.model or ""
    evidence = Evidence(inventory=site.inventory, facts=site.facts, model=model)
    return precomputed_gate(check.id, check.what, lambda: check.judge(evidence))


def _same_image_stage(site: Site) -> Stage:
    evidence = Evidence(inventory=site.inventory, facts=site.facts)
    gate = precomputed_gate(
        "image",
        f"{site.inventory.image} is the same on every node",
        lambda: container.judge_image_identity(evidence),
    )
    return Stage(id="same-image", title="Compare the image between the nodes", gates=(gate,))


def _gpu_stage(site: Site, changed: Sequence[Node], image: RayImage) -> Stage:
    gpu_nodes = [node for node in changed if node.gpus]
    gates_ = (gates.gpus_gate(site.inventory.cluster, gpu_nodes, image.tag),) if gpu_nodes else ()
    return Stage(id="gpus", title="Count the GPUs that Docker exposes", gates=gates_)


def _build_steps(site: Site, image: RayImage) -> tuple[Step, ...]:
    recipe = image.recipe
    if recipe is None:
        return ()
    # built once for all nodes
    context = cache(partial(derived.build_context, recipe))
    return tuple(
        Step(
            title=f"building {image.tag} (no network needed)",
            command=Command(
                node=node.name,
                argv=derived.build_image(node.docker, recipe),
                timeout=1200,
                stdin=context,
                shown_stdin=image.context_command,
            ),
        )
        for node in _nodes_without(site, image.tag)
    )


def _image_gates(site: Site, image: RayImage) -> tuple[Gate, ...]:
    cluster, fresh = site.inventory.cluster, _nodes_without(site, image.tag)
    if not fresh:
        return ()
    return (
        gates.versions_gate(cluster, fresh, image.tag, image.ray_version, image.python_version),
    )


def _restart_reasons(
    site: Site, node: Node, spec: docker.ContainerSpec, secrets: Mapping[str, Secret]
) -> list[str] | None:
    """Return the reasons to recreate a node's container, in words; `None` if it may stay."""
    container = site.container(node)
    if container is None:
        return ["not created yet"]
    if container.spec != spec.hash:
        base = site.image(node, container.image) or site.image(node, spec.image)
        return docker.describe_differences(container, spec, base.env if base else {})
    if not container.running:
        return [f"its container is {container.status} (exit code {container.exit_code})"]
    in_memory = site.facts[node.name].secrets_in_memory or ()
    if site.inventory.secrets_in == "memory" and not set(secrets) <= set(in_memory):
        return ["its secrets are gone: a reboot clears memory"]
    return None


def _start_steps(site: Site, node: Node, spec: docker.ContainerSpec, ray: str) -> list[Step]:
    steps = node_files.handover_steps(site, node)
    if site.container(node) is not None:
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
