"""One image everywhere, with the Ray and Python that were meant."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from launcher.checks import images
from launcher.checks.shape import Evidence, Finding
from launcher.model import Answer, Inventory
from launcher.tools.docker import Image
from launcher.tools.host import HostFacts

Load = Callable[..., Inventory]
NAME = "vllm/vllm-openai:v0.32.0"
THREE = "nodes: [{host: 'gpu[01-03]', ip: '10.0.0.[1-3]', gpus: 2}]"


def facts(identity: str | None) -> HostFacts:
    image = (
        None
        if identity is None
        else Image(
            id=f"sha256:{identity * 20}",
            identity=identity,
            digests=(),
            architecture="amd64",
            labels={},
        )
    )
    return HostFacts(images={NAME: image})


def judged(inventory: Inventory, **identities: str | None) -> Sequence[Finding]:
    """Ask about nodes with these images."""
    known = {name: facts(identity) for name, identity in identities.items()}
    return images.same_identity(Evidence(inventory=inventory, facts=known))


def test_the_same_image_everywhere_passes(load: Load) -> None:
    """By layers and configuration, not by name."""
    found = judged(load(), gpu01="a", gpu02="a")

    assert [(each.node, each.status) for each in found] == [("gpu01", "pass"), ("gpu02", "pass")]


def test_the_odd_one_out_is_named_against_the_many(load: Load) -> None:
    """Whoever differs from most is the one to mend, and both ids are shown."""
    (found,) = judged(load("", THREE), gpu01="b", gpu02="a", gpu03="a")

    assert (found.node, found.status, found.text) == (
        "gpu01",
        "fail",
        f"{NAME} is another image than on gpu[02-03]",
    )
    assert "gpu01: sha256:bbbb" in found.evidence
    assert f"vlaunch image push {NAME} --from gpu02" in found.fix
    assert "by digest" in found.fix


def test_an_image_that_is_missing_says_how_to_get_it(load: Load) -> None:
    """Also without a registry."""
    (found,) = judged(load(), gpu01="a", gpu02=None)

    assert (found.node, found.text) == ("gpu02", f"image {NAME} is not there")
    assert f"docker pull {NAME}" in found.fix
    assert f"vlaunch image push {NAME}" in found.fix


@pytest.mark.parametrize(
    ("out", "code", "status"),
    [
        (json.dumps({"ray": "2.60.0", "python": "3.12.3"}), 0, "pass"),
        ("WARNING: banner\n" + json.dumps({"ray": "2.60.0", "python": "3.12.3"}) + "\n", 0, "pass"),
        (json.dumps({"ray": "2.59.0", "python": "3.12.3"}), 0, "fail"),
        (json.dumps({"ray": "2.60.0", "python": "3.12.4"}), 0, "fail"),
        ("Traceback: no ray", 1, "fail"),
        ("", 0, "fail"),
        ("[]", 0, "fail"),
    ],
)
def test_exact_versions_are_wanted(out: str, code: int, status: str, load: Load) -> None:
    """Ray refuses a cluster of two versions, and pickles do not cross Pythons."""
    node = load().head
    judge = images.judge_versions([node], "2.60.0", "3.12.3")
    (found,) = judge({"gpu01": [Answer(node="gpu01", code=code, out=out)]})

    assert found.status == status
    if status == "fail":
        assert found.text == "the image does not run Ray 2.60.0 and Python 3.12.3"
        assert "docker rmi --force" in found.fix


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (
            Answer(node="gpu01", code=0, out="GPU 0: A\nGPU 1: B\ncuInit 0\n"),
            "pass",
            "2 GPUs in a container",
        ),
        (
            Answer(node="gpu01", code=0, out="GPU 0: A\nGPU 1: B\ncuInit 802\n"),
            "fail",
            "CUDA is not ready (802, system not yet initialized): Fabric Manager does not run",
        ),
        (
            Answer(node="gpu01", code=0, out="GPU 0: A\nGPU 1: B\ncuInit 999\n"),
            "fail",
            "CUDA does not start (cuInit: 999)",
        ),
        (
            Answer(
                node="gpu01",
                code=1,
                out="GPU 0: A\nGPU 1: B\n",
                err="OSError: libcuda.so.1: cannot open shared object file",
            ),
            "warn",
            "2 GPUs in a container, but no CUDA driver library to try them with",
        ),
        (
            Answer(node="gpu01", code=124, out="GPU 0: A\nGPU 1: B\n"),
            "fail",
            "the GPUs could not be tried",
        ),
        (
            Answer(node="gpu01", code=0, out="GPU 0: A\n"),
            "fail",
            "a container sees 1 GPUs, 2 declared",
        ),
        (
            Answer(
                node="gpu01",
                code=125,
                err='could not select device driver "" with capabilities: [[gpu]]',
            ),
            "fail",
            "Docker cannot hand out GPUs",
        ),
        (
            Answer(node="gpu01", code=125, err="Unknown"),
            "fail",
            "a container sees 0 GPUs, 2 declared",
        ),
    ],
)
def test_gpus_are_counted_where_they_will_be_used(
    answer: Answer, status: str, text: str, load: Load
) -> None:
    """In a container; a known refusal is told by its cause."""
    (found,) = images.judge_gpus([load().head])({"gpu01": [answer]})

    assert (found.status, found.text) == (status, text)
    assert status == "pass" or found.fix
