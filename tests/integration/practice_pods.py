"""What Kubernetes does to the manifests of a server, on practice hosts: the controller's and the
kubelet's part is done here, and podman, a reader of Kubernetes' YAML of its own, plays each node's
pod in the host's network.
"""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator, Mapping, Sequence
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
TOKEN = "ab" * 32  # Ray's, which the operator would create
# Where podman 5.4 puts the groups of pods when it is told to write them itself.
_GROUPS = "libpod_parent"


def pods(manifests: Sequence[Object], lab: Lab) -> list[Object]:
    """Return the pods of a workload, one for each host, in order.

    What podman does not know is written into the text: fields of the pod, devices, the registry of
    a name without one.
    """
    (made,) = [_MADE[each["kind"]](each, lab) for each in manifests if each["kind"] in _MADE]
    for pod, host in zip(made, lab.hosts, strict=True):
        pod["spec"]["hostNetwork"] = True
        for container in containers(pod["spec"]):
            _settle(container, host)
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
            container["env"] = [*_variables(told), *container["env"]]
        made.append(_pod(template, f"{first}-{index}" if index else first, {leader: lab.hosts[0]}))
    return made


def _of_ray_job(workload: Object, lab: Lab) -> list[Object]:
    """Do what KubeRay's operator does (1.7, controllers/ray/common/pod.go): it says how Ray starts,
    gives all the same token, and lets workers wait for the head before their own containers start.
    """
    cluster, name = workload["spec"]["rayClusterSpec"], workload["metadata"]["name"]
    head = f"{name}-head-svc.default.svc.cluster.local"
    made = []
    for index, group in enumerate([cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]):
        template, params = copy.deepcopy(group["template"]), dict(group["rayStartParams"])
        port = cluster["headGroupSpec"]["rayStartParams"].get("port", "6379")
        params |= {"address": f"{head}:{port}"} if index else {"dashboard-host": "0.0.0.0"}
        options = " ".join(
            f"--{key}" if value == "true" else f"--{key}={value}" for key, value in params.items()
        )
        told = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_ADDRESS": f"{head if index else '127.0.0.1'}:{port}",
            # Practice hosts have no DNS, and gRPC's own resolver asks nothing else.
            "GRPC_DNS_RESOLVER": "native",
            "KUBERAY_GEN_RAY_START_CMD": f"ray start {'' if index else '--head '}--block {options}",
            **({"FQ_RAY_IP": head} if index else {}),
        }
        spec = template["spec"]
        (container,) = spec["containers"]
        container["env"] += _variables(told)
        if index:
            wait = f"until ray health-check --address {head}:{port}; do sleep 2; done"
            own = {key: container[key] for key in ("image", "env", "volumeMounts")}
            own = {"name": "wait-gcs-ready", **copy.deepcopy(own)}
            spec["initContainers"] = [{**own, "command": ["/bin/bash", "-c", wait]}]
        made.append(_pod(template, f"{name}-{index}", {head: lab.hosts[0]}))
    return made


def _variables(values: Mapping[str, str]) -> list[Object]:
    return [{"name": name, "value": value} for name, value in values.items()]


_MADE = {"LeaderWorkerSet": _of_leader_worker_set, "RayJob": _of_ray_job}


def _pod(template: Object, name: str, names: Mapping[str, Host]) -> Object:
    metadata = {**template["metadata"], "name": name}
    known = [{"ip": host.ip, "hostnames": [called]} for called, host in names.items()]
    spec = {**template["spec"], "hostAliases": known}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def containers(spec: Object) -> list[Object]:
    """Return all containers of a pod's spec, those that come first, first."""
    return [*spec.get("initContainers", []), *spec["containers"]]


def _settle(container: Object, host: Host) -> None:
    """Do to a container what the kubelet does on a host."""
    for each in container["env"]:
        if "valueFrom" in each:
            assert each.pop("valueFrom")["fieldRef"]["fieldPath"] == "status.podIP"
            each["value"] = host.ip
    if not container["image"].startswith("localhost/"):
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
        *("nsenter", f"--target={processes.init_pid(host)}", "--uts", "--ipc", "--net", "--pid"),
        *("unshare", "--mount", "--propagation", "private", "sh", "-euc", _SCRIPT.read_text()),
        *("podman", str(debian13.ROOT), str(host.root), HF_HOME, *words),
    )


def load(host: Host, archive: Path, name: str) -> None:
    """Give podman an image, on all hosts at once."""
    store = (f"--root={_IMAGES}", "--runroot=/run/practice")
    argv = _argv(host, *store, "image", "inspect", "--format={{.Id}}", name)
    if machine.attempt(*argv).stdout.strip() != image.image_id(archive).removeprefix("sha256:"):
        with archive.open("rb") as file:
            machine.run(*_argv(host, *store, "load", "--quiet"), stdin=file, timeout=600)


def play(
    host: Host, pod: Object, beside: Sequence[Object], timeout: float
) -> CompletedProcess[str]:
    """Start a pod on a host with the ConfigMaps and Secrets beside it; ends when its containers
    have been started, or an init container has failed.
    """
    # In the host's network podman gives a pod the names that the host knows, and no others.
    aliases = pod["spec"]["hostAliases"]
    known = [f"{each['ip']} {name}" for each in aliases for name in each["hostnames"]]
    (host.root / "run" / "names").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
    text = yaml.safe_dump_all([*beside, pod], sort_keys=False)
    return podman(host, "kube", "play", "-", stdin=text, timeout=timeout)


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
