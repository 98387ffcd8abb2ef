"""Plans of new servers: the written spec, attaching, and rejections."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.desired import Policy, parse_spec
from launcher.app.script import render_script
from launcher.core.errors import RequestError
from launcher.tools.host import HostFacts
from launcher.tools.model import query_scans
from launcher.tools.shipped.node_files import plan_files
from launcher.tools.site import Site
from launcher.tools.site.snapshot import ClusterSnapshot
from tests.golden import check
from tests.served import (
    BARE,
    INVENTORY,
    judge_gate,
    make_snapshot,
    make_spec,
    option,
    plan_start,
    request,
    server_row,
    uneven,
)

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_the_script(backend: str) -> None:
    """All commands: one file on the head's own disk, for any backend."""
    start = plan_start(make_snapshot(), request(backend, args=("--chat-template", "it's")))

    check(GOLDEN / f"serve-{backend}.sh", render_script(INVENTORY, [start.plan]))


def test_the_script_writes_the_same_spec(tmp_path: Path) -> None:
    """Except for its time; atomically, as the SSH user."""
    start = plan_start(make_snapshot(), request(args=("--chat-template", "it's $HOME")))
    (step,) = start.plan.steps
    assert step.command.stdin is not None
    argv = [str(tmp_path / "default") if "/server/" in arg else arg for arg in step.command.argv]
    subprocess.run(argv, input=step.command.stdin(), check=True, timeout=10)
    shown = subprocess.run(
        ["bash", "-c", step.command.shown_stdin], check=True, timeout=10, capture_output=True
    ).stdout

    assert [path.name for path in (tmp_path / "default").iterdir()] == ["desired.json"]
    assert parse_spec(json.loads((tmp_path / "default" / "desired.json").read_text())) == start.spec
    assert replace(parse_spec(json.loads(shown)), asked=7.0) == start.spec
    assert parse_spec(json.loads(shown)).asked > 1e9
    assert (step.command.node, step.command.argv[-2:]) == (
        "n1",
        ("/root/.vlaunch/c/server/default", "desired.json"),
    )


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_replicas_are_reported(backend: str) -> None:
    """The notes name their nodes and endpoints."""
    notes = plan_start(make_snapshot(), request(backend, tp=None, pp=None, dp=4)).plan.notes

    assert notes[0].startswith("DP 4 × TP 4 × PP 1 (each replica gets 4 of 16 GPUs as TP)")
    assert notes[1].startswith("4 replicas (2 on n1, 2 on n2) behind one endpoint")


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_the_same_request_attaches(backend: str) -> None:
    """To a running server in any state, without sending commands."""
    for state in ("waiting", "ready", "pausing"):
        start = plan_start(
            make_snapshot(server_row(request(backend), state)), request(backend), requested_at=8.0
        )

        assert (start.attached, start.plan.steps, start.spec.asked) == (True, (), 7.0)


FIGURES = "restarts unlimited instead of 7, canary 5 instead of 2.5, stuck 360 instead of 60"


@pytest.mark.parametrize(
    ("runs", "policy", "message"),
    [
        (Policy(), Policy(start_timeout=60), ""),
        (Policy(restarts=0), Policy(restarts=0), ""),
        (
            Policy(restarts=0),
            Policy(),
            "supervision is off: it will not restart after a failure",
        ),
        (Policy(), Policy(restarts=0), "it is supervised"),
        (Policy(), Policy(restarts=7, canary=2.5, stuck=60), f"it was started with {FIGURES}"),
    ],
)
def test_the_same_server_with_another_policy(runs: Policy, policy: Policy, message: str) -> None:
    """It attaches with a note on the difference; `--replace` restarts it if any."""
    snapshot = make_snapshot(server_row(make_spec(request(), policy=runs)))
    start = plan_start(snapshot, request(), policy=policy)
    anew = plan_start(snapshot, request(), policy=policy, replace_other=True)

    assert start.attached
    assert start.plan.notes == (
        (f"{message}; `--replace` restarts it with the new settings",) if message else ()
    )
    assert anew.attached is not bool(message)
    assert [stage.id for stage in anew.plan.stages] == (["preflight", "server"] if message else [])


