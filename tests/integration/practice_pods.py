"""What Kubernetes does to the manifests of a server, on practice hosts: the controller's and the
kubelet's part is done here, and podman, a reader of Kubernetes' YAML of its own, plays each node's
pod in the host's network.
"""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import yaml

from launcher.lab import image, machine, processes
from launcher.lab.layout import HF_HOME, Host, Lab
from tests import debian13

Object = dict[str, Any]
_SCRIPT = Path(__file__).with_name("practice_podman.sh")
_STORAGE = "var/lib/containers"
_IMAGES = "/var/lib/practice"  # of that Debian's, for all hosts
# Where podman 5.4 puts the groups of pods when it is told to write them itself.
_GROUPS = "libpod_parent"


def pods(manifests: Sequence[Object], lab: Lab) -> list[Object]:
    """Return the pods of a server's first group, one for each host, in order.

    What podman does not know is done to the text: fields of the pod and its node, devices, the
    registry of a name without one.
    """
    (made,) = [_MADE[each["kind"]](each, lab) for each in manifests if each["kind"] in _MADE]
    for pod, host in zip(made, lab.hosts, strict=True):
        pod["spec"]["hostNetwork"] = True
        for container in containers(pod["spec"]):
            _settle(container, pod["metadata"], host)
    return made


def _of_leader_worker_set(workload: Object, lab: Lab) -> list[Object]:
    """Do what the controller does (LeaderWorkerSet 0.10, pkg/utils/pod/pod_utils.go): the group's
    variables come first, and the first pod is called by its name, with its namespace.
    """
    group, name = workload["spec"]["leaderWorkerTemplate"], workload["metadata"]["name"]
    first, made = f"{name}-0", []
    leader = f"{first}.{first}.default"
    for index in range(group["size"]):
        worker = group["workerTemplate"]
        template = copy.deepcopy(worker if index else group.get("leaderTemplate", worker))
        told = {
            "LWS_LEADER_ADDRESS": leader,
            "LWS_GROUP_SIZE": str(group["size"]),
            "LWS_WORKER_INDEX": str(index),
        }
        for container in containers(template["spec"]):
            ours = [{"name": each, "value": value} for each, value in told.items()]
            container["env"] = [*ours, *container["env"]]
        made.append(_pod(template, f"{first}-{index}" if index else first))
    return _known(made, [leader], lab)


def _known(made: list[Object], names: Sequence[str], lab: Lab) -> list[Object]:
    """Do what the cluster's names do: all pods know the first ones by theirs."""
    known = [
        {"ip": host.ip, "hostnames": [name]} for name, host in zip(names, lab.hosts, strict=False)
    ]
    for pod in made:
        pod["spec"]["hostAliases"] = known
    return made


_MADE = {"LeaderWorkerSet": _of_leader_worker_set}


def _pod(template: Object, name: str) -> Object:
    metadata = {**template["metadata"], "name": name}
    return {"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata}


def containers(spec: Object) -> list[Object]:
    """Return all containers of a pod's spec, those that come first, first."""
    return [*spec.get("initContainers", []), *spec["containers"]]


def _settle(container: Object, metadata: Object, host: Host) -> None:
    """Do to a container what the kubelet does on a host."""
    fields = {
        "status.podIP": host.ip,
        "status.hostIP": host.ip,
        "spec.nodeName": host.name,
        "metadata.name": metadata["name"],
        **{f"metadata.labels['{name}']": each for name, each in metadata["labels"].items()},
    }
    for each in container["env"]:
        if "valueFrom" in each:
            each["value"] = fields[each.pop("valueFrom")["fieldRef"]["fieldPath"]]
    container["image"] = f"localhost/{container['image']}"
    for limits in container.get("resources", {}).values():
        for device in [each for each in limits if "/" in each]:
            del limits[device]


def podman(host: Host, *words: str, stdin: str = "", timeout: float = 60) -> CompletedProcess[str]:
    """Run podman on a host, whose containers it keeps among the host's files; it may fail."""
    return subprocess.run(
        _argv(host, f"--storage-opt=additionalimagestore={_IMAGES}", *words),
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )


def _argv(host: Host, *words: str) -> tuple[str, ...]:
    return (
        *("env", "-i", f"PATH={machine.PATH}", "HOME=/root", "LANG=C.UTF-8", host.marker),
        *("nsenter", f"--target={processes.init_of(host)}", "--uts", "--ipc", "--net", "--pid"),
        *("unshare", "--mount", "--propagation", "private", "sh", "-euc", _SCRIPT.read_text()),
        *("podman", str(debian13.ROOT), str(host.root), HF_HOME, *words),
    )


def load(host: Host) -> None:
    """Give podman the practice image, as `vlaunch lab up` has built it, on all hosts at once."""
    archive = debian13.ROOT.parent / f"image-{image.key()}.tar"
    store = (f"--root={_IMAGES}", "--runroot=/run/practice")
    argv = _argv(host, *store, "image", "inspect", "--format={{.Id}}", image.NAME)
    if machine.attempt(*argv).stdout.strip() != image.image_id(archive).removeprefix("sha256:"):
        with archive.open("rb") as file:
            machine.run(*_argv(host, *store, "load", "--quiet"), stdin=file, timeout=600)


def play(
    host: Host, pod: Object, beside: Sequence[Object], timeout: float
) -> CompletedProcess[str]:
    """Start a pod on a host with the ConfigMaps and Secrets beside it; ends when its containers
    have been started, or an init container has failed.
    """
    for each in beside:
        _folders(host, pod, each)
    # In the host's network podman gives a pod the names that the host knows, and no others.
    aliases = pod["spec"]["hostAliases"]
    known = [f"{each['ip']} {name}" for each in aliases for name in each["hostnames"]]
    (host.root / "run" / "names").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
    text = yaml.safe_dump_all([*beside, pod], sort_keys=False)
    return podman(host, "kube", "play", "-", stdin=text, timeout=timeout)


def _folders(host: Host, pod: Object, config: Object) -> None:
    """Make the folders of a ConfigMap's volume, which podman does not."""
    for volume in pod["spec"]["volumes"]:
        mounted = volume.get("configMap", {})
        if mounted.get("name") == config["metadata"]["name"]:
            data = host.root / _STORAGE / "storage/volumes" / mounted["name"] / "_data"
            for item in mounted["items"]:
                (data / item["path"]).parent.mkdir(parents=True, exist_ok=True)


def end(host: Host) -> None:
    """End all pods of a host, and remove what podman has made there but its images."""
    for words in (("pod", "rm"), ("rm",), ("volume", "rm"), ("secret", "rm")):
        force = () if words[0] == "secret" else ("--force", "--time", "5")
        podman(host, *words, "--all", *force, timeout=120)


def left(host: Host) -> Iterator[str]:
    """Yield what podman has left on a host."""
    for words in (("pod", "ps"), ("ps", "--all"), ("volume", "ls"), ("secret", "ls")):
        yield from podman(host, *words, "--quiet").stdout.split()


def forget(lab: Lab) -> None:
    """Remove what podman needs itself: its storage on all hosts, and its control groups."""
    for host in lab.hosts:
        machine.run("rm", "-rf", str(host.root / _STORAGE), timeout=300)
    machine.attempt(
        *("find", "/sys/fs/cgroup", "-depth", "-type", "d"),
        *("-path", f"*/{_GROUPS}*", "-delete"),
    )
