"""A server as a LeaderWorkerSet (kubernetes-sigs/lws 0.10), the group of pods that come and go
together, with ranks that vLLM starts itself (`mp`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.errors import RequestError
from launcher.export import pods, proof
from launcher.export.kubernetes_shape import LWS_INDEX, LWS_LEADER, Group, Object
from launcher.model import Argv, Node
from launcher.payload.agent.desired import Process

NAME = "leaderworkerset.sigs.k8s.io/name"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
KIND = "LeaderWorkerSet"
_WHY: Mapping[str, str] = {
    "startupPolicy: LeaderCreated": (
        "LeaderReady would wait for ever: rank 0 is ready only when its workers have joined"
    ),
    "restartPolicy: RecreateGroupAfterStart": (
        "ranks live and die together; a failed network gate stays to be read"
    ),
    "startupProbe:": "started is who has answered, not who listens",
    "livenessProbe:": "alive is who answers, or whose counters move: /health says neither",
}
# Options whose values tell one node's process from another's.
_OWN = ("--node-rank", "--data-parallel-start-rank")


def objects(group: Group) -> list[Object]:
    """Return the LeaderWorkerSet."""
    return [_workload(group)]


def selector(group: Group) -> Object:
    """Return what selects the pod with the API, by labels of the controller's own."""
    return {NAME: group.target.name, WORKER_INDEX: "0"}


def needs() -> list[str]:
    """Name what the cluster must have for it."""
    return [
        "the LeaderWorkerSet controller, 0.9 or newer: `kubectl get crd"
        " leaderworkersets.leaderworkerset.x-k8s.io`"
    ]


def proven(group: Group) -> list[str]:
    """Return the lines that end once the server has answered."""
    return proof.ready(group, KIND, "condition=Available")


def applied(_: Group) -> str:
    """Say what is to be known of applying it: nothing, for the controller replaces its pods."""
    return ""


def opened(group: Group) -> list[Object]:
    """Return the rules for who else than its pods may reach them."""
    return pods.opened(group)


def left_out(group: Group) -> list[str]:
    """Name what it does not say of how a server is kept."""
    if group.desired.policy.restarts == 0:
        return ["`supervise: false`: Kubernetes starts a dead group again"]
    return ["`restarts:`: nothing bounds how often a LeaderWorkerSet starts its group again"]


def why(_: Group) -> Mapping[str, str]:
    """Return the reason for a line, by the line."""
    return _WHY


def _workload(group: Group) -> Object:
    name, size = group.target.name, group.size
    leader = _template(group, group.nodes[:1], leads=True)
    templates = {"workerTemplate": leader}
    if size > 1:
        worker = _template(group, group.nodes[1:], leads=False)
        templates = {"leaderTemplate": leader, "workerTemplate": worker}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": KIND,
        "metadata": {"name": name, "labels": pods.managed(group)},
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
            },
            "leaderWorkerTemplate": {
                "size": size,
                "restartPolicy": "RecreateGroupAfterStart" if size > 1 else "None",
                **templates,
            },
        },
    }


def _template(group: Group, nodes: Sequence[Node], *, leads: bool) -> Object:
    node = nodes[0]
    made = _with_ranks(group, node, leads=leads)
    if leads:
        policy = group.desired.policy
        probes = pods.probes(group, timeout=policy.start_timeout, stuck=policy.stuck)
        made = {**made, "ports": pods.ports(group), **probes}
    gate = pods.gate(group, node, rank=LWS_INDEX)
    return pods.template(group, nodes, [made], gate)


def _with_ranks(group: Group, node: Node, *, leads: bool) -> Object:
    processes = group.desired.processes
    process = processes[0] if leads else _any_worker(processes[1:])
    return pods.serving(group, node, process.argv, process.env, ours=_variables(process.argv))


def _variables(argv: Argv) -> tuple[str, ...]:
    ours = (LWS_LEADER, LWS_INDEX)
    return tuple(word for word in argv if word in ours or word.startswith("exec "))


def _any_worker(processes: Sequence[Process]) -> Process:
    """Return the process of all nodes but the first: their pods come from one template, so that
    only their number may differ.

    Raises RequestError where more does.
    """
    first = processes[0]
    argv = list(first.argv)
    for option in _OWN:
        if option not in argv:
            continue
        at = argv.index(option) + 1
        values = [each.argv[at] for each in processes]
        step = int(values[0])
        if values != [str(step * (i + 1)) for i in range(len(values))]:
            raise _uneven()
        if step == 1:
            argv[at] = LWS_INDEX
        elif len(processes) > 1:
            argv = _counted(argv, at, step)
    if any(_without_own(each.argv) != _without_own(first.argv) for each in processes):
        raise _uneven()
    return Process(node=first.node, argv=tuple(argv), env=first.env, replicas=first.replicas)


def _counted(argv: list[str], at: int, step: int) -> list[str]:
    """Return a command whose option is a multiple of the pod's number, which a shell counts."""
    option = argv[at - 1]
    rest = [*argv[: at - 1], *argv[at + 1 :]]
    return ["sh", "-c", f'exec "$@" {option} $((LWS_WORKER_INDEX * {step}))', "ranks", *rest]


def _without_own(argv: Argv) -> list[str]:
    return [word for i, word in enumerate(argv) if not (i and argv[i - 1] in _OWN)]


def _uneven() -> RequestError:
    return RequestError(
        "the processes behind the first one differ in more than their number",
        hint="name a split that is equal on all nodes: `--tp N --pp N --dp N`",
    )
