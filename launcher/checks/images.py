"""Gates on images: one identity on every node, and the exact Ray and Python inside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from launcher.checks.shape import Evidence, Finding, failed, passed
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
                        f"run `docker pull {image}` on {host.name}, or load it: "
                        f"`docker save {image} | ssh {host.node.host} docker load`"
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
                    f"give the image by digest in the inventory, or run `docker pull {image}` on"
                    " every node"
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
    """Return the judge of `nvidia-smi --list-gpus` in a container that asked for the declared
    GPUs.
    """

    def judge(answers: Mapping[str, Sequence[Answer]]) -> Sequence[Finding]:
        return [_gpus(node, answers[node.name][0]) for node in nodes]

    return judge


def _gpus(node: Node, answer: Answer) -> Finding:
    seen = sum(line.startswith("GPU ") for line in answer.out.splitlines())
    if answer.ok and seen == node.gpus:
        return Finding(node=node.name, status="pass", text=f"{seen} GPUs in a container")
    known = symptoms.first(answer.err + "\n" + answer.out)
    return Finding(
        node=node.name,
        status="fail",
        text=known.cause if known else f"a container sees {seen} GPUs, {node.gpus} declared",
        evidence=answer.tail,
        fix=(
            known.fix
            if known
            else f"correct `gpus:` of {node.name}, or find the missing one: `nvidia-smi -L` there"
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
