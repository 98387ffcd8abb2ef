"""The pods of Kubernetes' objects, as the objects' controllers make them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod's spec, where it stands, and the labels it will carry, its controller's among them."""

    where: str
    spec: Object
    labels: Mapping[str, str]


def called(document: Object) -> str:
    """Return what people call an object: its kind and its name."""
    return f"{document.get('kind')}/{(document.get('metadata') or {}).get('name')}"


def pods_of(document: Object) -> Iterator[Pod]:
    """Yield the pods of a document, as its controller makes them."""
    where, spec = called(document), document.get("spec") or {}
    name, kind = (document.get("metadata") or {}).get("name", ""), document.get("kind")
    if kind == "Pod":
        yield Pod(where, spec, (document.get("metadata") or {}).get("labels") or {})
    elif kind == "LeaderWorkerSet":
        yield from _of_group(where, name, spec.get("leaderWorkerTemplate") or {})
    elif kind in ("Deployment", "DaemonSet", "Job"):
        yield _templated(where, spec.get("template"), {})
    elif kind in ("RayCluster", "RayJob"):
        cluster = spec if kind == "RayCluster" else spec.get("rayClusterSpec")
        if cluster:  # a job may also choose one that is there
            yield from _of_ray(where, name if kind == "RayCluster" else "", cluster)


def _of_group(where: str, name: str, group: Object) -> Iterator[Pod]:
    own = {"leaderworkerset.sigs.k8s.io/name": name, "leaderworkerset.sigs.k8s.io/group-index": "0"}
    at = "leaderworkerset.sigs.k8s.io/worker-index"
    leader = "leaderTemplate" if group.get("leaderTemplate") else "workerTemplate"
    yield _templated(f"{where} {leader}", group.get(leader), {**own, at: "0"})
    if leader == "leaderTemplate":
        worker = group.get("workerTemplate")
        yield _templated(f"{where} workerTemplate", worker, {**own, at: "1"})


def _of_ray(where: str, name: str, cluster: Object) -> Iterator[Pod]:
    groups = [("head", cluster.get("headGroupSpec") or {})]
    groups += [("worker", each) for each in cluster.get("workerGroupSpecs") or ()]
    for role, group in groups:
        own = {"ray.io/node-type": role, "ray.io/is-ray-node": "yes"}
        named = {"ray.io/cluster": name} if name else {}
        yield _templated(f"{where} {role}", group.get("template"), {**own, **named})


def _templated(where: str, template: Object | None, own: Mapping[str, str]) -> Pod:
    template = template or {}
    labels = (template.get("metadata") or {}).get("labels") or {}
    return Pod(where, template.get("spec") or {}, {**labels, **own})
