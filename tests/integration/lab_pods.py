"""Kubernetes on lab hosts, simulated for the manifests of a server: this module does the
controller's and the kubelet's part, and podman, which parses Kubernetes' YAML itself, runs each
node's pod in the host's network.
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
_SCRIPT = Path(__file__).with_name("lab_podman.sh")
_STORAGE = "var/lib/containers"
_IMAGES = "/var/lib/practice"  # in that Debian, for all hosts
TOKEN = "ab" * 32  # Ray's; the operator would create it
# Parent of the pods' control groups when podman 5.4 manages them itself.
_GROUPS = "libpod_parent"


def build_pods(manifests: Sequence[Object], lab: Lab) -> list[Object]:
    """Return the pods of a workload, one for each host, in order.

    Fields that podman does not support are resolved here: fields of the pod, devices, the registry
    of a name without one.
    """
    (built,) = [
        _BUILDERS[manifest["kind"]](manifest, lab)
        for manifest in manifests
        if manifest["kind"] in _BUILDERS
    ]
    for pod, host in zip(built, lab.hosts, strict=True):
        pod["spec"]["hostNetwork"] = True
        for container in containers(pod["spec"]):
            _apply_kubelet(container, host)
    return built


def _leader_worker_set_pods(workload: Object, lab: Lab) -> list[Object]:
    """Create pods as the controller does (LeaderWorkerSet 0.10, pkg/utils/pod/pod_utils.go): the
    group's variables come first, and the leader's address is its pod name with the namespace.
    """
    group, name = workload["spec"]["leaderWorkerTemplate"], workload["metadata"]["name"]
    first, built = f"{name}-0", []
    leader = f"{first}.{first}.default"
    for index in range(group["size"]):
        worker = group["workerTemplate"]
        template = copy.deepcopy(worker if index else group.get("leaderTemplate", worker))
        variables = {
            "LWS_LEADER_ADDRESS": leader,
            "LWS_GROUP_SIZE": str(group["size"]),
            "LWS_WORKER_INDEX": str(index),
        }
        for container in containers(template["spec"]):
            container["env"] = [*_variables(variables), *container["env"]]
        built.append(_pod(template, f"{first}-{index}" if index else first, {leader: lab.hosts[0]}))
    return built


def _ray_job_pods(workload: Object, lab: Lab) -> list[Object]:
    """Create pods as KubeRay's operator does (1.7, controllers/ray/common/pod.go): it sets Ray's
    start command, gives all the same token, and makes workers wait for the head.
    """
    cluster, name = workload["spec"]["rayClusterSpec"], workload["metadata"]["name"]
    head = f"{name}-head-svc.default.svc.cluster.local"
    built = []
    for index, group in enumerate([cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]):
        template, params = copy.deepcopy(group["template"]), dict(group["rayStartParams"])
        port = cluster["headGroupSpec"]["rayStartParams"].get("port", "6379")
        params |= {"address": f"{head}:{port}"} if index else {"dashboard-host": "0.0.0.0"}
        options = " ".join(
            f"--{key}" if value == "true" else f"--{key}={value}" for key, value in params.items()
        )
        variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_ADDRESS": f"{head if index else '127.0.0.1'}:{port}",
            # Lab hosts have no DNS, and gRPC's own resolver uses nothing else.
            "GRPC_DNS_RESOLVER": "native",
            "KUBERAY_GEN_RAY_START_CMD": f"ray start {'' if index else '--head '}--block {options}",
            **({"FQ_RAY_IP": head} if index else {}),
        }
        spec = template["spec"]
        (container,) = spec["containers"]
        container["env"] += _variables(variables)
        if index:
            wait = f"until ray health-check --address {head}:{port}; do sleep 2; done"
            init = {key: container[key] for key in ("image", "env", "volumeMounts")}
            init = {"name": "wait-gcs-ready", **copy.deepcopy(init)}
            spec["initContainers"] = [{**init, "command": ["/bin/bash", "-c", wait]}]
        built.append(_pod(template, f"{name}-{index}", {head: lab.hosts[0]}))
    return built


def _variables(values: Mapping[str, str]) -> list[Object]:
    return [{"name": name, "value": value} for name, value in values.items()]


_BUILDERS = {"LeaderWorkerSet": _leader_worker_set_pods, "RayJob": _ray_job_pods}


def _pod(template: Object, name: str, names: Mapping[str, Host]) -> Object:
    metadata = {**template["metadata"], "name": name}
    aliases = [{"ip": host.ip, "hostnames": [alias]} for alias, host in names.items()]
    spec = {**template["spec"], "hostAliases": aliases}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def containers(spec: Object) -> list[Object]:
    """Return all containers of a pod's spec, init containers first."""
    return [*spec.get("initContainers", []), *spec["containers"]]


