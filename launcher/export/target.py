"""Options of manifests apart from the server's, and their parsers."""

import re
from dataclasses import dataclass
from typing import Literal

from launcher.core import sizes
from launcher.core.errors import RequestError

Kind = Literal["lws", "kuberay"]
GPUS = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}  # as device plugins call them
# A name with what controllers append must stay a DNS label of 63 characters: LeaderWorkerSet
# appends `-0-INDEX`, RayJob allows 47 (validation.go of KubeRay 1.7), and we append `-network`.
_LONGEST = 40
_LABEL = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
_RESOURCE = re.compile(
    r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVolume:
    """The source of a model's files: a claim, or a folder of the nodes."""

    claim: str = ""
    path: str = ""  # below the claim, or on the nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTarget:
    """The options of an export. `memory` is in bytes."""

    name: str
    namespace: str | None = None
    kind: Kind = "lws"
    rdma_resource: tuple[str, int] | None = None
    model_volume: ModelVolume | None = None
    host_network: bool = False
    memory: int | None = None
    cpus: int | None = None
    gate: bool = True

    @property
    def kubectl(self) -> str:
        """Command prefix for its objects."""
        return f"kubectl -n {self.namespace}" if self.namespace else "kubectl"


def object_name(text: str) -> str:
    """Return a cluster's name as a name for Kubernetes; raise RequestError."""
    name = re.sub(r"[._]+", "-", text)
    if _LABEL.fullmatch(name) is None or len(name) > _LONGEST:
        raise RequestError(
            f"`{text}` is not a valid name for Kubernetes objects",
            evidence=(
                f"use at most {_LONGEST} lower-case letters, digits and `-`, beginning"
                " with a letter (DNS-1035)"
            ),
            hint="choose one: `--name NAME`",
        )
    return name


def rdma_resource(text: str) -> tuple[str, int]:
    """Parse `NAME[=N]`; raise RequestError."""
    name, _, count = text.partition("=")
    if _RESOURCE.fullmatch(name) is None or not re.fullmatch("[1-9][0-9]{0,3}|", count):
        raise RequestError(
            f"--rdma-resource should be a resource such as rdma/ib or rdma/ib=2, not `{text}`",
            hint="see what a node offers: `kubectl describe node NODE`, `Allocatable`",
        )
    return name, int(count or 1)


def model_volume(text: str) -> ModelVolume:
    """Parse `pvc:NAME[:/SUB/PATH]` or `hostPath:/PATH`; raise RequestError."""
    kind, _, rest = text.partition(":")
    claim, _, below = rest.partition(":")
    if kind == "pvc" and re.fullmatch(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", claim):
        path = below.strip("/")
        if ".." not in path.split("/"):
            return ModelVolume(claim=claim, path=path)
    if kind == "hostPath" and rest.startswith("/") and ".." not in rest.split("/"):
        return ModelVolume(path=rest)
    raise RequestError(
        f"--model-volume should be pvc:NAME, pvc:NAME:/SUB/PATH or hostPath:/PATH, not `{text}`",
        hint="list the claims of a namespace: `kubectl get persistentvolumeclaims`",
    )


def memory(text: str) -> int:
    """Parse a size such as 900Gi or 900GiB; raise RequestError."""
    try:
        return sizes.parse_size(f"{text}B" if text.endswith(("Ki", "Mi", "Gi", "Ti")) else text)
    except ValueError:
        raise RequestError(
            f"--memory should be a size such as 900Gi, not `{text}`",
            hint="see what a node has: `kubectl describe node NODE`, `Allocatable`",
        ) from None
