"""What schemas of Kubernetes do not see, and what an API server, a controller or the kernel refuses
all the same: rules over the objects of an export, or of an edited copy.

Pure. The mistakes were tried on `kubernetes-validate --strict`, which passes them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from launcher import secret_patterns
from launcher.export import kuberay_rules
from launcher.export.kubernetes_pods import Object, Pod, called, pods_of

PROVIDE = "vlaunch.provide"
# Longest names by kind, less what controllers put behind them (webhooks of LWS 0.10, validation.go
# of KubeRay 1.7).
_LONGEST = {
    "LeaderWorkerSet": 52,
    "RayCluster": 53,
    "RayJob": 47,
    "RayService": 47,
}
_LABEL = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
_PORT = re.compile(r"(?=[a-z0-9-]*[a-z])[a-z0-9](?:[a-z0-9]|-(?!-))*(?<!-)")
_QUANTITY = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
_POWERS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60} | {
    unit: 10 ** (3 * power) for power, unit in enumerate("kMGTPE", start=1)
}
_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_JOINED = "rank 0 is ready only when all ranks have joined"
# Of LeaderWorkerSets, by the field (its CRD of 0.10).
_OF_GROUPS = ("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None")
_RESTARTS = ("Always", "OnFailure", "Never")
_MOST = 1 << 20


def mistakes(documents: Sequence[Object]) -> list[str]:
    """Say what is wrong with objects, each with where it is; nothing when no rule is broken."""
    pods = [pod for each in documents for pod in pods_of(each)]
    found = [said for each in documents for rule in _OF_OBJECTS for said in rule(each)]
    found += [said for pod in pods for rule in _OF_PODS for said in rule(pod)]
    found += [said for rule in _OF_ALL for said in rule(documents, pods)]
    return list(dict.fromkeys(found))


def _containers(pod: Pod) -> list[tuple[str, Object]]:
    return [
        (f"{pod.where} {each.get('name')}", each)
        for key in ("initContainers", "containers")
        for each in pod.spec.get(key) or ()
    ]


# --- of single objects


def _names(document: Object) -> Iterator[str]:
    name, kind = (document.get("metadata") or {}).get("name", ""), str(document.get("kind"))
    longest = _LONGEST.get(kind, 63)
    if _LABEL.fullmatch(name) is None or len(name) > longest:
        yield (
            f"{called(document)}: its name should be at most {longest} lower-case letters, digits"
            " and `-`, beginning with a letter"
        )
    if kind == "Service" and name == "vllm":
        yield f"{called(document)}: it sets VLLM_PORT in other pods, on which vLLM stops"


def _small(document: Object) -> Iterator[str]:
    if document.get("kind") == "ConfigMap":
        size = sum(len(str(each).encode()) for each in _data(document).values())
        if size > _MOST:
            yield f"{called(document)}: {size} bytes are more than the {_MOST} of a ConfigMap"


def _data(document: Object) -> Mapping[str, Any]:
    """Return what a ConfigMap holds, as text and otherwise."""
    return {**(document.get("data") or {}), **(document.get("binaryData") or {})}


def _no_secret(document: Object) -> Iterator[str]:
    if document.get("kind") == "Secret" and (document.get("data") or document.get("stringData")):
        yield f"{called(document)}: a secret's value stands in the text"


def _meet(document: Object) -> Iterator[str]:
    """Judge that no pod of a server waits for one that waits for it."""
    spec, kind = document.get("spec") or {}, document.get("kind")
    if not any(_serves(pod) for pod in pods_of(document)):
        return
    if kind == "LeaderWorkerSet" and spec.get("startupPolicy") == "LeaderReady":
        yield f"{called(document)}: startupPolicy should be LeaderCreated: {_JOINED}"


def _group_restarts(document: Object) -> Iterator[str]:
    group = (document.get("spec") or {}).get("leaderWorkerTemplate") or {}
    policy = group.get("restartPolicy", "Default")
    if document.get("kind") == "LeaderWorkerSet" and policy not in _OF_GROUPS:
        known = ", ".join(_OF_GROUPS)
        yield f"{called(document)}: restartPolicy should be one of {known}, not {policy}"


def _ray(document: Object) -> Iterator[str]:
    for said in kuberay_rules.mistakes(str(document.get("kind")), document.get("spec") or {}):
        yield f"{called(document)}: {said}"


def _serves(pod: Pod) -> bool:
    """True of a pod of a server of vLLM's."""
    return pod.labels.get("app.kubernetes.io/name") == "vllm"


