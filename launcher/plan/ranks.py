"""The `mp` backend: vLLM's own multi-node mode, one container a node, no Ray. Plans only; waiting is `plan/watched.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.checks import serving
from launcher.checks.shape import Finding
from launcher.model import Inventory, Node, Secret
from launcher.placement import Placement, share
from launcher.plan import containers, engine_log, files, running
from launcher.plan.serve import Request, Seen, Start, model_gate, notes, port_gate, refuse_others
from launcher.plan.shape import Answers, Gate, Plan, Stage, Step
from launcher.plan.stop import plan_stop
from launcher.plan.up import same_image
from launcher.tools import docker, vllm
from launcher.transport import Command


def nodes_of(inventory: Inventory, placement: Placement) -> tuple[Node, ...]:
    """Return the nodes that get a container, the head first; raises PlacementError."""
    return tuple(inventory.node(name) for name, _ in share(inventory, placement.tp, placement.pp))


def specs(inventory: Inventory, seen: Seen, request: Request, secrets: Mapping[str, Secret]) -> dict[str, docker.ContainerSpec]:
    """Return each node's container, by the node's name, rank 0's first."""
    nodes = nodes_of(inventory, request.placement)
    return {
        node.name: containers.rank_spec(
            inventory, node, seen.facts.get(node.name), inventory.image, secrets,
            argv=vllm.serve(
                request.model, tp=request.placement.tp, pp=request.placement.pp, backend="mp",
                host=request.host, port=request.port, args=request.args,
                multi_node=vllm.rank_of(len(nodes), rank, inventory.head.ip, inventory.ports.mp_master),
            ),
            labels=request.labels,
            env=engine_log.variables(inventory),
        )
        for rank, node in enumerate(nodes)
    }  # fmt: skip


def plan_ranks(
    inventory: Inventory,
    seen: Seen,
    request: Request,
    secrets: Mapping[str, Secret],
    *,
    prove: Sequence[Stage] = (),
    replace_other: bool = False,
    grace: float = 15,
) -> Start:
    """Start one container a node, unless exactly these run already; `prove` comes before anything that runs is stopped.

    Raises:
        RequestError: another server runs, and it is not to be replaced.
        PlacementError: the ranks cannot be shared equally.
    """
    wanted = specs(inventory, seen, request, secrets)
    found = running.find(inventory, seen.facts, seen.said)
    there = {node.name: _rank(seen, inventory, node) for node in inventory.nodes}
    alike = all((own := there[name]) is not None and own.running and own.spec == spec.hash for name, spec in wanted.items())
    if alike and [each.backend for each in found] == ["mp"] and set(found[0].nodes) == set(wanted):
        return Start(plan=Plan(verb="serve", stages=()), attached=True)
    # Ranks of which one has ended cannot serve any more: they are nobody's server.
    broken = any(own is not None and not own.running for own in there.values())
    refuse_others([each for each in found if each.backend == "ray" or not broken], replace_other=replace_other)
    nodes = [inventory.node(name) for name in wanted]
    writes = [
        step
        for node in nodes
        for step in files.steps(inventory, node, seen.facts.get(node.name), secrets, fresh=True)
    ]  # fmt: skip
    starts = tuple(
        Step(
            title=f"starting rank container {i} of {len(nodes)}",
            command=Command(node=node.name, argv=docker.run(node.docker, wanted[node.name]), timeout=120),
        )
        for i, node in enumerate(nodes, start=1)
    )
    gates = (
        model_gate(inventory, seen, request),
        *([] if found else [_gpus_gate(inventory, seen), port_gate(inventory, seen.facts, request)]),
        *([] if found or len(nodes) == 1 else [_master_gate(inventory, seen)]),
    )
    stages = (
        *([Stage(id="preflight", title="Look at the nodes and the model", gates=gates)] if seen.facts else []),
        *([same_image(inventory, seen.facts)] if seen.facts else []),
        Stage(id="files", title="Write helper files and secrets", steps=tuple(writes)),
        *prove,
        *(plan_stop(inventory, seen.facts, found, grace).stages if seen.facts else ()),
        Stage(id="ranks", title="Start the ranks", steps=starts),
    )
    plan = Plan(verb="serve", stages=tuple(s for s in stages if s.steps or s.gates), notes=notes(request, found))
    return Start(plan=plan)


def _rank(seen: Seen, inventory: Inventory, node: Node) -> docker.Container | None:
    facts = seen.facts.get(node.name)
    return facts.container(containers.rank_name(inventory, node)) if facts else None


def _gpus_gate(inventory: Inventory, seen: Seen) -> Gate:
    def judge(_: Answers) -> list[Finding]:
        if "error" in seen.said:
            text = f"Ray does not say what it holds: {seen.said['error']}"
            return [Finding(node=inventory.head.name, status="fail", text=text, fix="look at `vlaunch status`")]
        busy = serving.busy_gpus(seen.said)
        if not busy:
            return [Finding(node="", status="pass", text="nothing in Ray holds GPUs")]
        fix = "wait for that work, or stop it: `vlaunch stop`"
        return [Finding(node="", status="fail", text=f"work in Ray holds {busy:g} of {inventory.gpus} GPUs", fix=fix)]

    return Gate(id="free-gpus", what="nothing in Ray holds the GPUs", judge=judge)


def _master_gate(inventory: Inventory, seen: Seen) -> Gate:
    def judge(_: Answers) -> list[Finding]:
        head = inventory.head
        return [serving.port(head, inventory.ports.mp_master, "vLLM's rendezvous", seen.facts[head.name])]

    return Gate(id="mp-port", what=f"port {inventory.ports.mp_master} is free on the head", judge=judge)
