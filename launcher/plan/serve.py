"""From a request and what was seen, everything that starts a server as a Ray job. Waiting for it is `plan/watched.py`."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from launcher.checks import serving
from launcher.checks.shape import Finding
from launcher.errors import RequestError
from launcher.model import Argv, Backend, Inventory, Node
from launcher.placement import Placement
from launcher.plan import attached, containers, engine_log, files, running, supervised
from launcher.plan.running import Running
from launcher.plan.shape import Answers, Gate, Plan, Stage, Step
from launcher.plan.stop import plan_stop
from launcher.plan.supervised import Policy
from launcher.tools import docker, model, payload, vllm
from launcher.tools.host import HostFacts
from launcher.transport import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A server that is asked for: everything that makes it different from another one."""

    model: str
    placement: Placement
    backend: Backend
    host: str
    port: int
    args: tuple[str, ...] = ()

    @property
    def argv(self) -> Argv:
        """The command of the only process (Ray) or of one node (`mp`, without what differs per node)."""
        return self.command()

    def command(self, own: Argv = ()) -> Argv:
        """Return the command of one process, with the options that are its own."""
        split = self.placement
        if self.backend == "ray" and split.dp > 1:
            own = (*vllm.ray_replicas(split.replicas[0][1], split.spans), *own)
        return vllm.serve(
            self.model, tp=split.tp, pp=split.pp, dp=split.dp, backend=self.backend,
            host=self.host, port=self.port, args=self.args, multi_node=own,
        )  # fmt: skip

    @property
    def digest(self) -> str:
        """Eight hex digits that are equal exactly when the same server is asked for."""
        return hashlib.sha256(json.dumps(self.argv).encode()).hexdigest()[:8]

    @property
    def asked_for(self) -> dict[str, Any]:
        """What a later run needs to ask for the same server again (`plan/rollback.py`)."""
        split = self.placement
        return {
            "model": self.model, "backend": self.backend, "host": self.host, "port": self.port,
            "tp": split.tp, "pp": split.pp, "dp": split.dp, "args": list(self.args),
        }  # fmt: skip

    @property
    def labels(self) -> dict[str, str]:
        """What a job's metadata, or a container's labels, tell a later run."""
        return {
            running.MODEL: self.model, running.ARGS: self.digest, running.HOST: self.host, running.PORT: str(self.port),
            running.TP: str(self.placement.tp), running.PP: str(self.placement.pp),
            **({running.DP: str(self.placement.dp)} if self.placement.dp > 1 else {}),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was observed before anything is decided: nodes, what the head said about Ray, the model on each node, and the last
    verdict on the network (`launcher.plan.network`). `wanted` is the server that a supervisor is told to keep; None when nobody
    asked, or nobody could say."""

    facts: Mapping[str, HostFacts] = field(default_factory=dict)
    said: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, model.ModelSeen] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    wanted: Mapping[str, Any] | None = None

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The model's `config.json` from the first node that has one."""
        return next((each.config for each in self.models.values() if each.config is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What will be done, and the name of the job that will run (or that runs already, when `attached`)."""

    plan: Plan
    job: str = ""
    attached: bool = False


def ask_model(inventory: Inventory, facts: Mapping[str, HostFacts], name: str) -> list[Command]:
    """Ask each node for the model as its containers see it; nodes without a running container or the image are left out."""
    return [
        Command(node=node.name, argv=argv, timeout=60)
        for node in inventory.nodes
        if (argv := _inside(inventory, node, facts.get(node.name), model.look(name, node.hf_home))) is not None
    ]


def plan_files(inventory: Inventory, facts: Mapping[str, HostFacts], *, verb: str = "serve") -> Plan:
    """Bring the helper programs of running containers up to date: what is asked next must understand the question."""
    steps = tuple(
        step
        for node in inventory.nodes
        if node.name in facts and facts[node.name].containers
        for step in files.steps(inventory, node, facts[node.name], {}, fresh=False)
    )
    return Plan(verb=verb, stages=(Stage(id="files", title="Update helper files", steps=steps),) if steps else ())


def plan_serve(
    inventory: Inventory,
    seen: Seen,
    request: Request,
    *,
    prove: Sequence[Stage] = (),
    replace_other: bool = False,
    grace: float = 15,
    supervise: Policy | None = None,
    insist: bool = False,
) -> Start:
    """Submit the server as a Ray job, unless the same one runs already; `prove` comes before anything that runs is stopped.

    With `supervise`, what Ray runs is a supervisor of vLLM, not vLLM itself. One that runs, and is supervised otherwise, is
    watched as it is, unless it is to be replaced; to `insist` is to refuse one with a supervisor where none is asked for.

    Raises:
        RequestError: another server runs, and it is not to be replaced.
    """
    found = running.find(inventory, seen.facts, seen.said)
    same = next((each for each in found if each.backend == "ray" and each.digest == request.digest), None)
    if same is not None and len(found) == 1:
        other = attached.otherwise(seen.wanted, request.digest, supervise)
        if other and insist and supervise is None and not replace_other:
            raise RequestError(
                f"{request.model} runs already ({same.what}), and {other}",
                hint="start it anew without a supervisor: add `--replace`\nwatch it as it is: leave out `--no-supervise`",
            )
        if not (other and replace_other):
            return Start(plan=Plan(verb="serve", stages=(), notes=attached.notes(other)), job=same.id, attached=True)
    others = [each for each in found if each is not same] if same is not None else found
    refuse_others(others, replace_other=replace_other)
    stops = plan_stop(inventory, seen.facts, found, grace)
    job = _next_id(request.digest, [each["submission_id"] for each in seen.said.get("jobs", ())])
    gates = (
        *_gates(inventory, seen, request),
        _gate("free-gpus", "Ray has enough free GPUs", partial(_free, inventory, seen, request, freed(found))),
        *([] if any(each.port == request.port for each in found) else [port_gate(inventory, seen.facts, request)]),
    )
    stages = (
        *([Stage(id="preflight", title="Look at the cluster and the model", gates=gates)] if seen.facts else []),
        *prove,
        *stops.stages,
        Stage(id="submit", title="Submit the server to Ray", steps=(_submit(inventory, seen, request, job, supervise),)),
    )
    return Start(plan=Plan(verb="serve", stages=stages, notes=notes(request, found)), job=job)


def refuse_others(others: Sequence[Running], *, replace_other: bool) -> None:
    """Raise RequestError when another server runs that may not be replaced."""
    if others and not replace_other:
        raise RequestError(
            f"another server runs: {others[0].model} ({others[0].what})",
            hint="stop it first with `vlaunch stop`, or let this one take its place with `--replace`",
        )


def notes(request: Request, found: Sequence[Running]) -> tuple[str, ...]:
    """Say in words what will be placed where, and what makes room for it."""
    split = request.placement
    expected = ", ".join(f"{count} on {name}" for name, count in split.nodes)
    whole = ", ".join(f"{count} on {name}" for name, count in split.replicas if count)
    behind = f"{split.dp} replicas ({whole}) answer behind one endpoint, to which vLLM balances requests"
    return (
        *(f"{each.what} ({each.model}) is stopped to make room" for each in found),
        f"{split.words} ({split.why}): ranks expected {expected}",
        *([behind] if split.dp > 1 else []),
        *split.warnings,
    )


def port_gate(inventory: Inventory, facts: Mapping[str, HostFacts], request: Request) -> Gate:
    """The API port is free on the head."""
    return _gate(
        "api-port", f"port {request.port} is free on the head",
        lambda: [serving.port(inventory.head, request.port, "vLLM API", facts[inventory.head.name])],
    )  # fmt: skip


def model_gate(inventory: Inventory, seen: Seen, request: Request) -> Gate:
    """The nodes that will load the model have it, or may download it."""
    names = {name for name, _ in request.placement.nodes}
    nodes = [node for node in inventory.nodes if node.name in names or request.backend == "ray"]
    offline = {node.name: node.env.get("HF_HUB_OFFLINE", "0") not in ("0", "") for node in nodes}
    return _gate(
        "model", "every node has the model, or may download it",
        lambda: serving.model(nodes, request.model, seen.models, offline),
    )  # fmt: skip


def _gates(inventory: Inventory, seen: Seen, request: Request) -> tuple[Gate, ...]:
    names = {node.name: containers.name(inventory, node) for node in inventory.nodes}
    whole = _gate(
        "cluster", "the cluster is up: every node is in Ray",
        lambda: serving.cluster(inventory, seen.facts, seen.said, names),
    )  # fmt: skip
    return (whole, model_gate(inventory, seen, request))


def freed(found: Sequence[Running]) -> float:
    """Return how many of Ray's GPUs are free when servers have made room; no limit where nobody knows what they hold."""
    held = [each.gpus for each in found if each.backend == "ray"]
    return sum(held) if all(held) else math.inf


def _free(inventory: Inventory, seen: Seen, request: Request, freed: float) -> Sequence[Finding]:
    split = request.placement
    return serving.free_gpus(inventory, split.world, split.words, seen.said, freed)


def _gate(id: str, what: str, findings: Any) -> Gate:
    def judge(_: Answers) -> Sequence[Finding]:
        return list(findings())

    return Gate(id=id, what=what, judge=judge)


def _next_id(digest: str, taken: Sequence[str]) -> str:
    used = [int(match[1]) for each in taken if (match := re.fullmatch(rf"serve-{digest}-([0-9]{{1,9}})", each))]
    return f"serve-{digest}-{max(used, default=0) + 1}"


def _submit(inventory: Inventory, seen: Seen, request: Request, job: str, supervise: Policy | None) -> Step:
    head, placing = inventory.head, _placing(inventory, request)
    own: dict[str, Any] = {"argv": (*engine_log.environment(inventory, job, placing), *request.argv), "wanted": None}
    if supervise is not None:
        image = seen.facts[head.name].images.get(inventory.image) if head.name in seen.facts else None
        wanted = supervised.wanted(
            inventory, request, supervise, argv=request.argv, env={**engine_log.variables(inventory, job), **placing},
            image=image.identity if image else "", host=payload.api_host(request.host),
        )  # fmt: skip
        own = {"wanted": wanted}
    asked = json.dumps({**own, "submission_id": job, "metadata": request.labels})
    inside = docker.exec_(head.docker, containers.name(inventory, head), *payload.submit(inventory.ports), stdin=True)
    return Step(
        title=f"submitting {request.model} as Ray job {job}",
        command=Command(
            node=head.name, argv=inside, timeout=90, stdin=asked.encode, shown_stdin=f"printf %s {shlex.quote(asked)}"
        ),
    )


def _placing(inventory: Inventory, request: Request) -> Mapping[str, str]:
    """Return the variables that place replicas; what the user sets on the head stays as it is."""
    split, head = request.placement, inventory.head
    if split.dp == 1:
        return {}
    nodes = [inventory.node(name) for name, _ in split.nodes]
    alike = len({node.gpus for node in nodes}) == 1
    wanted = vllm.ray_replica_env([node.ip for node in nodes], spans=split.spans, alike=alike)
    return {name: value for name, value in wanted.items() if name not in head.env}


def _inside(inventory: Inventory, node: Node, facts: HostFacts | None, argv: Argv) -> Argv | None:
    """Run a short command as the node's containers would: in its Ray container, else in a throw-away one."""
    if facts is None:
        return None
    if (own := containers.own(inventory, node, facts)) is not None:
        return docker.exec_(node.docker, own.name, *argv)
    if facts.images.get(inventory.image) is None:
        return None
    mounts = [f"{node.hf_home}:{node.hf_home}", *(f"{m.source}:{m.target}:ro" for m in inventory.mounts)]
    volumes = [word for mount in mounts for word in ("--volume", mount)]
    options = ("--network", "none", *volumes, "--env", f"HF_HOME={node.hf_home}")
    return docker.throw_away(node.docker, inventory.image, *argv, cluster=inventory.cluster, node=node.name, options=options)


def at_port(inventory: Inventory, port: int) -> Inventory:
    """Return the inventory with the API on another port."""
    return replace(inventory, ports=replace(inventory.ports, api=port))