# --- of pods


def _mounts(pod: Pod) -> Iterator[str]:
    volumes = [each.get("name") for each in pod.spec.get("volumes") or ()]
    for name, count in Counter(volumes).items():
        if count > 1:
            yield f"{pod.where}: volume {name} stands there {count} times"
    for where, container in _containers(pod):
        for each in container.get("volumeMounts") or ():
            if each.get("name") not in volumes:
                yield f"{where}: mounts {each.get('name')}, which is no volume of the pod"


def _probes(pod: Pod) -> Iterator[str]:
    for where, container in _containers(pod):
        meant = {name.casefold(): name for name in _PROBES}
        for key in container:
            name = meant.get(key.casefold(), key)
            if name != key:
                yield f"{where}: {key} should be called {name}"
        for name in _PROBES:
            probe = container.get(name)
            if probe is None:
                continue
            handlers = [each for each in _HANDLERS if each in probe]
            if len(handlers) != 1:
                yield f"{where}: {name} should have one handler, not {len(handlers)}"


def _ports(pod: Pod) -> Iterator[str]:
    for where, container in _containers(pod):
        for each in container.get("ports") or ():
            name = each.get("name")
            if name is not None and (len(name) > 15 or _PORT.fullmatch(name) is None):
                yield f"{where}: port name {name} should be 15 lower-case letters, digits and `-`"
            host = each.get("hostPort")
            if pod.spec.get("hostNetwork") and host not in (None, each.get("containerPort")):
                yield f"{where}: hostPort {host} differs from containerPort in the host's network"


def _resources(pod: Pod) -> Iterator[str]:
    for where, container in _containers(pod):
        said = container.get("resources") or {}
        limits, requests = said.get("limits") or {}, said.get("requests") or {}
        for name in sorted({*limits, *requests}):
            # Extended resources cannot be promised twice: what is asked for is the limit.
            if "/" in name and str(limits.get(name)) != str(requests.get(name, limits.get(name))):
                yield f"{where}: {name} should have equal request and limit"
        for kind in ("limits", "requests"):
            for name, value in (said.get(kind) or {}).items():
                if _QUANTITY.fullmatch(str(value)) is None:
                    yield f"{where}: {kind} {name}: `{value}` is no quantity"


def _memory(pod: Pod) -> Iterator[str]:
    sizes = {
        each.get("name"): _bytes((each.get("emptyDir") or {}).get("sizeLimit"))
        for each in pod.spec.get("volumes") or ()
        if (each.get("emptyDir") or {}).get("medium") == "Memory"
    }
    for where, container in _containers(pod):
        limit = _bytes(((container.get("resources") or {}).get("limits") or {}).get("memory"))
        for each in container.get("volumeMounts") or ():
            size = sizes.get(each.get("name"))
            if limit is not None and size is not None and size > limit:
                volume = each.get("name")
                yield f"{where}: the memory volume {volume} is larger than the memory limit"


def _env(pod: Pod) -> Iterator[str]:
    for where, container in _containers(pod):
        env = container.get("env") or ()
        for name, count in Counter(each.get("name") for each in env).items():
            if count > 1:
                yield f"{where}: variable {name} stands there {count} times"
        for each in env:
            if "value" in each and "valueFrom" in each:
                yield f"{where}: variable {each.get('name')} has value and valueFrom"
            if secret_patterns.VALUE.search(str(each.get("value", ""))):
                yield f"{where}: variable {each.get('name')} looks like a secret's value"
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        if any(secret_patterns.VALUE.search(str(word)) for word in words):
            yield f"{where}: an argument looks like a secret's value"


def _twice(pod: Pod) -> Iterator[str]:
    names = Counter(each.get("name") for _, each in _containers(pod))
    for name, count in names.items():
        if count > 1:
            yield f"{pod.where}: {count} containers are called {name}"


def _restarts(pod: Pod) -> Iterator[str]:
    policy = pod.spec.get("restartPolicy", "Always")
    if policy not in _RESTARTS:
        yield f"{pod.where}: restartPolicy should be one of {', '.join(_RESTARTS)}, not {policy}"


