"""From a server and a cluster's inventory, the manifests for Kubernetes: plain objects, with all
that is around them, and a header for whoever applies them.

Pure, and the same text each time. What runs in the pods is what runs in the nodes' containers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher.errors import RequestError
from launcher.export import (
    kuberay,
    kubernetes_rules,
    lws,
    pod_volumes,
    pods,
    yaml_text,
)
from launcher.export import kubernetes_head as head
from launcher.export.kubernetes_shape import Group, Kind, Object

MOST = 1 << 20  # bytes of a ConfigMap (kubernetes.io/docs/concepts/configuration/configmap)
# What must be there before, so that `--check` of an edited copy knows it as well.
PROVIDE = "vlaunch.provide"
EXPORT = "vlaunch.export"
# The reason above a line, where somebody may wonder.
_WHY: Mapping[str, str] = {
    "enableServiceLinks: false": (
        "a Service called `vllm` would set VLLM_PORT, on which vLLM stops"
    ),
    "allowPrivilegeEscalation: false": (
        "capabilities stay as the runtime gives them: without DAC_OVERRIDE root could not write to"
        " caches of others"
    ),
    "medium: Memory": "/dev/shm, for NCCL and tensor parallelism; it counts as the pod's memory",
    f"defaultMode: {pod_volumes.EXECUTABLE}": f"0{pod_volumes.EXECUTABLE:o} in octal digits",
    f"defaultMode: {pod_volumes.READ_ONLY}": f"0{pod_volumes.READ_ONLY:o} in octal digits",
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

    def applied(self, group: Group, /) -> str:
        """Say what is to be known of applying it; empty where nothing is."""

    def opened(self, group: Group, /) -> list[Object]:
        """Return the rules for who else than its pods may reach them."""

    def left_out(self, group: Group, /) -> list[str]:
        """Name what it does not say of how a server is kept."""

    def why(self, group: Group, /) -> Mapping[str, str]:
        """Return the reason for a line, by the line."""


_KINDS: Mapping[Kind, Workload] = {
    "lws": lws,
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
        header = head.for_folder(self.header)
        said = (*header, "Change it by JSON patches (`patches:` with `op:`), no others.")
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
    objects = made(group, (workload, *others, *around))
    header = tuple(_header(group, kind, objects))
    return Manifests(header=header, objects=objects, why={**why(group), **kind.why(group)})


def made(group: Group, objects: Sequence[Object]) -> tuple[Object, ...]:
    """Return objects, the group's own the first, with what is written into them last; raises
    RequestError where they break a rule of Kubernetes'.
    """
    workload, *others = objects
    found = tuple(_placed(group, each) for each in (_annotated(group, workload), *others))
    if wrong := kubernetes_rules.mistakes(found):
        raise RequestError(
            "what is asked for cannot work in Kubernetes",
            evidence=wrong,
            hint="see the options: `vlaunch export kubernetes --help`",
        )
    return found


def why(group: Group) -> Mapping[str, str]:
    """Return the reason for a line, by the line, whatever the kind."""
    provided = f"{PROVIDE}: {','.join(_provided(group))}"
    return {**_WHY, provided: "what must be there before: `--check` takes it as there"}


def _placed(group: Group, each: Object) -> Object:
    """Put an object into the namespace that is asked for."""
    if not group.target.namespace:
        return each
    name, *rest = each["metadata"].items()
    inside = dict([name, ("namespace", group.target.namespace), *rest])
    return {**each, "metadata": inside}


def _annotated(group: Group, workload: Object) -> Object:
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


def policy(group: Group, opened: Sequence[Object]) -> Object:
    """Return what keeps others from the pods but for what is opened."""
    own = {"podSelector": {"matchLabels": pods.labels(group)}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(group),
        "spec": {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}, *opened]},
    }


def _budget(group: Group) -> Object:
    # Ray's clusters have no `scale`, by which Kubernetes would know how many pods there should be.
    ray = group.target.kind == "kuberay"
    most: Object = {"minAvailable": group.size} if ray else {"maxUnavailable": 0}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(group),
        "spec": {**most, "selector": {"matchLabels": pods.labels(group)}},
    }


def _monitor(group: Group) -> Object:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(group),
        "spec": {
            "selector": {"matchLabels": _KINDS[group.target.kind].selector(group)},
            "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
        },
    }


def _header(group: Group, kind: Workload, objects: Sequence[Object]) -> list[str]:
    request = group.request
    split = request.placement
    ranks = "vLLM's own ranks (mp)" if request.backend == "mp" else "ranks that Ray runs"
    needs = (*kind.needs(), *head.needs(group, objects))
    return [
        f"{request.model} on {head.nodes(group)} of the cluster `{group.original.cluster}`:"
        f" {split.words}, {ranks}, as a {kind.KIND}.",
        "Made by `vlaunch export kubernetes`; the same inventory gives the same text.",
        "",
        *listed("The cluster must have:", needs),
        *head.secret(group),
        "",
        *head.apply(group, kind.applied(group)),
        *kind.proven(group),
        *head.asked(group),
        *head.why_not(group),
        "",
        *listed("Not carried over:", (*group.left_out, *kind.left_out(group))),
        "",
    ]


def listed(title: str, lines: Iterable[str]) -> list[str]:
    """Return lines as a list; one that begins with a space belongs to the one before."""
    return [title, *(each if each.startswith(" ") else f"- {each}" for each in lines)]
