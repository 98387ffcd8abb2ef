"""Which level of Kubernetes' Pod Security Standards the pods of an export need, and why.

A namespace that enforces another one refuses them, and says so in an event of their controller's.
Source: kubernetes.io/docs/concepts/security/pod-security-standards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from launcher.export.kubernetes_pods import Object, pods_of

LABEL = "pod-security.kubernetes.io/enforce=privileged"
# What containers may add at level `baseline`.
_BASELINE = (
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
)


def needs(objects: Iterable[Object], namespace: str) -> list[str]:
    """Name the level that a namespace must allow, and the line that has it do so."""
    pods = [pod.spec for each in objects for pod in pods_of(each)]
    why = list(dict.fromkeys(said for spec in pods for said in beyond_baseline(spec)))
    where = "where Pod Security is enforced, a namespace of level"
    if not why:
        return [f"{where} `baseline`: containers run as root"]
    line = f"kubectl label --overwrite namespace {namespace or 'NAMESPACE'} {LABEL}"
    return [f"{where} `privileged`, for {_listed(why)}:", f"  {line}"]


def beyond_baseline(spec: Object) -> Iterator[str]:
    """Yield what of a pod's spec the level `baseline` forbids."""
    if spec.get("hostNetwork") or spec.get("hostIPC") or spec.get("hostPID"):
        yield "the host's network or IPC"
    if any("hostPath" in each for each in spec.get("volumes") or ()):
        yield "hostPath volumes"
    for key in ("initContainers", "containers"):
        for each in spec.get(key) or ():
            yield from _of_container(each)


def _of_container(container: Object) -> Iterator[str]:
    rights = container.get("securityContext") or {}
    if rights.get("privileged"):
        yield "privileged containers"
    added = (rights.get("capabilities") or {}).get("add") or ()
    yield from (name for name in added if name not in _BASELINE)
    if (rights.get("seccompProfile") or {}).get("type") == "Unconfined":
        yield "seccomp Unconfined"


def _listed(words: Sequence[str]) -> str:
    *some, last = words
    return f"{', '.join(some)} and {last}" if some else last
