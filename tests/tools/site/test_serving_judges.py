"""Room for servers and batch jobs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.core.check import Finding, worst_status
from launcher.core.domain import Accelerator, Inventory, Node
from launcher.tools.host import HostFacts
from launcher.tools.model import ModelScan
from launcher.tools.site import Site, serving_judges
from launcher.tools.site.serving_judges import GpuUser
from tests.containers import container
from tests.ray_rows import group, rank, ray_nodes, table

NODES = (
    Node(name="n1", host="n1", ip="10.77.0.11", gpus=1, head=True),
    Node(name="n2", host="n2", ip="10.77.0.12", gpus=1),
)
INVENTORY = Inventory(path=Path("inventory.yaml"), cluster="c", image="i", nodes=NODES)
CHAT = GpuUser(label="server `chat`", gpus=1, stop_command="vlaunch stop chat")
HEAD = Node(name="n1", host="n1", ip="10.0.0.1", gpus=4, head=True)
SERVER = GpuUser(label="the server of m", gpus=3, stop_command="vlaunch stop")
JOB = GpuUser(label="batch job `b`", gpus=0, stop_command="vlaunch stop b")
NAMES = {"n1": "vlaunch-c-n1", "n2": "vlaunch-c-n2"}
COMPLETE = ModelScan(where="there", digest="a")
NOT_CACHED = ModelScan(where="not cached")
LACKS = ModelScan(where="lacks", missing_file="b.safetensors")


@pytest.mark.parametrize(
    ("payload", "busy"),
    [
        ({}, 0),
        ({"groups": table()}, 0),
        ({"groups": table(group(), group(state="REMOVED"), group(state="PENDING"))}, 2),
        ({"actors": table(rank("10.77.0.11", required_resources={"GPU": 1.0}))}, 1),
        (
            {
                "actors": table(
                    rank("10.77.0.11", required_resources={"GPU": 1.0}, placement_group_id="g")
                )
            },
            0,
        ),
        ({"actors": table(rank("10.77.0.11", required_resources=None))}, 0),
    ],
)
def test_busy_gpus(payload: dict[str, Any], busy: float) -> None:
    """Placement groups count once, and so do actors outside of them."""
    assert busy == serving_judges.busy_gpus(payload)


def test_busy_gpus_of_a_recorded_cluster() -> None:
    """One group of two bundles is active; two others have been removed."""
    rows = json.loads(
        (Path(__file__).parents[2] / "fixtures" / "vllm" / "placement_groups_pp2.json").read_text()
    )

    assert serving_judges.busy_gpus({"groups": table(*rows)}) == 2


def test_free_gpus() -> None:
    """Too few free GPUs are rejected with both numbers."""
    (enough,) = serving_judges.judge_free_gpus(INVENTORY, 2, "TP 1 × PP 2", {}, [])
    (short,) = serving_judges.judge_free_gpus(
        INVENTORY, 2, "TP 1 × PP 2", {"groups": table(group(gpus=1))}, []
    )

    assert enough.status == "pass"
    assert (short.status, short.text) == (
        "fail",
        "1 of 2 GPUs are free in Ray, TP 1 × PP 2 needs 2",
    )


def test_a_server_waits_for_a_job_that_has_just_started() -> None:
    """The job uses no GPUs yet."""
    of_four = replace(INVENTORY, nodes=(replace(NODES[0], gpus=4),))
    payload = {
        "jobs": [
            {
                "submission_id": "b-1",
                "status": "RUNNING",
                "metadata": {"vlaunch.batch": "b", "vlaunch.gpus": "3"},
            }
        ]
    }
    (finding,) = serving_judges.judge_free_gpus(
        of_four, 4, "TP 4 × PP 1", payload, serving_judges.job_gpu_users(payload)
    )

    assert (finding.status, finding.text.partition(",")[0]) == (
        "fail",
        "1 of 4 GPUs are free in Ray",
    )
    assert "`vlaunch stop b`" in finding.fix


@pytest.mark.parametrize(
    ("holders", "in_ray", "text"),
    [
        ([], 0, ""),
        ([CHAT], 1, ""),  # its GPUs are those reserved in Ray
        (
            [CHAT],
            2,
            "2 of 4 GPUs are free, the server needs 3: server `chat` uses 1, work in Ray uses 1",
        ),
        (
            [CHAT, CHAT],
            0,
            (
                "2 of 4 GPUs are free, the server needs 3: server `chat` uses 1, server `chat`"
                " uses 1"
            ),
        ),
        ([], 3, "1 of 4 GPUs are free, the server needs 3: work in Ray uses 3"),
    ],
)
def test_the_gpus_of_a_node(holders: list[GpuUser], in_ray: float, text: str) -> None:
    """Users of GPUs are named, with the command that stops or lists them."""
    finding = serving_judges.judge_node_gpus(replace(NODES[0], gpus=4), 3, holders, in_ray)

    assert (finding.status, finding.text) == ("fail" if text else "pass", text)
    assert ("vlaunch stop chat" in finding.fix or "ray list" in finding.fix) is bool(text)


def test_gpus_reserved_in_ray_by_node() -> None:
    """By the address of the node, from placement groups and from actors outside of any."""
    bundle = {"unit_resources": {"GPU": 1.0}, "node_id": "id-10.77.0.12"}
    payload = {
        "nodes": ray_nodes("10.77.0.11", "10.77.0.12"),
        "groups": table(
            {"state": "CREATED", "bundles": [bundle, bundle]},
            {"state": "REMOVED", "bundles": [bundle]},
        ),
        "actors": table(rank("10.77.0.11", required_resources={"GPU": 1.0})),
    }

    assert serving_judges.busy_gpus_by_node(payload) == {"10.77.0.11": 1, "10.77.0.12": 2}
    assert serving_judges.busy_gpus_by_node({}) == {}


def inventory(accelerator: Accelerator = "nvidia") -> Inventory:
    return Inventory(
        path=Path("inventory.yaml"), cluster="c", image="i", nodes=(HEAD,), accelerator=accelerator
    )


@pytest.mark.parametrize(
    ("payload", "users", "status", "text"),
    [
        ({}, [], "pass", "4 of 4 GPUs are free in Ray"),
        (
            {"groups": table(group(2))},
            [],
            "pass",
            "2 of 4 GPUs are free in Ray; the job can use 4",
        ),
        ({"groups": table(group(3))}, [], "fail", "1 of 4 GPUs are free in Ray, the job needs 2"),
        ({"groups": table(group(3, "REMOVED"))}, [], "pass", "4 of 4 GPUs are free in Ray"),
        # It has been submitted, and uses no GPUs yet.
        (
            {},
            [SERVER],
            "fail",
            "1 of 4 GPUs are free in Ray, the job needs 2: the server of m uses 3",
        ),
        # Its used and its claimed GPUs are the same.
        (
            {"groups": table(group(3))},
            [SERVER, JOB],
            "fail",
            "the server of m uses 3, batch job `b`",
        ),
    ],
)
def test_room(payload: dict[str, Any], users: list[GpuUser], status: str, text: str) -> None:
    """GPUs reserved in Ray are busy, and so are those promised to a starting server or job."""
    (finding,) = serving_judges.judge_job_room(inventory(), 2, 4, payload, users, queue=False)

    assert finding.status == status
    assert text in finding.text


def test_gpu_users_are_listed_with_stop_commands() -> None:
    """Or, if unknown, with the command that lists them."""
    (named,) = serving_judges.judge_job_room(inventory(), 2, 4, {}, [SERVER, JOB], queue=False)
    (unknown,) = serving_judges.judge_job_room(
        inventory("cpu"), 2, 4, {"groups": table(group(4))}, [], queue=False
    )

    assert "`vlaunch stop`, `vlaunch stop b`" in named.fix
    assert "ray list placement-groups" in unknown.fix
    assert unknown.text.startswith("0 of 4 slots")
    assert all("`--queue`" in finding.fix for finding in (named, unknown))


def test_a_job_that_may_wait_passes() -> None:
    """With a warning that explains the wait."""
    (finding,) = serving_judges.judge_job_room(inventory(), 2, 4, {}, [SERVER], queue=True)

    assert finding.status == "warn"
    assert finding.text.endswith("the job waits until they are free")


@pytest.mark.parametrize(
    ("free", "status"), [(None, "skip"), (264 * 10**6, "fail"), (268 * 10**6, "pass")]
)
def test_disk(free: int | None, status: str) -> None:
    """Space for input, as much output, and a reserve."""
    (finding,) = serving_judges.judge_job_disk(HEAD, 100 * 10**6, HostFacts(disk_free=free))

    assert finding.status == status


@pytest.mark.parametrize(("amount", "gpus"), [("2", 2.0), ("0.5", 0.5), ("many", 0.0), ("-1", 0.0)])
def test_claims(amount: str, gpus: float) -> None:
    """Metadata is text from any user."""
    assert serving_judges.claimed_gpus({"metadata": {"vlaunch.gpus": amount}}) == gpus


def site(**status: str) -> Site:
    containers = {
        name: HostFacts(
            containers=(container(NAMES[name], status=status[name]),) if name in status else (),
            listening=frozenset(),
        )
        for name in NAMES
    }
    return Site(INVENTORY, containers)


def texts(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(finding.node, finding.status, finding.text) for finding in findings]


def test_a_healthy_cluster() -> None:
    """Every container runs and every address is in Ray."""
    payload = {"nodes": ray_nodes("10.77.0.11", "10.77.0.12")}

    assert (
        worst_status(serving_judges.judge_members(site(n1="running", n2="running"), payload))
        == "pass"
    )


def test_a_slow_ray_is_not_started_again() -> None:
    """Engines may use every core of a small head."""
    (slow,) = serving_judges.judge_members(
        site(n1="running", n2="running"), {"error": "n1: timed out"}
    )
    (gone,) = serving_judges.judge_members(
        site(n1="running", n2="running"), {"error": "connection refused"}
    )

    assert "run the same command again" in slow.fix
    assert "vlaunch up" in gone.fix


@pytest.mark.parametrize(
    ("status", "payload", "expected"),
    [
        ({"n1": "running"}, {}, ("n2", "fail", "has no container of this cluster")),
        (
            {"n1": "running", "n2": "exited"},
            {},
            ("n2", "fail", "its container is not running (exited)"),
        ),
        (
            {"n1": "running", "n2": "running"},
            {"error": "refused"},
            ("n1", "fail", "Ray does not answer: refused"),
        ),
        (
            {"n1": "running", "n2": "running"},
            {"nodes": ray_nodes("10.77.0.11", "10.77.0.12", dead="10.77.0.12")},
            ("n2", "fail", "is not in Ray"),
        ),
    ],
)
def test_an_unhealthy_cluster(
    status: dict[str, str], payload: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    """The findings name the node and the problem, and the fix is `vlaunch up`."""
    bad = [
        finding
        for finding in serving_judges.judge_members(site(**status), payload)
        if finding.status != "pass"
    ]

    assert texts(bad) == [expected]
    assert "vlaunch up" in bad[0].fix


@pytest.mark.parametrize(
    ("scans", "offline", "expected"),
    [
        ({"n1": COMPLETE, "n2": COMPLETE}, False, ["pass", "pass"]),
        ({"n1": COMPLETE, "n2": ModelScan(where="missing")}, False, ["pass", "fail"]),
        ({"n1": COMPLETE, "n2": ModelScan(where="there", digest="b")}, False, ["fail", "fail"]),
        # a GGUF file has no config.json
        ({"n1": COMPLETE, "n2": ModelScan(where="there")}, False, ["pass", "pass"]),
        ({"n1": NOT_CACHED, "n2": NOT_CACHED}, False, ["pass", "pass"]),
        ({"n1": COMPLETE, "n2": NOT_CACHED}, False, ["pass", "warn"]),
        ({"n1": COMPLETE, "n2": NOT_CACHED}, True, ["pass", "fail"]),
        ({"n1": COMPLETE, "n2": ModelScan(where="begun")}, False, ["pass", "fail"]),
        ({"n1": COMPLETE, "n2": LACKS}, False, ["pass", "warn"]),
        ({"n1": LACKS, "n2": LACKS}, False, ["warn", "warn"]),
        ({"n1": COMPLETE, "n2": LACKS}, True, ["pass", "fail"]),
        ({"n1": COMPLETE}, False, ["pass", "skip"]),
        ({"n1": COMPLETE, "n2": ModelScan(where="unknown")}, False, ["pass", "skip"]),
    ],
)
def test_model(scans: dict[str, ModelScan], offline: bool, expected: list[str]) -> None:
    """Incomplete copies, different models and forbidden downloads fail; unknown is skipped."""
    assert expected == [
        finding.status
        for finding in serving_judges.judge_model(
            NODES, "org/m", scans, dict.fromkeys(NAMES, offline)
        )
    ]


@pytest.mark.parametrize(
    ("model", "complete", "fix"),
    [
        ("org/m", True, "copy it from n1: `vlaunch model copy org/m`, or add `--fetch`"),
        ("org/m", False, "download it once for all nodes: `vlaunch model pull org/m`, or add"),
        ("/hf/m", True, "copy it from n1: `vlaunch model copy /hf/m`"),
        ("/hf/m", False, "`vlaunch model copy ./FOLDER --as /hf/m`"),
    ],
)
def test_the_command_that_finishes_a_model(model: str, complete: bool, fix: str) -> None:
    """A copy from a node with it, else a download, else a copy from this machine."""
    unfinished = ModelScan(where="begun")
    scans = {"n1": COMPLETE if complete else unfinished, "n2": unfinished}
    findings = serving_judges.judge_model(NODES, model, scans, dict.fromkeys(NAMES, False))

    assert findings[1].status == "fail"
    assert fix in findings[1].fix


@pytest.mark.parametrize(
    ("listening", "status"),
    [
        (frozenset({("0.0.0.0", 8000)}), "fail"),
        (frozenset({("0.0.0.0", 80)}), "pass"),
        (None, "skip"),
    ],
)
def test_port(listening: frozenset[tuple[str, int]] | None, status: str) -> None:
    """A listener on any address occupies the port; without `ss` it is unknown."""
    finding = serving_judges.judge_port(NODES[0], 8000, "vLLM API", HostFacts(listening=listening))

    assert status == finding.status


@pytest.mark.parametrize(
    ("age", "text"),
    [
        (59.0, ""),
        (61.0, "its agent last reported 61s ago"),
        (None, "its agent never reported"),
        (math.inf, "its agent never reported"),
    ],
)
def test_agents(age: float | None, text: str) -> None:
    """No server can start without a connected one."""
    facts = {"n1": HostFacts(containers=(container(NAMES["n1"]),))}
    at = {} if age is None else {"n1": age}
    (finding,) = serving_judges.judge_agents(Site(INVENTORY, facts), NODES[:1], at)

    assert (finding.status, finding.text.partition(", so")[0]) == ("fail" if text else "pass", text)
    assert bool(finding.fix) is bool(text)


def test_unfinished_batch_jobs() -> None:
    """Other Ray jobs have no batch name, and finished ones use no GPUs."""
    jobs = [
        {"submission_id": f"{status}-{name or 'other'}", "status": status, "metadata": metadata}
        for status in ("RUNNING", "PENDING", "SUCCEEDED")
        for name, metadata in (("a", {"vlaunch.batch": "a"}), ("", {}), ("", None))
    ]

    assert serving_judges.active_batches({"jobs": jobs}) == [
        serving_judges.Batch(name="a", id="RUNNING-a"),
        serving_judges.Batch(name="a", id="PENDING-a"),
    ]
    assert serving_judges.active_batches({}) == []
