"""Gates on images: one identity on every node, and the exact Ray and Python inside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from launcher.checks.shape import Evidence, Finding, failed, passed, warned
from launcher.model import Answer, Node, fold
from launcher.tools import symptoms, untrusted


def same_identity(evidence: Evidence) -> Sequence[Finding]:
    """Judge that the inventory's image is on every node, with the same layers and configuration."""
    image = evidence.inventory.image
    by_identity: dict[str, list[str]] = {}
    findings = []
    for host in evidence.reached:
        found = host.facts.images.get(image)
        if found is None:
            findings.append(
                failed(
                    host,
                    f"image {image} is not there",
                    fix=(
                        f"run `docker pull {image}` on {host.name}, or bring it from another node: "
                        f"`vlaunch image push {image}`"
                    ),
                )
            )
        else:
            by_identity.setdefault(found.identity, []).append(host.name)
    if len(by_identity) > 1:
        groups = sorted(by_identity.values(), key=len, reverse=True)
        findings += [
            failed(
                node,
                f"{image} is another image than on {fold(groups[0])}",
                evidence=_ids(evidence),
                fix=(
                    f"bring one to all: `vlaunch image push {image} --from {groups[0][0]}`; or give"
                    " the image by digest in the inventory"
                ),
            )
            for group in groups[1:]
            for node in group
        ]
    return findings or [passed(host) for host in evidence.reached]


def _ids(evidence: Evidence) -> str:
    wanted = evidence.inventory.image
    images = {host.name: host.facts.images.get(wanted) for host in evidence.reached}
    return "\n".join(f"{name}: {image.id[:19]}" for name, image in images.items() if image)


def judge_versions(
    nodes: Sequence[Node], ray_version: str, python_version: str
) -> Callable[[Mapping[str, Sequence[Answer]]], Sequence[Finding]]:
    """Return the judge of what `python3 -c` printed in each node's image: `{"ray": …, "python":
    …}`.
    """
    expected = {"ray": ray_version, "python": python_version}

    def judge(answers: Mapping[str, Sequence[Answer]]) -> Sequence[Finding]:
        return [_version(node, answers[node.name][0], expected) for node in nodes]

    return judge


def judge_gpus(
    nodes: Sequence[Node],
) -> Callable[[Mapping[str, Sequence[Answer]]], Sequence[Finding]]:
    """Return the judge of `docker.try_gpus` in a container that asked for the declared GPUs."""

    def judge(answers: Mapping[str, Sequence[Answer]]) -> Sequence[Finding]:
        return [_gpus(node, answers[node.name][0]) for node in nodes]

    return judge


def _gpus(node: Node, answer: Answer) -> Finding:
    seen = sum(line.startswith("GPU ") for line in answer.out.splitlines())
    cuda = re.search(r"^cuInit (\d{1,4})$", answer.out, re.MULTILINE)
    if seen == node.gpus and cuda is not None:
        return _cuda(node, seen, int(cuda[1]))
    if seen == node.gpus and "libcuda.so" in answer.err:
        return warned(
            node,
            f"{seen} GPUs in a container, but no CUDA driver library to try them with",
            evidence=answer.tail,
            fix="let the toolkit bring it: no `NVIDIA_DRIVER_CAPABILITIES` without `compute`",
        )
    known = symptoms.first(answer.err + "\n" + answer.out)
    fix = f"correct `gpus:` of {node.name}, or find the missing one: `nvidia-smi -L` there"
    text = f"a container sees {seen} GPUs, {node.gpus} declared"
    if seen == node.gpus:
        text, fix = "the GPUs could not be tried", f"try it on {node.name}: `nvidia-smi`"
    return failed(
        node,
        known.cause if known else text,
        evidence=answer.tail,
        fix=known.fix if known else fix,
    )


# CUresult (cuda.h): what nvidia-smi does not notice.
_CUDA_ERRORS = {
    802: "CUDA is not ready (802, system not yet initialized): Fabric Manager does not run",
    803: "CUDA and the driver do not fit (803, system driver mismatch)",
    804: "CUDA's compatibility libraries are not for these GPUs (804)",
}
_CUDA_FIXES = {
    802: (
        "start it: `sudo systemctl start nvidia-fabricmanager` on {node}; its version must be the"
        " driver's"
    ),
    803: "reboot {node}: its driver was replaced, and the old one is still loaded",
    804: "leave `cuda-compat` out of the image, or update the driver of {node}",
}


def _cuda(node: Node, seen: int, code: int) -> Finding:
    if code == 0:
        return passed(node, f"{seen} GPUs in a container")
    return failed(
        node,
        _CUDA_ERRORS.get(code, f"CUDA does not start (cuInit: {code})"),
        fix=_CUDA_FIXES.get(code, "look at `sudo dmesg | grep NVRM` on {node}").format(
            node=node.name
        ),
    )


def _version(node: Node, answer: Answer, expected: Mapping[str, str]) -> Finding:
    try:
        said = untrusted.loads(answer.out.strip().splitlines()[-1]) if answer.ok else None
    except (ValueError, IndexError):
        said = None
    if said == expected:
        return Finding(
            node=node.name,
            status="pass",
            text=f"Ray {expected['ray']}, Python {expected['python']}",
        )
    wanted = f"Ray {expected['ray']} and Python {expected['python']}"
    return Finding(
        node=node.name,
        status="fail",
        text=f"the image does not run {wanted}",
        evidence=str(said) if said else answer.tail,
        fix=f"remove the image on {node.name} with `docker rmi --force` and run `vlaunch up` again",
    )
