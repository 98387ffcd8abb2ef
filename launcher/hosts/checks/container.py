"""Checks of images and containers: identity, versions, GPUs, RDMA devices and rights."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from launcher.core import untrusted
from launcher.core.check import Finding, failed, passed, skipped, warned
from launcher.core.domain import Answer, Node, fold
from launcher.core.sizes import format_count
from launcher.failures.explain import explain
from launcher.hosts.check import (
    Check,
    Evidence,
    Host,
    Judge,
    per_host,
    skip_without_rdma,
    uniform_value,
)
from launcher.hosts.container_view import ContainerView
from launcher.tools.supported_versions import judge_support

_AnswersJudge = Callable[[Mapping[str, Sequence[Answer]]], Sequence[Finding]]
_RECREATE = "run `vlaunch down` and `vlaunch up`"
# vLLM and Ray start some hundreds of threads per GPU; Ray recommends 65,536 files, and needs about
# 10 per worker and connection.
_ENOUGH_PIDS, _ENOUGH_FILES = 4096, 4096
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # uname's names, and Docker's
# CUresult codes (cuda.h) that nvidia-smi does not notice, with causes and fixes.
_CUDA_ERRORS = {
    802: (
        "CUDA is not ready (802, system not yet initialized): Fabric Manager is not running",
        "start it: `sudo systemctl start nvidia-fabricmanager` on {node}; its version must match"
        " the driver",
    ),
    803: (
        "CUDA and the driver do not match (803, system driver mismatch)",
        "reboot {node}: its driver was replaced, and the old one is still loaded",
    ),
    804: (
        "CUDA's compatibility libraries do not support these GPUs (804)",
        "remove `cuda-compat` from the image, or update the driver of {node}",
    ),
}


def judge_image_identity(evidence: Evidence) -> Sequence[Finding]:
    """Judge that every node has the inventory's image, with equal layers and configuration."""
    image = evidence.inventory.image
    images = {host.name: host.facts.images.get(image) for host in evidence.reached}
    present = {name: facts for name, facts in images.items() if facts is not None}
    findings = [
        failed(
            name,
            f"image {image} is missing",
            fix=(
                f"run `docker pull {image}` on {name}, or copy it from another node: `vlaunch image"
                f" copy {image}`"
            ),
        )
        for name in images
        if name not in present
    ]
    groups: dict[str, list[str]] = {}
    for name, facts in present.items():
        groups.setdefault(facts.identity, []).append(name)
    majority, *others = sorted(groups.values(), key=len, reverse=True) or [[]]
    findings += [
        failed(
            name,
            f"{image} differs from the image on {fold(majority)}",
            evidence="\n".join(f"{name}: {facts.id[:19]}" for name, facts in present.items()),
            fix=(
                f"copy one to all nodes: `vlaunch image copy {image} --from {majority[0]}`; or name"
                " the image by digest in the inventory"
            ),
        )
        for group in others
        for name in group
    ]
    return findings or [passed(host) for host in evidence.reached]


def _judge_image(evidence: Evidence) -> Sequence[Finding]:
    """Judge the image on nodes that have it; others are skipped."""
    image = evidence.inventory.image
    images = {host.name: host.facts.images.get(image) for host in evidence.reached}
    with_image = {
        name: facts for name, facts in evidence.facts.items() if images.get(name) is not None
    }
    findings = judge_image_identity(replace(evidence, facts=with_image))
    odd = {finding.node: finding for finding in findings if finding.status != "pass"}
    return [
        skipped(name, f"{image} is not on this node yet: `vlaunch up` fetches it")
        if facts is None
        else odd.get(name) or passed(name, f"{image} is {facts.id.removeprefix('sha256:')[:12]}")
        for name, facts in images.items()
    ]


def judge_versions(nodes: Sequence[Node], ray_version: str, python_version: str) -> _AnswersJudge:
    """Return the judge of the JSON versions that images print: `{"ray": …, "python": …}`."""
    expected = {"ray": ray_version, "python": python_version}
    return lambda answers: [
        _judge_versions(node, answers[node.name][0], expected) for node in nodes
    ]


def judge_gpus(nodes: Sequence[Node]) -> _AnswersJudge:
    """Return the judge of `docker.try_gpus` in a container with the declared GPUs."""
    return lambda answers: [_judge_gpus(node, answers[node.name][0]) for node in nodes]


def _judge_versions(node: Node, answer: Answer, expected: Mapping[str, str]) -> Finding:
    try:
        reported = untrusted.loads(answer.out.strip().splitlines()[-1]) if answer.ok else None
    except (ValueError, IndexError):
        reported = None
    if reported == expected:
        return passed(node, f"Ray {expected['ray']}, Python {expected['python']}")
    text = f"the image does not run Ray {expected['ray']} and Python {expected['python']}"
    evidence = str(reported) if reported else answer.tail
    return failed(node, text, evidence=evidence, fix=_pull_again_fix(node.name))


