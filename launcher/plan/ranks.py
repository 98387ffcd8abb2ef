"""The `mp` backend: vLLM's own multi-node mode, one container a node, no Ray. Plans only; waiting is `plan/watched.py`.

One model over several nodes is one engine of which each node runs some ranks; replicas are engines that stay inside nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from launcher.checks import serving
from launcher.checks.shape import Finding
from launcher.model import Argv, Inventory, Node, Secret
from launcher.placement import Placement, share
from launcher.plan import containers, engine_log, files, running
from launcher.plan.running import Running
from launcher.plan.serve import Request, Seen, Start, freed, model_gate, notes, port_gate, refuse_others
from launcher.plan.shape import Answers, Gate, Plan, Stage, Step
from launcher.plan.stop import plan_stop
from launcher.plan.up import same_image
from launcher.tools import docker, vllm
from launcher.transport import Command


def nodes_of(inventory: Inventory, placement: Placement) -> tuple[Node, ...]:
    """Return the nodes that get a container, the head first; raises PlacementError."""
    shares = placement.nodes if placement.dp > 1 else share(inventory, placement.tp, placement.pp)
    return tuple(inventory.node(name) for name, _ in shares)


def specs(inventory: Inventory, seen: Seen, request: Request, secrets: Mapping[str, Secret]) -> dict[str, docker.ContainerSpec]:
    """Return each node's container, by the node's name, rank 0's first."""
    nodes = nodes_of(inventory, request.placement)
    return {
        node.name: containers.rank_spec(
            inventory, node, seen.facts.get(node.name), inventory.image, secrets,
            argv=request.command(own), labels=request.labels, env=engine_log.variables(inventory),
        )
        for node, own in zip(nodes, _own(inventory, request.placement, len(nodes)), strict=True)
    }  # fmt: skip


def _own(inventory: Inventory, placement: Placement, count: int) -> list[Argv]:
    """Return what differs per node: its rank, or its replicas."""
    head, ports = inventory.head.ip, inventory.ports
    if placement.dp == 1:
        return [vllm.rank_of(count, rank, head, ports.mp_master) for rank in range(count)]
    held = [replicas for _, replicas in placement.replicas]
    starts = [0, *accumulate(held)]
    return [vllm.replicas_of(local, start, head, ports.dp_rpc) for local, start in zip(held, starts, strict=False)]


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
        _gpus_gate(inventory, seen, found),
        *([] if found else [port_gate(inventory, seen.facts, request)]),
        *([] if found or len(nodes) == 1 else [_meeting_gate(inventory, seen, request.placement)]),
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


def _gpus_gate(inventory: Inventory, seen: Seen, found: Sequence[Running]) -> Gate:
    def judge(_: Answers) -> list[Finding]:
        if "error" in seen.said and not found:
            text = f"Ray does not say what it holds: {seen.said['error']}"
            return [Finding(node=inventory.head.name, status="fail", text=text, fix="look at `vlaunch status`")]
        batches = serving.batch_holders(seen.said)
        busy = max(serving.busy_gpus(seen.said) - freed(found), sum(each.gpus for each in batches))
        if busy <= 0:
            return [Finding(node="", status="pass", text="nothing in Ray holds GPUs")]
        who = ", ".join(each.what for each in batches) or "work in Ray"
        ends = ", ".join(f"`{each.end}`" for each in batches)
        look = "see who holds them: `vlaunch exec --head -- ray list placement-groups`"
        fix = f"wait for it, or end it: {ends}" if ends else look
        return [Finding(node="", status="fail", text=f"{who} holds {busy:g} of {inventory.gpus} GPUs", fix=fix)]

    return Gate(id="free-gpus", what="nothing in Ray holds the GPUs", judge=judge)


def _meeting_gate(inventory: Inventory, seen: Seen, placement: Placement) -> Gate:
    """Nobody has the port on the head where the nodes' processes meet."""
    key, id, use = "mp_master", "mp-port", "vLLM's rendezvous"
    if placement.dp > 1:
        key, id, use = "dp_rpc", "dp-port", "the replicas' rendezvous"
    number: int = getattr(inventory.ports, key)

    def judge(_: Answers) -> list[Finding]:
        head = inventory.head
        found = serving.port(head, number, use, seen.facts[head.name])
        return [replace(found, fix=found.fix.replace("choose another with `--port`", f"set `ports: {{{key}: …}}`"))]

    return Gate(id=id, what=f"port {number} is free on the head", judge=judge)
