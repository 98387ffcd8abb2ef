"""A server as a LeaderWorkerSet (kubernetes-sigs/lws 0.10), ranks started by vLLM itself (`mp`):
the group of pods that come and go together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from launcher.errors import RequestError
from launcher.export import pods
from launcher.export.kubernetes_shape import Group
from launcher.export.pods import Object
from launcher.model import Argv, Node
from launcher.payload.agent.desired import Process

# The controller puts these first into the environment of every container, so that the kubelet
# replaces them in arguments (pkg/utils/pod/pod_utils.go).
LEADER, INDEX = "$(LWS_LEADER_ADDRESS)", "$(LWS_WORKER_INDEX)"
NAME = "leaderworkerset.sigs.k8s.io/name"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
KIND = "LeaderWorkerSet"
# Options whose values tell one node's process from another's.
_OWN = ("--node-rank", "--data-parallel-start-rank")


def objects(group: Group) -> list[Object]:
    """Return the LeaderWorkerSet, and how its API is reached."""
    return [_workload(group)]


def selector(group: Group) -> Object:
    """Return what selects the pod with the API, by labels of the controller's own."""
    return {NAME: group.target.name, WORKER_INDEX: "0"}


def _workload(group: Group) -> Object:
    name, size = group.target.name, group.size
    leader = _template(group, group.nodes[:1], group.desired.processes[0], leads=True)
    templates = {"workerTemplate": leader}
    if size > 1:
        workers = _any_worker(group.desired.processes[1:])
        templates = {
            "leaderTemplate": leader,
            "workerTemplate": _template(group, group.nodes[1:], workers, leads=False),
        }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": KIND,
        "metadata": {"name": name, "labels": managed(group)},
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


def managed(group: Group) -> Object:
    """Return the labels of objects."""
    return {**pods.labels(group), "app.kubernetes.io/managed-by": "vlaunch"}


def _template(group: Group, nodes: Sequence[Node], process: Process, *, leads: bool) -> Object:
    policy, node = group.desired.policy, nodes[0]
    made = pods.serving(group, node, process.argv, process.env, ours=_variables(process.argv))
    if leads:
        probes = pods.probes(group, timeout=policy.start_timeout, stuck=policy.stuck)
        made = {**made, "ports": [pods.port(group)], **probes}
    init = []
    if pods.gated(group):
        init = [pods.gate(group, node, rank=INDEX, leader=LEADER, wait=policy.start_timeout)]
    texts = json.dumps(pods.payload_files(group), sort_keys=True).encode()
    return {
        "metadata": {
            "labels": pods.labels(group),
            # A change of the programs brings new pods, as one of the rest does.
            "annotations": {"vlaunch.payload": hashlib.sha256(texts).hexdigest()[:12]},
        },
        "spec": pods.pod_spec(group, nodes, [made], init),
    }


def _variables(argv: Argv) -> tuple[str, ...]:
    return tuple(word for word in argv if word in (LEADER, INDEX) or word.startswith("exec "))


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
            argv[at] = INDEX
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