def _links(pod: Pod) -> Iterator[str]:
    if pod.spec.get("enableServiceLinks") is not False:
        yield f"{pod.where}: enableServiceLinks should be false: a Service `vllm` stops vLLM"


# --- of all together


def _references(documents: Sequence[Object], pods: Sequence[Pod]) -> Iterator[str]:
    there = {called(each).lower() for each in documents}
    for each in documents:
        notes = (each.get("metadata") or {}).get("annotations") or {}
        there |= {name.strip() for name in str(notes.get(PROVIDE, "")).split(",")}
    for pod in pods:
        for kind, name in _named(pod):
            if f"{kind}/{name}" not in there:
                yield f"{pod.where}: needs {kind}/{name}, which is neither here nor to be provided"


def _named(pod: Pod) -> Iterator[tuple[str, str]]:
    for each in pod.spec.get("volumes") or ():
        if "configMap" in each:
            yield "configmap", each["configMap"].get("name")
        if "secret" in each:
            yield "secret", each["secret"].get("secretName")
        if "persistentVolumeClaim" in each:
            yield "persistentvolumeclaim", each["persistentVolumeClaim"].get("claimName")
    for _, container in _containers(pod):
        for each in container.get("env") or ():
            source = each.get("valueFrom") or {}
            for key, kind in (("secretKeyRef", "secret"), ("configMapKeyRef", "configmap")):
                if key in source:
                    yield kind, source[key].get("name")


def _keys(documents: Sequence[Object], pods: Sequence[Pod]) -> Iterator[str]:
    """Judge that the files which pods take from a ConfigMap are in it."""
    maps = {
        (each.get("metadata") or {}).get("name"): _data(each)
        for each in documents
        if each.get("kind") == "ConfigMap"
    }
    for pod in pods:
        for each in pod.spec.get("volumes") or ():
            source = each.get("configMap") or {}
            data = maps.get(source.get("name"))
            for item in source.get("items") or () if data is not None else ():
                if item.get("key") not in (data or {}):
                    yield f"{pod.where}: {item.get('key')} is not in configmap/{source['name']}"


def _selectors(documents: Sequence[Object], pods: Sequence[Pod]) -> Iterator[str]:
    for each in documents:
        spec, kind = each.get("spec") or {}, each.get("kind")
        wanted = {
            "Service": spec.get("selector"),
            "NetworkPolicy": (spec.get("podSelector") or {}).get("matchLabels"),
            "PodDisruptionBudget": (spec.get("selector") or {}).get("matchLabels"),
            "PodMonitor": (spec.get("selector") or {}).get("matchLabels"),
        }.get(str(kind))
        if wanted and not any(_matches(wanted, pod.labels) for pod in pods):
            yield f"{called(each)}: it selects none of the pods"


def _budgets(documents: Sequence[Object], pods: Sequence[Pod]) -> Iterator[str]:
    """Judge that Kubernetes can count the pods which a budget is about."""
    for each in documents:
        spec = each.get("spec") or {}
        wanted = (spec.get("selector") or {}).get("matchLabels") or {}
        if each.get("kind") != "PodDisruptionBudget" or isinstance(spec.get("minAvailable"), int):
            continue
        if any(_matches(wanted, pod.labels) for pod in pods if "ray.io/node-type" in pod.labels):
            yield (
                f"{called(each)}: should have minAvailable, a number: Ray's clusters have no"
                " `scale`, by which the rest is counted"
            )


def _matches(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in wanted.items())


def _bytes(value: Any) -> float | None:
    match = re.fullmatch(r"([0-9.]+)([KMGTPE]i|[kMGTPE])?", str(value))
    return float(match[1]) * _POWERS.get(match[2] or "", 1) if match else None


_OF_OBJECTS: tuple[Callable[[Object], Iterator[str]], ...] = (
    _names,
    _small,
    _no_secret,
    _meet,
    _group_restarts,
    _ray,
)
_OF_PODS: tuple[Callable[[Pod], Iterator[str]], ...] = (
    _mounts,
    _probes,
    _ports,
    _resources,
    _memory,
    _env,
    _twice,
    _restarts,
    _links,
)
_OF_ALL: tuple[Callable[[Sequence[Object], Sequence[Pod]], Iterator[str]], ...] = (
    _references,
    _keys,
    _selectors,
    _budgets,
)
