"""The volumes of a pod, and where they are mounted: what the node's container mounts
(`launcher/containers.py`), from the places that Kubernetes has for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath

from launcher import containers
from launcher.export import programs
from launcher.export.kubernetes_shape import Group, Object
from launcher.model import Mount
from launcher.tools.docker import ContainerSpec

_SHM = 16 << 30  # bytes of /dev/shm where the inventory names no size: a share of the node's memory
READ_ONLY, EXECUTABLE = 0o400, 0o555  # modes of mounted files


def payload_files(group: Group) -> Mapping[str, str]:
    """Return the programs that the pods mount, by path."""
    gate = programs.GATE if group.gated else ()
    if group.programs is not None:
        return {**group.programs, **(programs.needed(gate) if gate else {})}
    return programs.needed((*programs.SERVING, *gate))


def key(path: str) -> str:
    """Return the key of a file in a ConfigMap, which has no folders."""
    return path.replace("/", "__")


def volumes(group: Group, spec: ContainerSpec) -> list[tuple[Object, Object]]:
    """Return the volumes of a container with where each is mounted."""
    found = [made for each in _mounts(group, spec) if (made := _volume(group, each)) is not None]
    if spec.shm != "host":
        found.append(_shared_memory(group, spec))
    if spec.privileged:
        found += [
            _on_node(f"device-{at}", Mount(source=device, target=device), kind)
            for at, (device, kind) in enumerate(_devices(spec))
        ]
    return found


def model_at(group: Group) -> str:
    """Return where the model's files are mounted: a model with a path lies in the mount that holds
    it, or else in the folder around it; any other in the Hugging Face cache.
    """
    model, node = group.request.model, group.nodes[0]
    if not model.startswith("/"):
        return node.hf_home
    path = PurePosixPath(model)
    for target in (node.hf_home, *(each.target for each in group.inventory.mounts)):
        if path.is_relative_to(target):
            return target
    return str(path.parent)


def quantity(size: int) -> str:
    """Return bytes as Kubernetes writes them."""
    for unit, power in (("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


def _devices(spec: ContainerSpec) -> list[tuple[str, str]]:
    """Return the devices that a privileged container mounts, with what each is."""
    plain = [each.partition(":")[0] for each in spec.devices if each.startswith("/")]
    folders = ("/dev/infiniband", "/dev/dri")
    return [(each, "Directory" if each in folders else "CharDevice") for each in plain]


def _mounts(group: Group, spec: ContainerSpec) -> list[Mount]:
    """Return the mounts, with one for the model's volume where the inventory has none there."""
    at = model_at(group)
    mounts = list(spec.mounts)
    if group.target.volume is not None and at not in [each.target for each in mounts]:
        mounts.append(Mount(source=at, target=at, read_only=True))
    return mounts


def _volume(group: Group, mount: Mount) -> tuple[Object, Object] | None:
    name, volume = group.target.name, group.target.volume
    if mount.target == containers.PAYLOAD:
        items = [{"key": key(path), "path": path} for path in payload_files(group)]
        source = {"name": f"{name}-payload", "defaultMode": EXECUTABLE, "items": items}
        return _mounted("payload", {"configMap": source}, mount)
    if mount.target == containers.SECRETS:
        if not group.secrets:
            return None
        source = {"secretName": f"{name}-secrets", "defaultMode": READ_ONLY}
        return _mounted("secrets", {"secret": source}, mount)
    if mount.target == containers.SERVERS:
        return None
    if mount.target == containers.COMPILED:
        return _mounted("compiled", {"emptyDir": {}}, mount)
    if volume is not None and mount.target == model_at(group):
        return _model(group, mount)
    if volume is not None and mount.target == group.nodes[0].hf_home:
        # The model lies elsewhere; what is fetched beside it needs a place to be written.
        return _mounted("hf-home", {"emptyDir": {}}, mount)
    if mount.target == group.nodes[0].hf_home:
        return _on_node("hf-home", mount, "DirectoryOrCreate")
    return _on_node(_slug(mount.target), mount, "DirectoryOrCreate")


def reads_only(group: Group) -> bool:
    """True when pods only read the volume of the model: a cache is written, too, unless they are
    offline.
    """
    cache = model_at(group) == group.nodes[0].hf_home
    return not cache or group.nodes[0].env.get("HF_HUB_OFFLINE") == "1"


def _model(group: Group, mount: Mount) -> tuple[Object, Object]:
    volume = group.target.volume
    where = replace(mount, read_only=mount.read_only or reads_only(group))
    if volume is not None and volume.claim:
        claim = {"claimName": volume.claim, **({"readOnly": True} if where.read_only else {})}
        made, at = _mounted("model", {"persistentVolumeClaim": claim}, where)
        return made, {**at, **({"subPath": volume.path} if volume.path else {})}
    source = volume.path if volume is not None else mount.source
    return _on_node("model", replace(where, source=source), "Directory")


def _slug(path: str) -> str:
    """Return a path as the name of a volume."""
    return "mount-" + re.sub("[^a-z0-9]+", "-", path.lower()).strip("-")[:50].rstrip("-")


def _on_node(name: str, mount: Mount, kind: str) -> tuple[Object, Object]:
    return _mounted(name, {"hostPath": {"path": mount.source, "type": kind}}, mount)


def _shared_memory(group: Group, spec: ContainerSpec) -> tuple[Object, Object]:
    size = spec.shm if isinstance(spec.shm, int) else _SHM
    if not isinstance(spec.shm, int) and group.target.memory is not None:
        size = min(size, group.target.memory // 2 >> 20 << 20 or size)
    memory = {"medium": "Memory", "sizeLimit": quantity(size)}
    return _mounted("shm", {"emptyDir": memory}, Mount(source="", target="/dev/shm"))


def _mounted(name: str, source: Object, mount: Mount) -> tuple[Object, Object]:
    at = {"name": name, "mountPath": mount.target}
    return {"name": name, **source}, {**at, "readOnly": True} if mount.read_only else at
