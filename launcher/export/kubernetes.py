"""From a server and a cluster's inventory, the manifests for Kubernetes: plain objects, with all
that is around them, and a header for whoever applies them.

Pure, and the same text each time. What runs in the pods is what runs in the nodes' containers.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import RequestError
from launcher.export import kubernetes_rules, lws, pods, proof, yaml_text
from launcher.export.kubernetes_shape import Group
from launcher.export.pods import Object

_MOST = 1 << 20  # bytes of a ConfigMap (kubernetes.io/docs/concepts/configuration/configmap)
# What must be there before, so that `--check` of an edited copy knows it as well.
PROVIDE = "vlaunch.provide"
EXPORT = "vlaunch.export"
# The reason above a line, where somebody may wonder.
WHY: Mapping[str, str] = {
    "startupPolicy: LeaderCreated": (
        "LeaderReady would wait for ever: rank 0 is ready only when its workers have joined"
    ),
    "restartPolicy: RecreateGroupAfterStart": (
        "ranks live and die together; a failed network gate stays to be read"
    ),
    "enableServiceLinks: false": (
        "a Service called `vllm` would set VLLM_PORT, on which vLLM stops"
    ),
    "allowPrivilegeEscalation: false": (
        "capabilities stay as the runtime gives them: without DAC_OVERRIDE root could not write to"
        " caches of others"
    ),
    "startupProbe:": "started is who has answered, not who listens",
    "livenessProbe:": "alive is who answers, or whose counters move: /health says neither",
    "medium: Memory": "/dev/shm, for NCCL and tensor parallelism; it counts as the pod's memory",
    "kind: NetworkPolicy": "between the pods everything: ranks take ports that the kernel chooses",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifests:
    """An export: what is said before it, and its objects."""

    header: tuple[str, ...]
    objects: tuple[Object, ...]

    @property
    def text(self) -> str:
        """All of it, for `kubectl apply --server-side -f -`."""
        return yaml_text.comment(self.header) + yaml_text.dump(self.objects, WHY)

    def files(self) -> Mapping[str, str]:
        """Return a file for each object, and a kustomization with the header, by name."""
        found = {
            f"{each['kind'].lower()}-{each['metadata']['name']}.yaml": yaml_text.dump([each], WHY)
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


def manifests(group: Group) -> Manifests:
    """Return the export of a group.

    Raises RequestError: names or values break a rule of Kubernetes'.
    """
    around = [_programs(group), _service(group)]
    if not group.target.host_network:
        around.append(_policy(group))
    if group.target.disruption_budget:
        around.append(_budget(group))
    if group.target.pod_monitor:
        around.append(_monitor(group))
    workload, *others = lws.objects(group)
    objects = (_annotated(group, workload), *others, *around)
    if wrong := kubernetes_rules.mistakes(objects):
        raise RequestError(
            "what is asked for cannot work in Kubernetes",
            evidence=wrong,
            hint="see the options: `vlaunch export kubernetes --help`",
        )
    return Manifests(header=tuple(_header(group, objects)), objects=objects)


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
    found = [f"secret/{group.target.name}-secrets"] if pods.secret_names(group) else []
    if group.target.volume is not None and group.target.volume.claim:
        found.append(f"persistentvolumeclaim/{group.target.volume.claim}")
    return found


def _metadata(group: Group, suffix: str = "") -> Object:
    return {"name": f"{group.target.name}{suffix}", "labels": lws.managed(group)}


def _programs(group: Group) -> Object:
    texts = pods.payload_files(group)
    size = sum(len(text.encode()) + len(path) for path, text in texts.items())
    if size > _MOST:
        raise RequestError(
            f"the helper programs have {size} bytes, more than a ConfigMap takes ({_MOST})",
            hint="report it: this is a mistake of vlaunch",
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(group, "-payload"),
        "data": {pods.key(path): text for path, text in texts.items()},
    }


def _service(group: Group) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(group, "-api"),
        "spec": {
            "selector": lws.selector(group),
            "ports": [{"name": "http", "port": group.request.port, "targetPort": "http"}],
        },
    }


def _policy(group: Group) -> Object:
    own = {"podSelector": {"matchLabels": pods.labels(group)}}
    port = {"port": group.request.port, "protocol": "TCP"}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(group),
        "spec": {
            **own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [own]},
                {"from": [{"namespaceSelector": {}}], "ports": [port]},
            ],
        },
    }


def _budget(group: Group) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(group),
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": pods.labels(group)}},
    }


def _monitor(group: Group) -> Object:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _metadata(group),
        "spec": {
            "selector": {"matchLabels": lws.selector(group)},
            "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
        },
    }


def _header(group: Group, objects: tuple[Object, ...]) -> list[str]:
    name, request = group.target.name, group.request
    split, wait = request.placement, group.desired.policy.start_timeout
    return [
        f"{request.model} on {group.size} {'node' if group.size == 1 else 'nodes'} of the cluster"
        f" `{group.original.cluster}`: {split.words}, vLLM's own ranks (mp), as a {lws.KIND}.",
        "Made by `vlaunch export kubernetes`; the same inventory gives the same text.",
        "",
        "The cluster must have:",
        *(f"- {each}" for each in _needs(group)),
        *_before(group),
        "",
        "Apply it (--server-side, for an annotation of other applies would be too large):",
        f"  kubectl apply --server-side -f FILE{_budget_note(group)}",
        "Prove it: the first command ends when all pods are ready, the one with the API",
        "after a completion; the last one is a chat.",
        f"  kubectl wait --for=condition=Available --timeout={wait:.0f}s {lws.KIND.lower()}/{name}",
        f"  kubectl port-forward service/{name}-api {request.port}:{request.port} &",
        f"  {_chat(group)}",
        "Why not:",
        f"  kubectl logs -l app.kubernetes.io/instance={name} --all-containers --prefix --tail=-1"
        " | vlaunch doctor --from -",
        "",
        "Not carried over:",
        *(f"- {each}" for each in (*group.left_out, *_not_bounded(group))),
        "",
    ]


def _needs(group: Group) -> list[str]:
    inventory, target, gpus = group.inventory, group.target, pods.gpu_resource(group)
    each = sorted(set(group.shares.values()))
    found = [
        "the LeaderWorkerSet controller, 0.9 or newer: `kubectl get crd"
        " leaderworkersets.leaderworkerset.x-k8s.io`"
    ]
    if gpus:
        found.append(f"{group.size} nodes with {' or '.join(map(str, each))} free `{gpus}`")
    else:
        found.append(f"{group.size} nodes")
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
    found.append(f"the image {inventory.image}, which the nodes can pull")
    found.append(_model_needs(group))
    if target.memory is None:
        found.append(
            "memory that nobody else takes: none is requested; --memory SIZE asks for it, weights"
            " on their way and /dev/shm included"
        )
    return found


def _model_needs(group: Group) -> str:
    at, volume = pods.model_at(group), group.target.volume
    if volume is not None and volume.claim:
        where = f"the claim {volume.claim}" + (f" (below {volume.path})" if volume.path else "")
        return f"{where} with the model at {at}: ReadOnlyMany or ReadWriteMany, in this namespace"
    folder = volume.path if volume is not None else at
    return f"the model in {folder} of every node, or a way to Hugging Face from there"


def _before(group: Group) -> list[str]:
    names = pods.secret_names(group)
    if not names:
        return []
    sources = group.original.secrets
    words = ["kubectl", "create", "secret", "generic", f"{group.target.name}-secrets"]
    given = []
    for name in names:
        source = sources[name]
        if source.file is not None:
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


def _not_bounded(group: Group) -> list[str]:
    found = ["`restarts:`: nothing bounds how often a LeaderWorkerSet starts its group again"]
    if group.desired.policy.restarts == 0:
        found = ["`supervise: false`: Kubernetes starts a dead group again"]
    return found