def _apply_kubelet(container: Object, host: Host) -> None:
    """Change a container as the kubelet does on a host."""
    for variable in container["env"]:
        if "valueFrom" in variable:
            assert variable.pop("valueFrom")["fieldRef"]["fieldPath"] == "status.podIP"
            variable["value"] = host.ip
    if not container["image"].startswith("localhost/"):
        container["image"] = f"localhost/{container['image']}"
    for limits in container.get("resources", {}).values():
        for device in [variable for variable in limits if "/" in variable]:
            del limits[device]


def podman(
    host: Host, *arguments: str, stdin: str = "", timeout: float = 60
) -> CompletedProcess[str]:
    """Run podman on a host, with its storage among the host's files; it may fail."""
    return subprocess.run(
        _argv(host, f"--storage-opt=additionalimagestore={_IMAGES}", *arguments),
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )


def _argv(host: Host, *arguments: str) -> tuple[str, ...]:
    return (
        *("env", "-i", f"PATH={machine.PATH}", "HOME=/root", "LANG=C.UTF-8", host.marker),
        *("nsenter", f"--target={processes.init_pid(host)}", "--uts", "--ipc", "--net", "--pid"),
        *("unshare", "--mount", "--propagation", "private", "sh", "-euc", _SCRIPT.read_text()),
        *("podman", str(debian13.ROOT), str(host.root), HF_HOME, *arguments),
    )


def load_image(host: Host, archive: Path, name: str) -> None:
    """Load an image into podman, for all hosts at once."""
    store = (f"--root={_IMAGES}", "--runroot=/run/practice")
    argv = _argv(host, *store, "image", "inspect", "--format={{.Id}}", name)
    if machine.attempt(*argv).stdout.strip() != image.image_id(archive).removeprefix("sha256:"):
        with archive.open("rb") as file:
            machine.run(*_argv(host, *store, "load", "--quiet"), stdin=file, timeout=600)


def play_pod(
    host: Host, pod: Object, objects: Sequence[Object], timeout: float
) -> CompletedProcess[str]:
    """Start a pod on a host with the ConfigMaps and Secrets `objects`; returns when its containers
    have started, or an init container has failed.
    """
    # In the host's network, a pod resolves only the names of the host.
    aliases = pod["spec"]["hostAliases"]
    names = [f"{alias['ip']} {name}" for alias in aliases for name in alias["hostnames"]]
    (host.root / "run" / "names").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    text = yaml.safe_dump_all([*objects, pod], sort_keys=False)
    return podman(host, "kube", "play", "-", stdin=text, timeout=timeout)


def remove_pods(host: Host) -> None:
    """Remove all pods of a host, and all other objects of podman but its images."""
    for kind in (("pod", "rm"), ("rm",), ("volume", "rm"), ("secret", "rm")):
        force = () if kind[0] == "secret" else ("--force", "--time", "5")
        podman(host, *kind, "--all", *force, timeout=120)


def list_leftovers(host: Host) -> Iterator[str]:
    """Yield podman's leftovers on a host."""
    for kind in (("pod", "ps"), ("ps", "--all"), ("volume", "ls"), ("secret", "ls")):
        yield from podman(host, *kind, "--quiet").stdout.split()


def remove_storage(lab: Lab) -> None:
    """Remove podman's storage on all hosts, and its control groups."""
    for host in lab.hosts:
        machine.run("rm", "-rf", str(host.root / _STORAGE), timeout=300)
    machine.attempt(
        *("find", "/sys/fs/cgroup", "-depth", "-type", "d"),
        *("-path", f"*/{_GROUPS}*", "-delete"),
    )
