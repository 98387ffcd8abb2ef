"""What KubeRay's operator refuses of Ray's clusters and jobs, and what leaves them open: rules
beside those of `kubernetes_rules.py`.

Pure. Source: controllers/ray/utils/validation.go and common/pod.go of KubeRay 1.7.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Object = Mapping[str, Any]
# From which on a node of Ray says by HTTP how it is; before, the operator's probes want a program
# that images of vLLM lack, and end their pods.
_PROBED = (2, 53)


def mistakes(kind: str, spec: Object) -> Iterator[str]:
    """Say what is wrong with the spec of a RayCluster or a RayJob."""
    if kind == "RayJob":
        yield from _of_job(spec)
    elif kind == "RayCluster":
        yield from _of_cluster(spec)


def _of_job(spec: Object) -> Iterator[str]:
    cluster, chosen = spec.get("rayClusterSpec"), spec.get("clusterSelector")
    if not cluster and not chosen:
        yield "should have rayClusterSpec or clusterSelector"
    if chosen and spec.get("backoffLimit"):
        yield "backoffLimit should be 0 with clusterSelector: a retry begins with another cluster"
    if not spec.get("entrypoint"):
        yield "its entrypoint is empty"
    if cluster:
        yield from _of_cluster(cluster)


def _of_cluster(spec: Object) -> Iterator[str]:
    said = str(spec.get("rayVersion") or "")
    match = re.match(r"(\d+)\.(\d+)", said)
    if match is None or (int(match[1]), int(match[2])) < _PROBED:
        yield f"rayVersion should be 2.53 or newer, not `{said}`: health probes, and tokens"
    if (spec.get("authOptions") or {}).get("mode") != "token":
        yield "authOptions.mode should be token: whoever reaches Ray runs programs"
    scaled = spec.get("enableInTreeAutoscaling")
    for each in spec.get("workerGroupSpecs") or ():
        least, most = each.get("minReplicas"), each.get("maxReplicas")
        many = each.get("replicas", least)
        known = least is not None and most is not None and many is not None
        if not scaled and not (known and least <= many <= most):
            yield (
                f"worker group {each.get('groupName')}: should have minReplicas and maxReplicas"
                " around replicas"
            )
