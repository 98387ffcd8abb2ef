"""Images, with their Ray and Python, and the view from inside containers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from launcher.core.check import Finding
from launcher.core.domain import Answer, Inventory
from launcher.hosts.check import Evidence
from launcher.hosts.checks import container
from launcher.tools.docker import Image
from launcher.tools.host import HostFacts
from tests.hosts.checks.spoiled import NODES, Case, named, stays_unknown, turns_red

Load = Callable[..., Inventory]
NAME = "vllm/vllm-openai:v0.32.0"
THREE = "nodes: [{host: 'gpu[01-03]', ip: '10.0.0.[1-3]', gpus: 2}]"

CASES = (
    Case(
        id="rdma-container",
        red={"gpu02": "fail"},
        text="the container has no /dev/infiniband",
        fix="ib_uverbs",
        inside={"gpu02": {"infiniband": ()}},
    ),
    Case(
        id="memlock",
        red={"gpu03": "fail"},
        text="can lock only 8192 KiB of memory",
        fix="LimitMEMLOCK=infinity",
        inside={"gpu03": {"memlock_unlimited": False, "memlock": 8 << 20}},
    ),
    Case(
        id="ipc-lock",
        red={"gpu01": "fail"},
        text="lacks the capability IPC_LOCK",
        fix="--cap-add IPC_LOCK",
        inside={"gpu01": {"ipc_lock": False}},
    ),
    Case(
        id="process-limits",
        red={"gpu02": "fail"},
        text="may have only 512 processes and threads",
        fix="`TasksMax` on gpu02",
        inside={"gpu02": {"pids": 512}, "gpu01": {"pids": 100000}},
    ),
    Case(
        id="process-limits",
        red={"gpu01": "fail"},
        text="may open only 1024 files",
        fix="`default-ulimits` for `nofile`",
        inside={"gpu01": {"files": 1024}, "gpu02": {"files": 1048576}},
    ),
    Case(
        id="architecture",
        red={"gpu03": "fail"},
        text="the image is for amd64, gpu03 is arm64",
        fix="set an image for arm64",
        survey={"gpu03": {"machine": "aarch64"}},
    ),
    Case(
        id="libibverbs",
        red=dict.fromkeys(NODES, "fail"),
        text="no libibverbs.so.1",
        fix="apt-get install -y libibverbs1",
        inside={"*": {"libibverbs": ""}},
    ),
    Case(
        id="ray-version",
        red={"gpu02": "fail"},
        text="Ray 2.48.0, while gpu[01,03] has 2.60.0",
        fix="`docker rmi --force`",
        inside={"gpu02": {"ray": "2.48.0"}},
        also=("supported-versions",),
    ),
    Case(
        id="supported-versions",
        red=dict.fromkeys(NODES, "fail"),
        text="vLLM 0.19.1 does not work with vlaunch, which needs 0.22 or newer",
        fix="set `image:` to a checked one",
        inside={"*": {"vllm": "0.19.1"}},
    ),
    Case(
        id="supported-versions",
        red=dict.fromkeys(NODES, "warn"),
        text="vLLM 0.99.0 is newer than vlaunch was checked with",
        fix="set `image:` to a checked one",
        inside={"*": {"vllm": "0.99.0"}},
    ),
    Case(
        id="supported-versions",
        red={"gpu03": "fail"},
        text="vLLM 0.19.1 does not work with vlaunch, which needs 0.22 or newer",
        fix="set `image:` to a checked one",
        inside={"gpu03": {"vllm": "0.19.1"}},
    ),
    Case(
        id="python-version",
        red={"gpu02": "fail"},
        text="Python 3.10.1, while gpu[01,03] has 3.12.3",
        fix="`vlaunch up` again",
        inside={"gpu02": {"python": "3.10.1"}},
    ),
)

UNKNOWN = (
    (
        Case(id="memlock", red={}, text="", fix="", inside={"gpu01": {"memlock_unlimited": False}}),
        "is unknown",
    ),
    (
        Case(
            id="ipc-lock",
            red={},
            text="",
            fix="",
            evidence={"inside": {}, "inside_missing": {"gpu01": "asked in vain"}},
        ),
        "no container",
    ),
    (
        Case(
            id="libibverbs",
            red={},
            text="",
            fix="",
            evidence={"inside": {}},
            facts={"*": {"images": {}}},
        ),
        "the image is not on this node yet: run `vlaunch up`",
    ),
    (
        Case(id="ray-version", red={}, text="", fix="", inside={"*": {"ray": ""}}),
        "the image has no Ray; `vlaunch up` adds 2.60.0",
    ),
    (
        Case(
            id="supported-versions",
            red={},
            text="",
            fix="",
            inside={"*": {"ray": "", "vllm": ""}},
        ),
        "the container has neither vLLM nor Ray",
    ),
    (
        Case(
            id="supported-versions",
            red={},
            text="",
            fix="",
            inside={"*": {"ray": "", "vllm": "0.1.dev7+g1a2b3c4"}},
        ),
        "vLLM 0.1.dev7+g1a2b3c4 is not a release",
    ),
    (
        Case(
            id="python-version",
            red={},
            text="",
            fix="",
            inside={"*": {"error": "OCI runtime exec failed"}},
        ),
        "OCI runtime exec failed",
    ),
)


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
    """Return the findings for nodes with these images."""
    facts_by_node = {name: facts(identity) for name, identity in identities.items()}
    return container.judge_image_identity(Evidence(inventory=inventory, facts=facts_by_node))


def test_the_same_image_everywhere_passes(load: Load) -> None:
    """By layers and configuration, not by name."""
    findings = judged(load(), gpu01="a", gpu02="a")

    assert [(finding.node, finding.status) for finding in findings] == [
        ("gpu01", "pass"),
        ("gpu02", "pass"),
    ]


def test_an_odd_image_is_compared_with_the_majority(load: Load) -> None:
    """The node that differs from most is to be fixed, and both IDs are shown."""
    (finding,) = judged(load("", THREE), gpu01="b", gpu02="a", gpu03="a")

    assert (finding.node, finding.status, finding.text) == (
        "gpu01",
        "fail",
        f"{NAME} differs from the image on gpu[02-03]",
    )
    assert "gpu01: sha256:bbbb" in finding.evidence
    assert f"vlaunch image copy {NAME} --from gpu02" in finding.fix
    assert "by digest" in finding.fix


def test_a_missing_image_has_a_fix(load: Load) -> None:
    """With and without a registry."""
    (finding,) = judged(load(), gpu01="a", gpu02=None)

    assert (finding.node, finding.text) == ("gpu02", f"image {NAME} is missing")
    assert f"docker pull {NAME}" in finding.fix
    assert f"vlaunch image copy {NAME}" in finding.fix


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
def test_exact_versions_are_required(out: str, code: int, status: str, load: Load) -> None:
    """Ray rejects a cluster of two versions, and pickles depend on Python's."""
    node = load().head
    judge = container.judge_versions([node], "2.60.0", "3.12.3")
    (finding,) = judge({"gpu01": [Answer(node="gpu01", code=code, out=out)]})

    assert finding.status == status
    if status == "fail":
        assert finding.text == "the image does not run Ray 2.60.0 and Python 3.12.3"
        assert "docker rmi --force" in finding.fix


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
            "CUDA is not ready (802, system not yet initialized): Fabric Manager is not running",
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
            "2 GPUs in a container, but no CUDA driver library to test",
        ),
        (
            Answer(node="gpu01", code=124, out="GPU 0: A\nGPU 1: B\n"),
            "fail",
            "the GPUs could not be tested",
        ),
        (
            Answer(node="gpu01", code=0, out="GPU 0: A\n"),
            "fail",
            "a container sees 1 GPU, 2 declared",
        ),
        (
            Answer(
                node="gpu01",
                code=125,
                err='could not select device driver "" with capabilities: [[gpu]]',
            ),
            "fail",
            "Docker cannot expose GPUs to containers",
        ),
        (
            Answer(node="gpu01", code=125, err="Unknown"),
            "fail",
            "a container sees 0 GPUs, 2 declared",
        ),
    ],
)
def test_gpus_are_counted_in_containers(answer: Answer, status: str, text: str, load: Load) -> None:
    """A known failure is reported by its cause."""
    (finding,) = container.judge_gpus([load().head])({"gpu01": [answer]})

    assert (finding.status, finding.text) == (status, text)
    assert status == "pass" or finding.fix


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_fault_fails_its_check_only(case: Case) -> None:
    """On the affected node, with text and fix."""
    turns_red(case)


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_unknown_values_are_skipped_with_the_reason(case: Case, reason: str) -> None:
    """They never pass."""
    stays_unknown(case, reason)
