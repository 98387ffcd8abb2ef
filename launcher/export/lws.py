"""A server as a LeaderWorkerSet (kubernetes-sigs/lws 0.10): a group of pods that are created,
restarted and deleted together, with ranks that vLLM starts itself (`mp`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from launcher import upstream
from launcher.agent.desired import ProcessSpec
from launcher.core.errors import RequestError
from launcher.export import pods
from launcher.export.group import LWS_INDEX, LWS_LEADER, Object, PodGroup

KIND = "LeaderWorkerSet"
CONDITION = "condition=Available"
NEEDS = (
    "the LeaderWorkerSet controller, 0.9 or newer: `kubectl get crd"
    " leaderworkersets.leaderworkerset.x-k8s.io`"
)
OMISSIONS = "`restarts:`: a LeaderWorkerSet recreates its group without a limit"
WHY = {
    "startupPolicy: LeaderCreated": (
        "LeaderReady would wait forever: rank 0 is ready only when its workers have joined"
    ),
    "restartPolicy: RecreateGroupAfterStart": "a container that restarts recreates all pods",
}
_PERIOD = 10  # seconds between two probes
# Options that differ between the nodes' processes.
_OWN = ("--node-rank", "--data-parallel-start-rank")


def workload(group: PodGroup) -> Object:
    """Return the LeaderWorkerSet."""
    leader = _template(group, group.desired.processes[0], leads=True)
    templates = {"workerTemplate": leader}
    if group.size > 1:
        worker = _template(group, _any_worker(group.desired.processes[1:]), leads=False)
        templates = {"leaderTemplate": leader, "workerTemplate": worker}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": KIND,
        "metadata": pods.metadata(group),
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
            "leaderWorkerTemplate": {
                "size": group.size,
                "restartPolicy": "RecreateGroupAfterStart" if group.size > 1 else "None",
                **templates,
            },
        },
    }


def selector(group: PodGroup) -> Object:
    """Return the labels of the pod with the API."""
    prefix = "leaderworkerset.sigs.k8s.io"
    return {f"{prefix}/name": group.target.name, f"{prefix}/worker-index": "0"}


def _template(group: PodGroup, process: ProcessSpec, *, leads: bool) -> Object:
    nodes = group.nodes[:1] if leads else group.nodes[1:]
    command = pods.shell_script(
        ("exec", *pods.gate_argv(group, LWS_INDEX, LWS_LEADER), *process.argv)
    )
    fields = {"ports": [{"name": "http", "containerPort": group.request.port}], **_probes(group)}
    return pods.pod_template(group, nodes, command, process.env, fields if leads else {})


def _probes(group: PodGroup) -> Object:
    """Return the probes of the pod with the API: vLLM answers `/health` from the loading of the
    model until an engine fails.
    """
    policy = group.desired.policy
    start = policy.start_timeout + (pods.gate_deadline(group) if group.gated else 0)
    health = {
        "httpGet": {"path": upstream.text("vllm.route-health"), "port": "http"},
        "periodSeconds": _PERIOD,
    }

    def probe(seconds: float) -> Object:
        failures = max(1, math.ceil(seconds / _PERIOD))
        return {**health, "timeoutSeconds": _PERIOD, "failureThreshold": failures}

    return {
        "startupProbe": probe(start),
        "readinessProbe": probe(3 * _PERIOD),
        "livenessProbe": probe(policy.stuck),
    }


def _any_worker(processes: Sequence[ProcessSpec]) -> ProcessSpec:
    """Return the process of all pods but the first, which share one template: each option of its
    own must be a multiple of the pod's number.

    Raises RequestError otherwise.
    """
    first = processes[0]
    parts = [int(part) if before in _OWN else part for before, part in pairwise(("", *first.argv))]
    for index, process in enumerate(processes, start=1):
        argv = [str(part * index) if isinstance(part, int) else part for part in parts]
        if tuple(argv) != process.argv:
            raise RequestError(
                "the processes after the first differ in more than their number",
                hint="use a layout that is equal on all nodes: `--tp N --pp N --dp N`",
            )
    counted = {1: LWS_INDEX}
    argv = [
        counted.get(part, f"$((LWS_WORKER_INDEX * {part}))") if isinstance(part, int) else part
        for part in parts
    ]
    return replace(first, argv=tuple(argv))