def _pull_again_fix(name: str) -> str:
    return f"remove the image on {name} with `docker rmi --force` and run `vlaunch up` again"


def _judge_gpus(node: Node, answer: Answer) -> Finding:
    gpu_count = sum(line.startswith("GPU ") for line in answer.out.splitlines())
    cuda = re.search(r"^cuInit (\d{1,4})$", answer.out, re.MULTILINE)
    if gpu_count == node.gpus and cuda is not None:
        code = int(cuda[1])
        if code == 0:
            return passed(node, f"{format_count(gpu_count, 'GPU')} in a container")
        unknown_error = (
            f"CUDA does not start (cuInit: {code})",
            "look at `sudo dmesg | grep NVRM` on {node}",
        )
        text, fix = _CUDA_ERRORS.get(code, unknown_error)
        return failed(node, text, fix=fix.format(node=node.name))
    if gpu_count == node.gpus and "libcuda.so" in answer.err:
        return warned(
            node,
            f"{format_count(gpu_count, 'GPU')} in a container, but no CUDA driver library to test",
            evidence=answer.tail,
            fix="include `compute` in `NVIDIA_DRIVER_CAPABILITIES`, or leave it unset",
        )
    fix = f"correct `gpus:` of {node.name}, or find the missing GPU with `nvidia-smi -L`"
    text = f"a container sees {format_count(gpu_count, 'GPU')}, {node.gpus} declared"
    if gpu_count == node.gpus:
        text, fix = "the GPUs could not be tested", f"run `nvidia-smi` on {node.name}"
    if failure := explain(answer.err + "\n" + answer.out):
        text, fix = failure.cause, failure.fix
    return failed(node, text, evidence=answer.tail, fix=fix)


def _per_container(judge: Callable[[str, ContainerView], Finding]) -> Judge:
    def judge_host(host: Host) -> Finding:
        inside = _container_view(host)
        return inside if isinstance(inside, Finding) else judge(host.name, inside)

    return per_host(judge_host)


def _container_view(host: Host) -> ContainerView | Finding:
    inside = host.evidence.inside.get(host.name)
    if inside is None:
        reason = "no container was inspected"
        if host.facts.images.get(host.inventory.image) is None:
            reason = "the image is not on this node yet: run `vlaunch up`"
        return skipped(host, host.evidence.inside_missing.get(host.name) or reason)
    if inside.error:
        error = untrusted.excerpt(inside.error.strip().splitlines()[-1])
        return skipped(host, f"could not inspect the container: {error}")
    return inside


def _judge_devices(name: str, inside: ContainerView) -> Finding:
    if inside.infiniband:
        return passed(name, f"/dev/infiniband has {len(inside.infiniband)} devices")
    return failed(
        name,
        "the container has no /dev/infiniband",
        fix=f"load the drivers on {name} (`sudo modprobe mlx5_ib ib_uverbs`), then {_RECREATE}",
    )


def _judge_memlock(name: str, inside: ContainerView) -> Finding:
    if inside.memlock_unlimited:
        return passed(name, "locked memory is unlimited")
    if inside.memlock is None:
        return skipped(name, "the container's limit on locked memory is unknown")
    return failed(
        name,
        f"the container can lock only {inside.memlock // 1024} KiB of memory",
        fix=(
            f"on {name}: `sudo systemctl edit docker`, add `[Service]` with"
            f" `LimitMEMLOCK=infinity`, `sudo systemctl restart docker`, then {_RECREATE}"
        ),
    )


def _judge_ipc_lock(name: str, inside: ContainerView) -> Finding:
    if inside.ipc_lock is None:
        return skipped(name, "the container's capabilities are unknown")
    if inside.ipc_lock:
        return passed(name, "the container has IPC_LOCK")
    return failed(
        name,
        "the container lacks the capability IPC_LOCK",
        fix=f"{_RECREATE}, which starts it with `--cap-add IPC_LOCK`",
    )


def _judge_limits(name: str, inside: ContainerView) -> Finding:
    if inside.pids is not None and inside.pids < _ENOUGH_PIDS:
        return failed(
            name,
            f"the container may have only {inside.pids} processes and threads",
            fix=(
                f"raise Docker's `--pids-limit` or systemd's `TasksMax` on {name} to {_ENOUGH_PIDS}"
                f" or more, then {_RECREATE}"
            ),
        )
    if inside.files is not None and inside.files < _ENOUGH_FILES:
        return failed(
            name,
            f"the container may open only {inside.files} files",
            fix=(
                f"on {name}: set `default-ulimits` for `nofile` to {_ENOUGH_FILES} in"
                f" /etc/docker/daemon.json, restart Docker, then {_RECREATE}"
            ),
        )
    return passed(name, "enough threads and open files")


