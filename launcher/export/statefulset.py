"""A server as a StatefulSet with a Service that names its pods: nobody else's controller must be
installed. The pods' agents do what no controller would, and keep the ranks as one group.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.export import agents, pods, proof
from launcher.export import kubernetes_shape as shape
from launcher.export.kubernetes_shape import Group, Object

KIND = "StatefulSet"
INDEX = "$(POD_INDEX)"
_FIELDS = {**agents.FIELDS, "POD_INDEX": "metadata.labels['apps.kubernetes.io/pod-index']"}
_WHY: Mapping[str, str] = {
    "podManagementPolicy: Parallel": (
        "one after the other would wait for ever: rank 0 is ready only when all have joined"
    ),
    "type: OnDelete": "ranks change together: after a change, delete all pods",
    "publishNotReadyAddresses: true": "ranks meet before any of them is ready",
    **agents.WHY,
}


def objects(group: Group) -> list[Object]:
    """Return the StatefulSet, and the Service by which its pods are found."""
    found = pods.found_by(group, pods.labels(group), group.inventory.ports.group)
    return [_workload(group), found]


def selector(group: Group) -> Object:
    """Return what selects the pod with the API, by a label of the controller's own."""
    return {"statefulset.kubernetes.io/pod-name": _pods(group)[0]}


def needs() -> list[str]:
    """Name what the cluster must have for it."""
    return [
        "Kubernetes 1.28 or newer, which tells a pod its number (`apps.kubernetes.io/pod-index`)"
    ]


def proven(group: Group) -> list[str]:
    """Return the lines that end once the server has answered."""
    return proof.ready(group, KIND, f"jsonpath='{{.status.readyReplicas}}'={group.size}")


def applied(group: Group) -> str:
    """Say what is to be known of applying it."""
    target = group.target
    return (
        "After a change delete all pods, which stay as they were till then:"
        f" {target.kubectl} delete pods -l {pods.INSTANCE}={target.name}"
    )


def opened(group: Group) -> list[Object]:
    """Return the rules for who else than its pods may reach them."""
    return pods.opened(group)


def left_out(_: Group) -> list[str]:
    """Name what it does not say of how a server is kept: nothing."""
    return []


def why(_: Group) -> Mapping[str, str]:
    """Return the reason for a line, by the line."""
    return _WHY


def _pods(group: Group) -> list[str]:
    return [pod for pod, _ in shape.pods(group.target, group.size)]


def _workload(group: Group) -> Object:
    name = group.target.name
    return {
        "apiVersion": "apps/v1",
        "kind": KIND,
        "metadata": {"name": name, "labels": pods.managed(group)},
        "spec": {
            "serviceName": f"{name}{shape.RANKS}",
            "replicas": group.size,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": pods.labels(group)},
            "template": _template(group),
        },
    }


def _template(group: Group) -> Object:
    nodes = group.nodes
    argv = agents.alike(group, nodes[0])
    made = pods.serving(group, nodes[0], argv, {}, ours=(agents.POD,), fields=_FIELDS)
    made = {**made, "ports": pods.ports(group), **agents.probe()}
    gate = pods.gate(group, nodes[0], rank=INDEX, fields=_FIELDS)
    return pods.template(group, nodes, [made], gate)
