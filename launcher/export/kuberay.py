"""A server as a RayJob (ray-project/kuberay 1.7), which brings its own RayCluster: the operator
starts Ray in the pods, submits `vllm serve` to it, and when that ends begins anew with other pods,
so many times.

Sources: controllers/ray/common/pod.go and service.go, controllers/ray/utils/validation.go, at
2026-08-19.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import pairwise

from launcher.export import pods, proof
from launcher.export.kubernetes_shape import Group, Object
from launcher.model import Argv, Node
from launcher.tools import payload, ray

KIND = "RayJob"
_OLDEST = "1.5.1"  # of KubeRay that gives its Ray a token
# Where retries may be as many as it takes: each one begins with other pods and without a pause.
_RETRIES = 5
_KEPT = 600  # seconds for logs of a job that is over
# The operator's own words (`KUBERAY_GEN_RAY_START_CMD`), behind our entry script, which has the
# secrets; it would raise the limit itself.
_START = "ulimit -n 65536; exec $KUBERAY_GEN_RAY_START_CMD"
_OVERWRITE = {"ray.io/overwrite-container-cmd": "true"}
# What the operator says itself: who the head is, by its Service, and the token, by a Secret of its.
_ITS_OWN = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
_ITS_WORDS = ("head", "block", "address", "node-ip-address", "dashboard-host")
# Its pods' label: helm-chart/kuberay-operator/templates/deployment.yaml, and config/manager.
_OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}
_WHY: Mapping[str, str] = {
    "submissionMode: HTTPMode": "the operator submits it itself: no shell reads the words twice",
    "ray.io/overwrite-container-cmd: 'true'": (
        "the operator's words for Ray, behind the entry script, which has the secrets"
    ),
    "mode: token": "Ray asks for a token, which the operator makes",
    "publishNotReadyAddresses: true": "ranks meet before any of them is ready",
}


def objects(group: Group) -> list[Object]:
    """Return the RayJob, and how its pods find the head."""
    (process,) = group.desired.processes
    made = job(group, process.argv, process.env, retries=_retries(group))
    return [made, found(group)]


def found(group: Group) -> Object:
    """Return the Service by which pods find the head, for the network's proof."""
    return pods.found_by(group, selector(group), group.inventory.ports.probe)


def selector(group: Group) -> Object:
    """Return what selects the head, which has the API, by a label of the operator's own."""
    return {**pods.labels(group), "ray.io/node-type": "head"}


def needs() -> list[str]:
    """Name what the cluster must have for it."""
    return [f"the KubeRay operator, {_OLDEST} or newer: `kubectl get crd rayjobs.ray.io`"]


def proven(group: Group) -> list[str]:
    """Return the lines that end once the server has answered."""
    ports = group.inventory.ports
    host = payload.api_host(group.request.host)
    asked = payload.answered(ports, host, pods.CANARY, group.request.placement.dp)
    chosen = ",".join(f"{name}={each}" for name, each in selector(group).items())
    kubectl = group.target.kubectl
    runs = proof.awaited(group, KIND, "jsonpath='{.status.jobStatus}'=RUNNING")
    return [
        "Prove it: the first command ends when Ray has begun to run vLLM, which then loads the",
        "weights, the second when a completion has come back; the last one is a chat.",
        f"  {runs}",
        f'  until {kubectl} exec "$({kubectl} get pods -l {chosen} -o name)" --'
        f" {shlex.join(asked)}",
        "  do sleep 10; done",
    ]


def applied(group: Group) -> str:
    """Say what is to be known of applying it."""
    target = group.target
    return (
        "A change reaches no job that runs; before it:"
        f" {target.kubectl} delete {KIND.lower()} {target.name}"
    )


def opened(group: Group) -> list[Object]:
    """Return the rules for who else than its pods may reach them."""
    return [*pods.opened(group), by_operator(group)]


def by_operator(group: Group) -> Object:
    """Return the rule for the operator, who runs programs by Ray's dashboard."""
    whom = {"namespaceSelector": {}, "podSelector": {"matchLabels": _OPERATOR}}
    return pods.allowed(whom, group.inventory.ports.dashboard)


def left_out(group: Group) -> list[str]:
    """Name what it does not say of how a server is kept."""
    return [
        f"`restarts:`: a job of Ray's that fails is tried again {_retries(group)} times in all,"
        " with other pods each time",
        "whether the server lives: the operator looks at Ray alone, and at the end of `vllm serve`",
    ]


def why(_: Group) -> Mapping[str, str]:
    """Return the reason for a line, by the line."""
    return _WHY


def job(group: Group, argv: Argv, env: Mapping[str, str], *, retries: int) -> Object:
    """Return the RayJob that runs a command on the head of a cluster of its own."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": KIND,
        "metadata": {"name": group.target.name, "labels": pods.managed(group)},
        "spec": {
            "entrypoint": shlex.join(argv),
            "submissionMode": "HTTPMode",
            "backoffLimit": retries,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _KEPT,
            "rayClusterSpec": _cluster(group, env),
        },
    }


def _retries(group: Group) -> int:
    restarts = group.desired.policy.restarts
    return _RETRIES if restarts is None else restarts


def _cluster(group: Group, env: Mapping[str, str]) -> Object:
    head, *workers = group.nodes
    groups = [
        {
            # One a node: so each knows its number, by which pods prove the network to each other.
            "groupName": f"node-{rank}",
            "replicas": 1,
            "minReplicas": 1,
            "maxReplicas": 1,
            **_node(group, node, rank, env),
        }
        for rank, node in enumerate(workers, start=1)
    ]
    return {
        "rayVersion": group.inventory.ray.version,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": False,
        "headGroupSpec": _node(group, head, 0, env),
        **({"workerGroupSpecs": groups} if groups else {}),
    }


def _node(group: Group, node: Node, rank: int, env: Mapping[str, str]) -> Object:
    made = pods.serving(group, node, ("sh", "-c", _START), env, ours=())
    plain = [each for each in made["env"] if each["name"] not in _ITS_OWN]
    made = {**made, "env": plain, "ports": _ports(group, node)}
    gate = pods.gate(group, node, rank=str(rank))
    template = pods.template(group, [node], [made], gate)
    notes = {**template["metadata"]["annotations"], **_OVERWRITE}
    template = {**template, "metadata": {**template["metadata"], "annotations": notes}}
    return {"rayStartParams": _params(group, node), "template": template}


def _params(group: Group, node: Node) -> Mapping[str, str]:
    """Return what `up` tells Ray on a node, less what is the operator's to say."""
    here = ray.start_head if node.head else ray.start_worker
    words = [*here(node, group.inventory)[2:], "--"]
    found: dict[str, str] = {}
    for word, after in pairwise(words):
        name = word.removeprefix("--")
        if word.startswith("--") and name not in _ITS_WORDS:
            found[name] = "true" if after.startswith("--") else after
    return {**found, "num-gpus": str(group.shares[node.name])}


def _ports(group: Group, node: Node) -> list[Object]:
    ports = group.inventory.ports
    named = {"metrics": ports.metrics_export}
    if node.head:
        named |= {
            "gcs-server": ports.gcs,
            "dashboard": ports.dashboard,
            "client": ports.client,
        }
        if group.programs is None:
            named["http"] = group.request.port
    return [pods.port(group, name, number) for name, number in named.items()]