def _judge_architecture(host: Host) -> Finding:
    image = host.facts.images.get(host.inventory.image)
    machine = host.survey.machine if host.survey else ""
    if image is None or not image.architecture or not machine:
        return skipped(host, "the image is not on this node yet: `vlaunch up` fetches it")
    own = _ARCHITECTURES.get(machine, machine)
    if image.architecture == own:
        return passed(host, own)
    return failed(
        host,
        f"the image is for {image.architecture}, {host.name} is {own}",
        fix=f"set an image for {own} as `image:` of {host.name}'s cluster",
    )


def _judge_libibverbs(name: str, inside: ContainerView) -> Finding:
    if inside.libibverbs:
        return passed(name, inside.libibverbs)
    return failed(
        name,
        "the image has no libibverbs.so.1",
        fix=(
            "build an image from this one with `RUN apt-get install -y libibverbs1"
            " ibverbs-providers`"
        ),
    )


def _uniform_version(
    program: str, version: Callable[[ContainerView], str], missing_text: str
) -> Judge:

    def value(host: Host) -> str | Finding:
        inside = _container_view(host)
        if isinstance(inside, Finding):
            return inside
        return version(inside) or skipped(host, missing_text.format(ray=host.inventory.ray.version))

    def differs(host: Host, version: str, common: str, others: str) -> Finding:
        text = f"{program} {version}, while {others} has {common}"
        return failed(host, text, fix=_pull_again_fix(host.name))

    return uniform_value(value, differs, lambda host, version: passed(host, f"{program} {version}"))


def _judge_supported(evidence: Evidence) -> Sequence[Finding]:
    """Judge the versions of vLLM and Ray by those that vlaunch was checked with."""
    findings: list[Finding] = []
    for host in evidence.reached:
        inside = _container_view(host)
        if isinstance(inside, Finding):
            findings.append(inside)
            continue
        versions = judge_support(inside.vllm, inside.ray, node=host.name)
        findings += versions or [skipped(host, "the container has neither vLLM nor Ray")]
    return findings


CHECKS = (
    Check(
        id="rdma-container",
        what="the containers have the RDMA devices",
        why="without /dev/infiniband in the container, NCCL silently uses TCP",
        judge=_per_container(_judge_devices),
        group="rdma",
        skip_reason=skip_without_rdma,
        needs=("docker", "rdma-devices"),
    ),
    Check(
        id="memlock",
        what="the containers can lock unlimited memory",
        why="RDMA locks the memory it registers; otherwise `ibv_reg_mr … Cannot allocate memory`",
        judge=_per_container(_judge_memlock),
        group="rdma",
        skip_reason=skip_without_rdma,
        needs=("docker",),
    ),
    Check(
        id="ipc-lock",
        what="the containers have the capability IPC_LOCK",
        why="without it, NCCL fails at start with an unexplained system error",
        judge=_per_container(_judge_ipc_lock),
        group="rdma",
        skip_reason=skip_without_rdma,
        needs=("docker",),
    ),
    Check(
        id="libibverbs",
        what="the image has libibverbs",
        why="NCCL loads it at run time and silently uses TCP without it",
        judge=_per_container(_judge_libibverbs),
        group="rdma",
        skip_reason=skip_without_rdma,
        needs=("docker",),
    ),
    Check(
        id="image",
        what="the image is the same on every node",
        why="a tag can move between two pulls, and mixed builds fail with misleading errors",
        judge=_judge_image,
        group="image",
        needs=("docker",),
    ),
    Check(
        id="architecture",
        what="the image is for the node's CPU",
        why="another one ends at once with `exec format error`",
        judge=per_host(_judge_architecture),
        group="image",
        needs=("docker",),
    ),
    Check(
        id="supported-versions",
        what="the versions of vLLM and Ray are ones that vlaunch was checked with",
        why="flags, log lines and metrics, which vlaunch relies on, change between versions",
        judge=_judge_supported,
        group="image",
        needs=("docker",),
    ),
    Check(
        id="ray-version",
        what="all containers have the same Ray version",
        why="Ray rejects nodes of another version",
        judge=_uniform_version(
            "Ray", lambda inside: inside.ray, "the image has no Ray; `vlaunch up` adds {ray}"
        ),
        group="image",
        needs=("docker",),
    ),
    Check(
        id="python-version",
        what="all containers have the same Python version",
        why=(
            "Ray rejects nodes of another Python version, which could not read its pickled"
            " functions"
        ),
        judge=_uniform_version(
            "Python", lambda inside: inside.python, "the container reported no Python version"
        ),
        group="image",
        needs=("docker",),
    ),
    Check(
        id="process-limits",
        what="the containers may have enough threads and open files",
        why="with few, libraries fail later: `pthread_create failed`, `Too many open files`",
        judge=_per_container(_judge_limits),
        group="docker",
        needs=("docker",),
    ),
)
