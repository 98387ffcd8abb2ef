"""Plans that stop servers: commands, and the conditions of their completion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from launcher.core.check import Finding
from launcher.core.domain import Answer
from launcher.core.plan import Gate
from launcher.serving.stop_plan import judge_stopped, plan_forget, plan_stop
from launcher.tools.host import HostFacts
from launcher.tools.site import Site, servers
from launcher.tools.site.servers import Server
from tests.ray_rows import group, table
from tests.served import INVENTORY, container, make_snapshot, make_spec, request, server_row

FOLDER = "/root/.vlaunch/c/server"


def stopped(*rows: Mapping[str, Any], grace: float = 15) -> Gate:
    """Return the gate of a plan that stops some servers."""
    listed = servers.parse_servers({"servers": list(rows)}).servers
    (stage,) = plan_stop(make_snapshot().site, listed, grace).stages
    (gate,) = stage.gates
    return gate


def judged(
    gate: Gate,
    current: Mapping[str, Any] | None,
    *ports: int,
    ray: Mapping[str, Any] | None = None,
) -> Finding:
    """Judge the head's answers: its servers with Ray's tables, and the exit code of every port
    probe (0: open).
    """
    report = {"error": "timed out"} if current is None else {**current, **(ray or {})}
    answers = [Answer(node="n1", code=1 if current is None else 0, out=json.dumps(report))]
    answers += [Answer(node="n1", code=code) for code in ports]
    (finding,) = gate.judge({"n1": answers})
    return finding


def test_a_server_loses_its_spec() -> None:
    """The file on the head's disk is removed; then supervisor, port and Ray are awaited."""
    listed = servers.parse_servers({"servers": [server_row(request())]}).servers
    (stage,) = plan_stop(make_snapshot().site, listed, 15).stages
    (step,), (gate,) = stage.steps, stage.gates

    assert (step.command.node, step.command.argv) == (
        "n1",
        ("rm", "-f", f"{FOLDER}/default/desired.json"),
    )
    assert {command.node for command in gate.queries} == {"n1"}
    assert gate.deadline == 125
    assert plan_stop(make_snapshot().site, (), 15).stages == ()


def test_a_server_is_gone_when_nothing_remains() -> None:
    """All of its resources are awaited, and named."""
    gate, free = stopped(server_row(request())), {"jobs": [], "groups": table()}
    gone: dict[str, Any] = {"servers": []}
    ending = {
        "servers": [
            {**server_row(request(), "stopping", doing="ending it politely"), "desired": None}
        ]
    }

    assert judged(gate, gone, 1, ray=free).status == "pass"
    assert judged(gate, ending, 1, ray=free).text == "server `default`: ending it politely"
    assert judged(gate, gone, 0, ray=free).text == "port 8000 on n1 is still open"
    assert judged(
        gate, gone, 1, ray={"jobs": [], "groups": table(group(2, ip="10.0.0.2"))}
    ).text.startswith("Ray still reserves 2 GPUs")
    assert judged(gate, gone, 1, ray={"error": "timed out"}).text == "cannot query Ray: timed out"
    assert judged(gate, None, 1, ray=free).status == "wait"


def test_the_port_of_every_endpoint_is_waited_for() -> None:
    """The head probes them at their nodes' addresses."""
    gate = stopped(server_row(request("mp", dp=2, pp=None, args=("-dph",))))
    probes = [
        command for command in gate.queries if "python3" in command.argv and "-c" in command.argv
    ]

    assert [("10.0.0.2" in probe.argv[-1], probe.node) for probe in probes] == [
        (False, "n1"),
        (True, "n1"),
    ]
    free = {"jobs": [], "groups": table()}
    assert judged(gate, {"servers": []}, 1, 0, ray=free).text == "port 8000 on n2 is still open"


def test_resources_of_others_are_not_awaited() -> None:
    """Another server's, and batch jobs'."""
    other = make_spec(request("mp", name="chat", tp=4, pp=1, nodes=("n1",), port=8001))
    current, groups = {"servers": [server_row(other)]}, table(group(4, ip="10.0.0.1"))
    batch = {"submission_id": "b-1", "status": "RUNNING"}

    assert (
        judged(
            stopped(server_row(request())), current, 1, ray={"jobs": [], "groups": groups}
        ).status
        == "pass"
    )
    assert (
        judged(
            stopped(server_row(request())),
            {"servers": []},
            1,
            ray={"jobs": [batch], "groups": groups},
        ).status
        == "pass"
    )


def test_without_the_heads_container_stop_does_not_wait() -> None:
    """The file is removed all the same: the server does not return with the head."""
    facts = {
        **make_snapshot().site.facts,
        "n1": HostFacts(containers=(container("n1", status="exited"),)),
    }
    (stage,) = plan_stop(Site(INVENTORY, facts), [Server(name="default")], 15).stages

    assert (len(stage.steps), stage.gates) == (1, ())


def test_records_of_failed_servers_are_removed() -> None:
    """With their cause; the history stays."""
    (step,) = plan_forget(make_snapshot().site, ["chat"]).steps

    assert step.command.argv == (
        "rm",
        "-f",
        f"{FOLDER}/chat/desired.json",
        f"{FOLDER}/chat/observed.json",
    )
    assert plan_forget(make_snapshot().site, []).stages == ()


@pytest.mark.parametrize(
    ("alive", "ports", "payload", "others", "text"),
    [
        ([], [], None, 0, ""),
        ([], [], {"jobs": []}, 0, ""),
        (["server `a` is stopping"], [], None, 0, "server `a` is stopping"),
        ([], ["port 8000 on n1"], None, 0, "port 8000 on n1 is still open"),
        ([], [], {"jobs": [], "groups": table(group())}, 0, "Ray still reserves 2 GPUs"),
        ([], [], {"jobs": [], "groups": table(group())}, 2, ""),
        (
            [],
            [],
            {"jobs": [{"submission_id": "b-1", "status": "RUNNING"}], "groups": table(group())},
            0,
            "",
        ),
        ([], [], {"error": "refused"}, 0, "cannot query Ray: refused"),
    ],
)
def test_judging_a_stopped_server(
    alive: list[str], ports: list[str], payload: Any, others: float, text: str
) -> None:
    """All of its resources must be free, except those of others; absence is observed, never
    assumed.
    """
    (finding,) = judge_stopped(alive, ports, payload, others)

    assert (finding.status, finding.text if text else "") == ("wait" if text else "pass", text)
