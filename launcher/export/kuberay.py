"""A server as a RayJob (ray-project/kuberay 1.7) with its own RayCluster: the operator starts Ray
in the pods and submits `vllm serve`; when that exits, it retries with new pods.

Sources: controllers/ray/common/pod.go and service.go, controllers/ray/utils/validation.go, at
2026-08-19.
"""

import shlex
from collections.abc import Mapping

from launcher.core.domain import Node
from launcher.export import pods
from launcher.export.group import RAY_HEAD, Object, PodGroup

KIND = "RayJob"
CONDITION = "jsonpath='{.status.jobStatus}'=RUNNING"
NEEDS = "the KubeRay operator, 1.5.1 or newer: `kubectl get crd rayjobs.ray.io`"
OMISSIONS = "`stuck:`: the operator only probes Ray, and retries when `vllm serve` exits"
WHY = {
    "submissionMode: HTTPMode": "the operator submits the job itself, without a submitter pod",
    "mode: token": "Ray asks for a token, which the operator creates",
    "ray.io/overwrite-container-cmd: 'true'": (
        "the pods start Ray themselves, with the operator's own command"
    ),
}
# Where the inventory sets no limit: each retry brings new pods, without a pause.
_RETRIES = 5
_JOB_TTL = 600  # seconds for logs of a job that has ended
# The operator's own command (`ray start …`), which otherwise raises the limit itself.
_START = "ulimit -n 65536; exec $KUBERAY_GEN_RAY_START_CMD"
_OVERWRITE = {"ray.io/overwrite-container-cmd": "true"}
_CHECKED = "/tmp/network-checked"
# Its pods' label: helm-chart/kuberay-operator/templates/deployment.yaml, and config/manager.
_OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}


def workload(group: PodGroup) -> Object:
    """Return the RayJob of a server."""
    (process,) = group.desired.processes
    restarts = group.desired.policy.restarts
    retries = _RETRIES if restarts is None else restarts
    return job(group, shlex.join(process.argv), process.env, retries=retries)


def selector(group: PodGroup) -> Object:
    """Return the labels of the head's pod, which has the API."""
    return {**pods.labels(group), "ray.io/node-type": "head"}


def dashboard_policy(group: PodGroup) -> Object:
    """Return the rule that lets the operator reach Ray's dashboard, which can run programs."""
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": _OPERATOR}}
    return {"from": [operator], "ports": [{"port": group.inventory.ports.dashboard}]}


def job(group: PodGroup, command: str, env: Mapping[str, str], *, retries: int) -> Object:
    """Return a RayJob that runs a shell command on the head of its own cluster."""
    wait = f"until test -e {_CHECKED}; do sleep 1; done; " if group.gated else ""
    return {
        "apiVersion": "ray.io/v1",
        "kind": KIND,
        "metadata": pods.metadata(group),
        "spec": {
            "entrypoint": f"{wait}{command}",
            "submissionMode": "HTTPMode",
            "backoffLimit": retries,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _JOB_TTL,
            "rayClusterSpec": _cluster(group, env),
        },
    }


def _cluster(group: PodGroup, env: Mapping[str, str]) -> Object:
    head, *workers = group.nodes
    worker_groups = [
        {
            # A group for each node, so that each pod knows its number in the network check.
            "groupName": f"node-{rank}",
            "replicas": 1,
            "minReplicas": 1,
            "maxReplicas": 1,
            **_group_spec(group, node, _worker_script(group, rank), env, {}),
        }
        for rank, node in enumerate(workers, start=1)
    ]
    return {
        "rayVersion": group.inventory.ray.version,
        "authOptions": {"mode": "token"},
        "headGroupSpec": _group_spec(
            group, head, _head_script(group), env, {"ports": _ports(group)}
        ),
        **({"workerGroupSpecs": worker_groups} if worker_groups else {}),
    }


def _head_script(group: PodGroup) -> str:
    """Return the head's commands: Ray starts beside the check, since the operator's init container
    blocks the workers until it runs; the job waits for the check.
    """
    check = pods.gate_argv(group, "0", f"${pods.HOST_IP}")
    return f"{pods.shell_script((*check, 'touch', _CHECKED))} &\n{_START}" if check else _START


def _worker_script(group: PodGroup, rank: int) -> str:
    """Return a worker's commands: without a passed check its Ray does not start, and the operator
    submits the job only when all pods are ready.
    """
    check = pods.gate_argv(group, str(rank), RAY_HEAD)
    return pods.shell_script(("exec", *check, "sh", "-c", _START)) if check else _START


def _group_spec(
    group: PodGroup, node: Node, commands: str, env: Mapping[str, str], extra: Mapping[str, object]
) -> Object:
    template = pods.pod_template(group, [node], commands, env, extra)
    metadata = {**template["metadata"], "annotations": _OVERWRITE}
    return {
        "rayStartParams": _ray_params(group, node),
        "template": {**template, "metadata": metadata},
    }


def _ray_params(group: PodGroup, node: Node) -> Mapping[str, str]:
    """Return the options of `ray start`; the operator adds addresses."""
    ports, store = group.inventory.ports, group.inventory.ray.object_store
    params = {"port": ports.gcs, "dashboard-port": ports.dashboard} if node.head else {}
    params |= {"num-gpus": group.shares[node.name], "metrics-export-port": ports.metrics_export}
    params |= {} if store is None else {"object-store-memory": store}
    return {**{name: str(value) for name, value in params.items()}, "disable-usage-stats": "true"}


def _ports(group: PodGroup) -> list[Object]:
    ports = group.inventory.ports
    numbers = {"gcs-server": ports.gcs, "dashboard": ports.dashboard}
    if group.gated:
        numbers["network-check"] = ports.probe
    if not group.batch:
        numbers["http"] = group.request.port
    return [{"name": name, "containerPort": number} for name, number in numbers.items()]
