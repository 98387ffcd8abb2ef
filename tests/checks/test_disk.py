"""Room for the image and for the model."""

from __future__ import annotations

import pytest

from launcher.tools.compile_cache import CompileCache
from launcher.tools.host import StateDir
from tests.checks.conftest import Good, Load, first
from tests.checks.spoiled import MODEL, NODES, Case, findings, named, turns_red
from tests.containers import container

GIB = 1024**3
BIG = {"model.safetensors": 800 * GIB}

CASES = (
    Case(
        id="disk",
        red={"gpu02": "fail"},
        text="4.0 GiB free under /data, 5 GiB needed",
        fix="set `hf_home:` to a larger disk",
        facts={"gpu02": {"disk_free": 4 * GIB}},
    ),
    Case(
        id="disk",
        red={"gpu02": "fail"},
        text="29.0 GiB free under Docker's own directory, 30 GiB needed to pull the image",
        fix="`docker image prune -a`",
        facts={"gpu02": {"docker_disk_free": 29 * GIB, "images": {}}},
    ),
    Case(
        id="disk",
        red={"gpu03": "fail"},
        text="4.0 GiB free under Docker's own directory, 5 GiB needed",
        fix="`data-root`",
        facts={"gpu03": {"docker_disk_free": 4 * GIB}},
    ),
    Case(
        id="disk",
        red={"gpu03": "fail"},
        text="500.0 GiB free under /data, 805 GiB needed for the model",
        fix="larger disk",
        facts={"gpu03": {"disk_free": 500 * GIB}},
        files={"gpu01": BIG, "gpu02": BIG, "gpu03": None},
        also=("model",),
    ),
    Case(
        id="cache-dir",
        red={"gpu02": "warn"},
        text="would lie on nfs4, a file system over the network",
        fix="set `cache_dir:` of gpu02",
        facts={"gpu02": {"compiled": CompileCache(kind="nfs4", size=GIB)}},
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_wrong_turns_its_check_red_and_no_other(case: Case) -> None:
    """On the right node, with its words and a fix."""
    turns_red(case)


@pytest.mark.parametrize(
    ("changed", "files", "text"),
    [
        ({}, BIG, "the image is here, more than 1 TiB free under /data; the model is here"),
        (
            {"images": {}},
            None,
            (
                "room for the image (30 GiB), more than 1 TiB free under /data; the model's size is"
                " not known"
            ),
        ),
        (
            {"disk_free": 6 * GIB},
            None,
            "the image is here, more than 5 GiB free under /data; the model's size is not known",
        ),
    ],
)
def test_green_says_no_more_than_is_known(
    changed: dict[str, object], files: dict[str, int] | None, text: str
) -> None:
    """A model that no node has may be of any size."""
    found = findings(
        Case(
            id="disk",
            red={},
            text="",
            fix="",
            facts={"*": changed},
            files=dict.fromkeys(NODES, files),
        )
    )

    assert {(each.status, each.text) for each in found} == {("pass", text)}


@pytest.mark.parametrize(
    ("compiled", "status", "text"),
    [
        (CompileCache(kind="xfs"), "pass", "xfs, nothing compiled yet"),
        (CompileCache(kind="xfs", size=5 * GIB // 2), "pass", "xfs, 2.5 GiB compiled"),
        (None, "skip", "the file system of `cache_dir` is not known"),
    ],
)
def test_what_engines_compiled_is_told_with_its_size(
    compiled: CompileCache | None, status: str, text: str
) -> None:
    """And is not called good where nobody knows."""
    case = Case(id="cache-dir", red={}, text="", fix="", facts={"*": {"compiled": compiled}})

    assert {(each.status, each.text) for each in findings(case)} == {(status, text)}


def test_a_cluster_of_cpus_needs_less() -> None:
    """Its image has no CUDA libraries."""
    facts = {"disk_free": 2 * GIB, "docker_disk_free": 4 * GIB, "images": {}}
    found = findings(
        Case(id="disk", red={}, text="", fix="", more="accelerator: cpu", facts={"*": facts})
    )

    assert {each.status for each in found} == {"pass"}


def test_a_node_that_runs_the_cluster_pulls_nothing() -> None:
    """Its containers are made of an image of ours, which may have another name."""
    facts = {"docker_disk_free": 6 * GIB, "images": {}, "containers": (container(),)}

    assert (
        findings(Case(id="disk", red={}, text="", fix="", facts={"gpu01": facts}))[0].status
        == "pass"
    )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"disk_free": None}, "`df` gave no answer"),
        ({"docker_disk_free": None, "images": {}}, "Docker's own directory is not"),
    ],
)
def test_what_was_not_seen_is_skipped_with_its_reason(
    changed: dict[str, object], reason: str
) -> None:
    """Never green."""
    found = findings(Case(id="disk", red={}, text="", fix="", facts={"gpu01": changed}))[0]

    assert found.status == "skip"
    assert reason in found.text


def test_a_model_that_is_a_path_is_not_counted() -> None:
    """It need not be on the same disk."""
    case = Case(
        id="disk",
        red={},
        text="",
        fix="",
        facts={"gpu03": {"disk_free": 500 * GIB}},
        files={"gpu01": BIG, "gpu02": BIG, "gpu03": None},
        evidence={"model": f"/models/{MODEL}"},
    )

    assert [each.status for each in findings(case)] == ["pass"] * 3


@pytest.mark.parametrize(
    ("state", "status", "text"),
    [
        (StateDir(writable=True, read_only=False, free=64 << 20), "pass", "can be written to"),
        (
            StateDir(writable=True, read_only=False, free=1 << 20),
            "fail",
            "1 MiB free for /srv/v/c, 64 MiB needed",
        ),
        (
            StateDir(writable=False, read_only=True, free=1 << 40),
            "fail",
            "/srv/v/c is on a read-only file system",
        ),
        (
            StateDir(writable=False, read_only=False, free=1 << 40),
            "fail",
            "/srv/v/c cannot be written to by `ops`",
        ),
        (None, "skip", "could not be looked at"),
    ],
)
def test_the_state_directory_must_take_what_is_written(
    state: StateDir | None, status: str, text: str, load: Load, good: Good
) -> None:
    """Room, right and file system; the fix is another place."""
    found = first("state-dir", load, good(state=state), "state_dir: /srv/v")

    assert (found.status, text in found.text) == (status, True), found
    assert ("`state_dir:`" in found.fix) is (status == "fail")