def test_a_server_of_another_version_is_not_overwritten() -> None:
    """It may be running."""
    snapshot = make_snapshot({"name": "default", "desired": {"version": 99}})

    with pytest.raises(RequestError, match="server `default` may be running: its files are"):
        plan_start(snapshot, request())
    assert not plan_start(snapshot, request(), replace_other=True).attached


def test_a_flag_that_the_running_server_contradicts() -> None:
    """`--no-supervise` is not ignored silently; an unsupervised server is no contradiction."""
    bare = Policy(restarts=0)
    with pytest.raises(
        RequestError, match=r"org/m is already running \(server `default`\), and it is supervised"
    ) as refused:
        plan_start(
            make_snapshot(server_row(request())), request(), policy=bare, require_unsupervised=True
        )

    assert "`--replace`" in refused.value.hint
    assert plan_start(
        make_snapshot(server_row(make_spec(request(), policy=bare))),
        request(),
        policy=bare,
        require_unsupervised=True,
    ).attached


@pytest.mark.parametrize(
    "change",
    [
        {"model": "org/other"},
        {"port": 8001},
        {"args": ("--seed", "1")},
        {"tp": 4, "pp": 4},
        {"backend": "mp"},
    ],
)
def test_another_server_is_not_replaced_by_default(change: dict[str, Any]) -> None:
    """Any difference makes another server, which is rejected under the same name."""
    snapshot, candidate = make_snapshot(server_row(request())), request(**change)
    with pytest.raises(RequestError, match="server `default` is already running org/m") as refused:
        plan_start(snapshot, candidate)
    start = plan_start(snapshot, candidate, replace_other=True)

    assert "`--name NAME`" in refused.value.hint
    assert "`--replace`" in refused.value.hint
    assert [stage.id for stage in start.plan.stages] == ["preflight", "server"]
    assert (
        start.plan.notes[0]
        == "server `default` (org/m) will be stopped once all checks have passed"
    )


@pytest.mark.parametrize("state", ["failed", "gave-up"])
def test_a_dead_server_is_replaced(state: str) -> None:
    """Without `--replace`."""
    start = plan_start(make_snapshot(server_row(request(model="org/other"), state)), request())

    assert (start.attached, len(start.plan.steps)) == (False, 1)


def test_a_stopping_server_is_not_attached_to() -> None:
    """It has no spec; the supervisor stops it before it starts the next one."""
    stopping = {**server_row(request(), "stopping"), "desired": None}

    assert not plan_start(make_snapshot(stopping), request()).attached


def test_a_second_server_uses_free_resources() -> None:
    """GPUs, ports, and rendezvous ports."""
    first = make_spec(request("mp", tp=4, pp=2, gpus=4), BARE)
    second = plan_start(
        make_snapshot(server_row(first)),
        request("mp", name="embed", tp=4, pp=2, gpus=4, port=8001),
        BARE,
    )

    assert [process.gpus for process in first.processes] == [(0, 1, 2, 3)] * 2
    assert [process.gpus for process in second.spec.processes] == [(4, 5, 6, 7)] * 2
    assert [option(start.processes[0].argv, "--master-port") for start in (first, second.spec)] == [
        "29501",
        "29502",
    ]
    assert judge_gate(second, "room") == []


def test_the_note_and_the_model_gate_of_mp_name_the_nodes_with_ranks() -> None:
    """A node in between that is too small is omitted."""
    inventory = uneven(2, 1, 2)
    start = plan_start(
        ClusterSnapshot(site=Site(inventory)),
        request("mp", tp=2, pp=2, inventory=inventory),
        inventory,
    )

    assert any("ranks expected 2 on n1, 2 on n3" in note for note in start.plan.notes)
    assert [process.node for process in start.spec.processes] == ["n1", "n3"]


def test_the_model_is_queried_in_the_running_containers() -> None:
    """They have the mounts; without one, there is no query."""
    snapshot = make_snapshot()
    stopped = {**snapshot.site.facts, "n2": HostFacts(images=snapshot.site.facts["n2"].images)}

    assert [command.argv[:3] for command in query_scans(Site(INVENTORY, stopped), "/m")] == [
        ("docker", "exec", "vlaunch-c-n1")
    ]


def test_node_programs_of_running_containers_are_updated() -> None:
    """A newer vlaunch sends queries that an older program does not know."""
    assert len(plan_files(make_snapshot().site).steps) == 2
    assert plan_files(Site(INVENTORY)).steps == ()
