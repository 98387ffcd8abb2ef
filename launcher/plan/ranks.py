"""The `mp` backend: vLLM's own multi-node mode, one container a node, no Ray. Plans only; waiting is `plan/watched.py`.

One model over several nodes is one engine of which each node runs some ranks; replicas are engines that stay inside nodes.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from launcher.checks import serving
from launcher.checks.shape import Finding
from launcher.model import Argv, Inventory, Node, Secret
from launcher.placement import Placement, share
from launcher.plan import attached, containers, engine_log, files, running, supervised
from launcher.plan.running import Running
from launcher.plan.serve import Request, Seen, Start, freed, model_gate, notes, port_gate, refuse_others
from launcher.plan.shape import Answers, Gate, Plan, Stage, Step
from launcher.plan.stop import plan_stop
from launcher.plan.supervised import Policy
from launcher.plan.up import same_image
from launcher.tools import docker, payload, vllm
from launcher.transport import Command

# Files beside rank 0, of payload/record.py and payload/group_lead.py; a new server begins with none of them.
_WANTED, _GAVE_UP = "wanted.json", "gave-up.json"
_FILES = (_WANTED, _GAVE_UP, "server.json")
_FORGET = 'umask 022 && mkdir -p "$1/server" && cd "$1/server" && shift && rm -f "$@"'
_WANT = f'{_FORGET} && new=.wanted.$$ && cat >"$new" && mv "$new" {_WANTED}'


def nodes_of(inventory: Inventory, placement: Placement) -> tuple[Node, ...]:
    """Return the nodes that get a container, the head first; raises PlacementError."""
    shares = placement.nodes if placement.dp > 1 else share(inventory, placement.tp, placement.pp)
    return tuple(inventory.node(name) for name, _ in shares)


def specs(
    inventory: Inventory, seen: Seen, request: Request, secrets: Mapping[str, Secret], *, together: bool = False
) -> dict[str, docker.ContainerSpec]:
    """Return each node's container, by the node's name, rank 0's first.

    With `together` they start and end as one (`payload/group.py`), and come back with their nodes: each waits for all.
    """
    nodes = nodes_of(inventory, request.placement)
    commands = [request.command(own) for own in _own(inventory, request.placement, len(nodes))]
    if together:
        commands = [
            payload.group(
                command, rank=rank, of=len(nodes), head=nodes[0].ip, port=inventory.ports.group, id=request.digest,
                node=node.name, api_host=payload.api_host(request.host), api=request.port,
            )
            for rank, (node, command) in enumerate(zip(nodes, commands, strict=True))
        ]  # fmt: skip
    return {
        node.name: containers.rank_spec(
            inventory, node, seen.facts.get(node.name), inventory.image, secrets, argv=command, labels=request.labels,
            env=engine_log.variables(inventory), restart="unless-stopped" if together else "no",
        )
        for node, command in zip(nodes, commands, strict=True)
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
    supervise: Policy | None = None,
) -> Start:
    """Start one container a node, unless exactly these run already; `prove` comes before anything that runs is stopped.

    With `supervise`, what runs in the containers is a supervisor of vLLM, not vLLM itself.

    Raises:
        RequestError: another server runs, and it is not to be replaced.
        PlacementError: the ranks cannot be shared equally.
    """
    wanted = specs(inventory, seen, request, secrets, together=supervise is not None)
    found = running.find(inventory, seen.facts, seen.said)
    there = {node.name: _rank(seen, inventory, node) for node in inventory.nodes}
    alike = all((own := there[name]) is not None and own.running and own.spec == spec.hash for name, spec in wanted.items())
    # Ranks of which one has ended, or that have given up, cannot serve any more: they are nobody's server.
    broken = any(own is not None and not own.running for own in there.values()) or _gave_up(seen, next(iter(wanted)))
    if alike and not broken and [each.backend for each in found] == ["mp"] and set(found[0].nodes) == set(wanted):
        # Whether they are supervised is part of the containers; how patiently, only of what is wanted.
        other = attached.otherwise(seen.wanted or None, request.digest, supervise) if supervise else ""
        if not (other and replace_other):
            return Start(plan=Plan(verb="serve", stages=(), notes=attached.notes(other)), attached=True)
    refuse_others([each for each in found if each.backend == "ray" or not broken], replace_other=replace_other)
    nodes = [inventory.node(name) for name in wanted]
    writes = [
        step
        for node in nodes
        for step in files.steps(inventory, node, seen.facts.get(node.name), secrets, fresh=True, rank=True)
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
        *([] if found or len(nodes) == 1 or supervise is None else [_group_gate(inventory, seen)]),
    )
    stages = (
        *([Stage(id="preflight", title="Look at the nodes and the model", gates=gates)] if seen.facts else []),
        *([same_image(inventory, seen.facts)] if seen.facts else []),
        Stage(id="files", title="Write helper files and secrets", steps=tuple(writes)),
        *prove,
        *(plan_stop(inventory, seen.facts, found, grace).stages if seen.facts else ()),
        Stage(id="wanted", title="Write down what is wanted", steps=_want(inventory, seen, request, nodes[0], supervise)),
        Stage(id="ranks", title="Start the ranks", steps=starts),
    )
    plan = Plan(verb="serve", stages=tuple(s for s in stages if s.steps or s.gates), notes=notes(request, found))
    return Start(plan=plan)


def _gave_up(seen: Seen, head: str) -> bool:
    """True when the supervisor that is there has given up: it stays, so that it can be asked why."""
    return head in seen.facts and f"server/{_GAVE_UP}" in seen.facts[head].files


def _want(inventory: Inventory, seen: Seen, request: Request, head: Node, supervise: Policy | None) -> tuple[Step, ...]:
    """Tell rank 0's supervisor what is served, for a later run and for itself; or see that no other server is thought of."""
    facts = seen.facts.get(head.name)
    directory = containers.state_dir(inventory, head, facts)
    if supervise is None:
        if facts is None or not any(f"server/{name}" in facts.files for name in _FILES):
            return ()
        forget = Command(node=head.name, argv=("sh", "-c", _FORGET, "unwant", directory, *_FILES), timeout=30)
        return (Step(title="forgetting the server that was wanted before", command=forget),)
    image = facts.images.get(inventory.image) if facts else None
    wanted = supervised.wanted(
        inventory, request, supervise, argv=request.argv, env=engine_log.variables(inventory),
        image=image.identity if image else "", host=payload.api_host(request.host),
    )  # fmt: skip
    text = json.dumps(wanted)
    want = Command(
        node=head.name, argv=("sh", "-c", _WANT, "want", directory, *_FILES), timeout=30,
        stdin=text.encode, shown_stdin=f"printf %s {shlex.quote(text)}",
    )  # fmt: skip
    return (Step(title=f"writing down that {request.model} is wanted", command=want),)


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
    if placement.dp > 1:
        return _port_gate(inventory, seen, "dp_rpc", "dp-port", "the replicas' rendezvous")
    return _port_gate(inventory, seen, "mp_master", "mp-port", "vLLM's rendezvous")


def _group_gate(inventory: Inventory, seen: Seen) -> Gate:
    """Nobody has the port on the head where the ranks' supervisors meet."""
    return _port_gate(inventory, seen, "group", "group-port", "the supervisors' rendezvous")


def _port_gate(inventory: Inventory, seen: Seen, key: str, id: str, use: str) -> Gate:
    number: int = getattr(inventory.ports, key)

    def judge(_: Answers) -> list[Finding]:
        head = inventory.head
        found = serving.port(head, number, use, seen.facts[head.name])
        return [replace(found, fix=found.fix.replace("choose another with `--port`", f"set `ports: {{{key}: …}}`"))]

    return Gate(id=id, what=f"port {number} is free on the head", judge=judge)
