"""The catalogue as a whole: complete, ordered, passing on healthy nodes, and never without
evidence.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import RequestError
from launcher.hosts.check import GROUPS, Evidence
from launcher.hosts.checks.catalogue import CATALOGUE, run_checks, select_checks
from tests.hosts.checks.spoiled import HEALTHY, NODES, facts, inventory

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "checks.md"


def test_a_healthy_cluster_has_no_failures() -> None:
    """With RoCE and GPUs all checks run, except those for other hardware."""
    results = run_checks(HEALTHY.build_evidence())
    skipped = {
        result.check.id: result.findings[0].text for result in results if result.status == "skip"
    }

    assert [result.check.id for result in results if result.status not in ("pass", "skip")] == []
    assert set(skipped) == {
        "sudo",
        "certificates",
        "interface",
        "rdma-unused",
        "privileged",
        "imex",
    }
    assert all(skipped.values())


def test_every_pass_has_a_text() -> None:
    """Folding by text shows differences; without a value the check's own title is the text."""
    assert all(
        finding.text
        for result in run_checks(HEALTHY.build_evidence())
        for finding in result.findings
    )


def test_no_check_passes_without_evidence() -> None:
    """Empty answers pass only the login check."""
    bare = type(facts("gpu01"))()
    results = run_checks(Evidence(inventory=inventory(), facts=dict.fromkeys(NODES, bare)))
    green = {
        result.check.id
        for result in results
        for finding in result.findings
        if finding.status == "pass"
    }

    assert green == {"ssh"}


def test_a_probe_without_a_survey_covers_only_some_checks() -> None:
    """Docker, addresses, ports, disk and GPUs are known; clocks, links, containers, pairs and files
    are not.
    """
    probed = {name: facts(name, survey=None) for name in NODES}
    results = run_checks(Evidence(inventory=inventory(), facts=probed))
    green = {
        result.check.id
        for result in results
        for finding in result.findings
        if finding.status == "pass"
    }

    assert green == {
        "ssh",
        "docker",
        "docker-engine",
        "selinux",
        "docker-version",
        "gpu-runtime",
        "gpu-shared",
        "accelerator",
        "gpu-memory",
        "gpu-model",
        "driver",
        "ports",
        "address",
        "address-unique",
        "subnet",
        "one-nic-per-subnet",
        "rdma-devices",
        "image",
        "cache-dir",
        "disk",
        "state-dir",
    }


def test_a_cpu_cluster_skips_checks_of_gpus() -> None:
    """With one SKIP for the cluster, not one per node."""
    evidence = replace(HEALTHY.build_evidence(), inventory=inventory("accelerator: cpu"))
    results = {result.check.id: result for result in run_checks(evidence)}

    for id_ in (
        "accelerator",
        "gpu-model",
        "driver",
        "gpu-errors",
        "gpu-memory",
        "gpu-runtime",
        "gpu-shared",
        "next-boot",
        "rdma-link",
    ):
        assert results[id_].status == "skip"
        assert [finding.node for finding in results[id_].findings] == [""]
    assert results["driver"].findings[0].text == "accelerator: cpu has no NVIDIA driver"
    assert (
        results["memlock"].findings[0].text == "network: fabric is ethernet, which promises no RDMA"
    )


def test_an_unreachable_node_fails_once() -> None:
    """In `ssh`, with the reason, and SKIP elsewhere; the others are checked all the same."""
    evidence = HEALTHY.build_evidence()
    remaining = {name: facts for name, facts in evidence.facts.items() if name != "gpu02"}
    missing = {"gpu02": "no route to host\nssh: connect to host gpu02"}
    results = run_checks(replace(evidence, facts=remaining, missing=missing))
    red = {
        result.check.id: [finding.node for finding in result.findings if finding.status == "fail"]
        for result in results
    }
    address = next(result for result in results if result.check.id == "address")

    assert {id_: nodes for id_, nodes in red.items() if nodes} == {"ssh": ["gpu02"]}
    assert [finding.status for finding in address.findings] == ["pass", "skip", "pass"]
    assert address.findings[1].text == "unreachable: see `ssh`"


