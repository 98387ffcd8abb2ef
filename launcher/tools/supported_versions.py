"""Judgement of an image's versions of vLLM and Ray against those that vlaunch was checked with."""

import re

from launcher.core.check import Finding, failed, passed, skipped, warned
from launcher.upstream.entries import VersionRange, load_program

_RISK = {
    "older": "a server or job may fail to start, and its log may be misread",
    "newer": "a start may fail, and progress, causes of failures or capacity may be missing",
}


def judge_support(vllm: str, ray: str, *, node: str = "") -> list[Finding]:
    """Judge the versions of an image; those that are empty are left out."""
    versions = {"vllm": vllm, "ray": ray}
    return [_judge(program, version, node) for program, version in versions.items() if version]


def _judge(program: str, version: str, node: str) -> Finding:
    title, versions = load_program(program).title, load_program(program).versions
    name = f"{title} {version}"
    # Builds from sources without tags are 0.1.dev.
    position = "unknown" if re.match(r"\d+\.\d+\.dev", version) else versions.position(version)
    if position == "checked":
        return passed(node, name)
    if position == "unknown":
        return skipped(node, f"{name} is not a release, so it is not compared with those")
    checked = _format_range(versions)
    if position == "broken":
        text = f"{name} does not work with vlaunch, which needs {versions.broken_below} or newer"
        evidence = "\n".join(versions.reasons(version))
        return failed(node, text, evidence=evidence, fix=_fix(program, versions))
    losses = "; ".join([_RISK[position], *_list_losses(program, version)])
    text = f"{name} is {position} than vlaunch was checked with ({checked}), so {losses}"
    return warned(node, text, fix=_fix(program, versions))


def _list_losses(program: str, version: str) -> list[str]:
    """List what a version lacks for users, without what the oldest checked one lacks too."""
    data = load_program(program)
    expected = [entry.without for entry in data.lost(data.versions.oldest)]
    losses = dict.fromkeys(entry.without for entry in data.lost(version))
    return [text for text in losses if text not in expected]


def _format_range(versions: VersionRange) -> str:
    if versions.oldest == versions.newest:
        return versions.oldest
    return f"{versions.oldest} to {versions.newest}"


def _fix(program: str, versions: VersionRange) -> str:
    """Return how to get a checked version: Ray is the image's own, or added to it."""
    if program == "ray":
        return (
            f"use an image with Ray {_format_range(versions)}, or one without Ray and"
            f" `ray: {versions.newest}`"
        )
    return f"set `image:` to a checked one, such as `vllm/vllm-openai:v{versions.newest}`"
