"""From a server and a cluster's inventory, the manifests for Kubernetes: plain objects, with all
that is around them, and a header for whoever applies them.

Pure, and the same text each time. What runs in the pods is what runs in the nodes' containers.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher.errors import RequestError
from launcher.export import (
    agents,
    kuberay,
    kubernetes_rules,
    lws,
    pod_volumes,
    pods,
    proof,
    statefulset,
    yaml_text,
)
from launcher.export.kubernetes_shape import Group, Kind, Object

MOST = 1 << 20  # bytes of a ConfigMap (kubernetes.io/docs/concepts/configuration/configmap)
# What must be there before, so that `--check` of an edited copy knows it as well.
PROVIDE = "vlaunch.provide"
EXPORT = "vlaunch.export"
# The reason above a line, where somebody may wonder.
WHY: Mapping[str, str] = {
    "enableServiceLinks: false": (
        "a Service called `vllm` would set VLLM_PORT, on which vLLM stops"
    ),
    "allowPrivilegeEscalation: false": (
        "capabilities stay as the runtime gives them: without DAC_OVERRIDE root could not write to"
        " caches of others"
    ),
    "medium: Memory": "/dev/shm, for NCCL and tensor parallelism; it counts as the pod's memory",
    "kind: NetworkPolicy": "between the pods everything: ranks take ports that the kernel chooses",
}


class Workload(Protocol):
    """What a kind of object says of a group; each kind is a module."""

    KIND: str

    def objects(self, group: Group, /) -> list[Object]:
        """Return the object, and others that it needs."""

    def selector(self, group: Group, /) -> Object:
        """Return the labels of the pod with the API."""

    def needs(self) -> list[str]:
        """Name what the cluster must have for it."""

    def proven(self, group: Group, /) -> list[str]:
        """Return the lines that end once the server has answered."""

    def opened(self, group: Group, /) -> list[int]:
        """Return the ports that others than its pods may reach."""

    def left_out(self, group: Group, /) -> list[str]:
        """Name what it does not say of how a server is kept."""

    def why(self, group: Group, /) -> Mapping[str, str]:
        """Return the reason for a line, by the line."""


_KINDS: Mapping[Kind, Workload] = {
    "lws": lws,
    "statefulset": statefulset,
    "kuberay": kuberay,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifests:
    """An export: what is said before it, its objects, and why some lines are as they are."""

    header: tuple[str, ...]
    objects: tuple[Object, ...]
    why: Mapping[str, str]

    @property
    def text(self) -> str:
        """All of it, for `kubectl apply --server-side -f -`."""
        return yaml_text.comment(self.header) + yaml_text.dump(self.objects, self.why)

    def files(self) -> Mapping[str, str]:
        """Return a file for each object, and a kustomization with the header, by name."""
        found = {
            f"{each['kind'].lower()}-{each['metadata']['name']}.yaml": self._one(each)
            for each in self.objects
        }
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": sorted(found),
        }
        # A strategic-merge patch replaces the list of containers of a custom resource as a whole.
        said = (*self.header, "Change it by JSON patches (`patches:` with `op:`), no others.")
        text = yaml_text.comment(said) + yaml_text.dump([kustomization], {})
        return {**found, "kustomization.yaml": text}

    def _one(self, each: Object) -> str:
        return yaml_text.dump([each], self.why)


def manifests(group: Group) -> Manifests:
    """Return the export of a group.

    Raises RequestError: names or values break a rule of Kubernetes'.
    """
    kind = _KINDS[group.target.kind]
    around = [programs(group), _service(group)]
    if not group.target.host_network:
        around.append(policy(group, kind.opened(group)))
    if group.target.disruption_budget:
        around.append(_budget(group))
    if group.target.pod_monitor:
        around.append(_monitor(group))
    workload, *others = kind.objects(group)
    objects = (annotated(group, workload), *others, *around)
    judge(objects)
    header = tuple(_header(group, kind))
    return Manifests(header=header, objects=objects, why={**WHY, **kind.why(group)})


def judge(objects: Sequence[Object]) -> None:
    """Raise RequestError where objects break a rule of Kubernetes'."""
    if wrong := kubernetes_rules.mistakes(objects):
        raise RequestError(
            "what is asked for cannot work in Kubernetes",
            evidence=wrong,
            hint="see the options: `vlaunch export kubernetes --help`",
        )


def annotated(group: Group, workload: Object) -> Object:
    """Say in the object what it is made of, so that a change shows, and what must be there."""
    digest = hashlib.sha256(json.dumps(workload, sort_keys=True).encode()).hexdigest()[:12]
    said = {EXPORT: digest}
    if provide := _provided(group):
        said[PROVIDE] = ",".join(provide)
    metadata = {**workload["metadata"], "annotations": said}
    return {**workload, "metadata": metadata}


def _provided(group: Group) -> list[str]:
    """Name the objects that must be there before."""
    found = [f"secret/{group.target.name}-secrets"] if group.secrets else []
    if group.target.volume is not None and group.target.volume.claim:
        found.append(f"persistentvolumeclaim/{group.target.volume.claim}")
    return found


def metadata(group: Group, suffix: str = "") -> Object:
    """Return the name and the labels of an object."""
    return {"name": f"{group.target.name}{suffix}", "labels": pods.managed(group)}


def programs(group: Group) -> Object:
    """Return the ConfigMap of the helper programs; raises RequestError."""
    texts = pod_volumes.payload_files(group)
    size = sum(len(text.encode()) + len(path) for path, text in texts.items())
    if size > MOST:
        raise RequestError(
            f"the helper programs have {size} bytes, more than a ConfigMap takes ({MOST})",
            hint="report it: this is a mistake of vlaunch",
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(group, "-payload"),
        "data": {pod_volumes.key(path): text for path, text in texts.items()},
    }