def test_a_single_node_has_no_peers() -> None:
    """It is not compared with itself."""
    alone = {"gpu01": facts("gpu01")}
    evidence = replace(HEALTHY.build_evidence(), inventory=inventory(count=1), facts=alone)
    results = {result.check.id: result for result in run_checks(evidence)}

    assert results["high-port"].findings[0].text == "a single node has no peers"
    assert results["mtu"].status == "pass"


def test_a_check_needs_its_prerequisites() -> None:
    """Even if only that check is selected."""
    evidence = HEALTHY.build_evidence()
    broken = replace(
        evidence.facts["gpu03"],
        docker_version=None,
        part_errors={"docker": "Cannot connect to the Docker daemon"},
    )
    observed = replace(evidence, facts={**evidence.facts, "gpu03": broken})
    (result,) = run_checks(observed, ids=["gpu-runtime"])

    assert [finding.status for finding in result.findings] == ["pass", "pass", "skip"]
    assert result.findings[2].text == "it failed `docker`, which this check requires"


def test_the_essential_checks_are_part_of_the_catalogue() -> None:
    """With the same IDs: `check` and `up` report under one name."""
    ids = [check.id for check in CATALOGUE]

    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", id_) for id_ in ids)


def test_the_order_is_that_of_the_groups() -> None:
    """From the login to the model; every group has a check."""
    groups = [check.group for check in CATALOGUE]

    assert groups == sorted(groups, key=GROUPS.index)
    assert set(groups) == set(GROUPS)


def test_prerequisites_exist() -> None:
    """No check is its own."""
    ids = {check.id for check in CATALOGUE}

    assert all(set(check.needs) <= ids - {check.id} for check in CATALOGUE)


@pytest.mark.parametrize(
    ("commands", "ids"),
    [
        ({"only": ["mtu", "ssh"]}, ["ssh", "mtu"]),
        ({"group": ["reach"]}, ["ssh", "sudo"]),
        ({"group": ["reach"], "skip": ["sudo"]}, ["ssh"]),
        ({"group": ["reach"], "only": ["shm"]}, ["ssh", "sudo", "shm"]),
    ],
)
def test_checks_are_selected_by_id_and_group(commands: dict[str, Any], ids: list[str]) -> None:
    """Always in the catalogue's order."""
    assert [check.id for check in select_checks(**commands)] == ids
    assert len(select_checks()) == len(CATALOGUE)


@pytest.mark.parametrize(
    ("commands", "message"),
    [
        ({"only": ["mtu-paths"]}, "there is no check `mtu-paths`; did you mean `mtu-path`?"),
        ({"skip": ["xyzzy"]}, "there is no check `xyzzy`"),
        ({"group": ["networks"]}, "there is no group `networks`; did you mean `network`?"),
    ],
)
def test_an_unknown_id_has_a_suggestion(commands: dict[str, Any], message: str) -> None:
    """And a list of valid ones."""
    with pytest.raises(RequestError) as caught:
        select_checks(**commands)

    assert caught.value.message == message
    assert caught.value.hint


def test_every_check_has_its_section_in_the_documentation() -> None:
    """In the catalogue's order, with its own title."""
    text = DOCS.read_text()
    sections = dict(
        re.findall(r"^### ([a-z-]+)\n(.*?)(?=^##|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    )

    assert list(sections) == [check.id for check in CATALOGUE]
    for check in CATALOGUE:
        parts = re.findall(r"^- \*\*(.+?):\*\* ", sections[check.id], flags=re.MULTILINE)
        assert parts == ["Why", "How it is tested", "Fix", "Source"], check.id


def test_the_documentation_has_a_heading_for_every_group() -> None:
    """In their order."""
    assert re.findall(r"^## Group: ([a-z]+)$", DOCS.read_text(), flags=re.MULTILINE) == list(GROUPS)