def _service(group: Group) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(group, "-api"),
        "spec": {
            "selector": _KINDS[group.target.kind].selector(group),
            "ports": [{"name": "http", "port": group.request.port, "targetPort": "http"}],
        },
    }


def policy(group: Group, opened: Iterable[int]) -> Object:
    """Return what keeps others from the pods but for the ports that are opened."""
    own = {"podSelector": {"matchLabels": pods.labels(group)}}
    ports = [{"port": each, "protocol": "TCP"} for each in opened]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(group),
        "spec": {
            **own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [own]},
                {"from": [{"namespaceSelector": {}}], "ports": ports},
            ],
        },
    }


def _budget(group: Group) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(group),
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": pods.labels(group)}},
    }


def _monitor(group: Group) -> Object:
    names = ("http", agents.METRICS) if group.agents else ("http",)
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(group),
        "spec": {
            "selector": {"matchLabels": _KINDS[group.target.kind].selector(group)},
            "podMetricsEndpoints": [
                {"port": each, "path": "/metrics", "interval": "15s"} for each in names
            ],
        },
    }


def _header(group: Group, kind: Workload) -> list[str]:
    name, request = group.target.name, group.request
    split = request.placement
    ranks = "vLLM's own ranks (mp)" if request.backend == "mp" else "ranks that Ray runs"
    return [
        f"{request.model} on {_nodes(group)} of the cluster `{group.original.cluster}`:"
        f" {split.words}, {ranks}, as a {kind.KIND}.",
        "Made by `vlaunch export kubernetes`; the same inventory gives the same text.",
        "",
        "The cluster must have:",
        *(f"- {each}" for each in (*kind.needs(), *needs(group))),
        *before(group),
        "",
        "Apply it (--server-side, for an annotation of other applies would be too large):",
        f"  kubectl apply --server-side -f FILE{_budget_note(group)}",
        *kind.proven(group),
        f"  kubectl port-forward service/{name}-api {request.port}:{request.port} &",
        f"  {_chat(group)}",
        "Why not:",
        f"  kubectl logs -l app.kubernetes.io/instance={name} --all-containers --prefix --tail=-1"
        " | vlaunch doctor --from -",
        "",
        "Not carried over:",
        *(f"- {each}" for each in (*group.left_out, *kind.left_out(group))),
        "",
    ]


def _nodes(group: Group) -> str:
    return "1 node" if group.size == 1 else f"{group.size} nodes"


def needs(group: Group) -> list[str]:
    """Name what the cluster must have, whatever runs in the pods."""
    inventory, target, gpus = group.inventory, group.target, pods.gpu_resource(group)
    each = sorted(set(group.shares.values()))
    found = []
    if gpus:
        found.append(f"{_nodes(group)} with {' or '.join(map(str, each))} free `{gpus}`")
    else:
        found.append(_nodes(group))
    if target.rdma is not None:
        found.append(f"`{target.rdma[0]}` on each of them, {target.rdma[1]} a pod")
    if inventory.privileged:
        found.append("a namespace in which privileged pods are allowed")
    if target.host_network:
        names = ", ".join(node.name for node in group.nodes)
        found.append(
            f"nodes that are called {names} (`kubernetes.io/hostname`), for their network"
            " is used; NetworkPolicy does not hold there: `vlaunch export firewall`"
        )
    found.append(f"the image {inventory.image}, which the nodes can pull{_with_ray(group)}")
    found.append(_model_needs(group))
    if target.memory is None:
        found.append(
            "memory that nobody else takes: none is requested; --memory SIZE asks for it, weights"
            " on their way and /dev/shm included"
        )
    return found


def _with_ray(group: Group) -> str:
    if group.request.backend != "ray":
        return ""
    return (
        ", with Ray in it: stock images of vLLM carry none; `vlaunch up` builds one that does"
        " (`vlaunch image list` names it), `--image IMAGE` takes it"
    )


def _model_needs(group: Group) -> str:
    at, volume = pod_volumes.model_at(group), group.target.volume
    if volume is not None and volume.claim:
        where = f"the claim {volume.claim}" + (f" (below {volume.path})" if volume.path else "")
        return f"{where} with the model at {at}: ReadOnlyMany or ReadWriteMany, in this namespace"
    folder = volume.path if volume is not None else at
    return f"the model in {folder} of every node, or a way to Hugging Face from there"


def before(group: Group) -> list[str]:
    """Return the line that makes the secret, where there is one."""
    names = group.secrets
    if not names:
        return []
    sources = group.original.secrets
    words = ["kubectl", "create", "secret", "generic", f"{group.target.name}-secrets"]
    given = []
    for name in names:
        source = sources.get(name)
        if source is None:
            given.append(f'--from-literal={name}="$(openssl rand -hex 32)"')
        elif source.file is not None:
            given.append(f"--from-file={name}={source.file}")
        else:
            given.append(f'--from-literal={name}="${source.env or name}"')
    return ["- the secret, once:", f"    {shlex.join(words)} {' '.join(given)}"]


def _chat(group: Group) -> str:
    url = f"http://localhost:{group.request.port}/v1"
    return proof.chat(url, group.request, group.original)


def _budget_note(group: Group) -> str:
    if not group.target.disruption_budget:
        return ""
    return "   # its PodDisruptionBudget blocks drains: delete that first"
