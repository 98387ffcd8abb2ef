"""Checks of Ray while a cluster starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.core.check import Finding
from launcher.core.domain import Answer, Inventory
from launcher.core.errors import UnreadableAnswer
from launcher.core.sizes import format_count
from launcher.tools.site import ray_judges
from tests.hosts.checks import conftest

load = conftest.load

Load = Callable[..., Inventory]
LOGS = Path(__file__).parents[2] / "fixtures" / "ray"


def state(
    node: str, *, status: str = "running", restarts: int = 0, code: int = 0, error: str = ""
) -> Answer:
    """Answer `docker inspect` of a node's container."""
    item = {
        "Id": "1",
        "Name": "/n",
        "RestartCount": restarts,
        "Config": {},
        "State": {"Status": status, "ExitCode": code, "Error": error},
    }
    return Answer(node=node, code=0, out=json.dumps([item]))


def row(
    ip: str, gpus: float = 2.0, *, alive: bool = True, message: str | None = None
) -> dict[str, Any]:
    state = "ALIVE" if alive else "DEAD"
    return {
        "node_id": ip,
        "node_ip": ip,
        "state": state,
        "state_message": message,
        "resources_total": {"GPU": gpus},
    }


def table(
    *rows: dict[str, Any], unreachable: tuple[str, ...] = (), status: str | None = None
) -> Answer:
    payload = {"nodes": list(rows), "unreachable": list(unreachable)}
    if status is not None:
        payload["status"] = status
    return Answer(node="gpu01", code=0, out=json.dumps(payload))


BOTH = (row("10.0.0.11"), row("10.0.0.12"))


def cluster(
    load: Load,
    reply: Answer,
    *,
    head: Answer | None = None,
    worker: Answer | None = None,
    restarts: int = 0,
) -> dict[str, Finding]:
    """Check a cluster of two nodes, with the worker's initial restart count, and return the
    findings by node.
    """
    answers = {"gpu01": [head or state("gpu01"), reply], "gpu02": [worker or state("gpu02")]}
    findings = ray_judges.judge_cluster(load(), {"gpu02": restarts})(answers)
    return {finding.node: finding for finding in findings if "`ray status`" not in finding.text}


def test_a_worker_that_restarts_because_its_head_did(load: Load) -> None:
    """It is awaited until its membership is certain, whatever its restart count."""
    nobody = Answer(node="gpu01", code=1, err="the dashboard does not answer")
    findings = cluster(load, nobody, worker=state("gpu02", status="restarting", restarts=7, code=1))

    assert (findings["gpu02"].status, findings["gpu02"].text) == (
        "wait",
        "its container is restarting",
    )


@pytest.mark.parametrize(("now", "status"), [(9, "wait"), (10, "wait"), (11, "fail")])
def test_earlier_restarts_do_not_count(load: Load, now: int, status: str) -> None:
    """A worker that was cut off for an hour joins once its cable is plugged in again."""
    findings = cluster(
        load, table(BOTH[0]), worker=state("gpu02", status="restarting", restarts=now), restarts=9
    )

    assert findings["gpu02"].status == status


def test_exactly_the_declared_nodes_with_their_gpus_pass(load: Load) -> None:
    """With their numbers."""
    findings = cluster(load, table(*BOTH))

    assert {node: (finding.status, finding.text) for node, finding in findings.items()} == {
        "gpu01": ("pass", "in Ray under its address with 2 GPUs"),
        "gpu02": ("pass", "in Ray under its address with 2 GPUs"),
    }


def test_a_missing_node_is_awaited(load: Load) -> None:
    """The fix is about the network between the two."""
    findings = cluster(load, table(BOTH[0]))["gpu02"]

    assert (findings.status, findings.text) == ("wait", "has not joined Ray under 10.0.0.12")
    assert "allow TCP from 10.0.0.12 to 10.0.0.11:6379" in findings.fix
    assert "vlaunch logs gpu02" in findings.fix


def test_a_node_lost_by_ray_is_awaited_with_rays_reason(load: Load) -> None:
    """It may come back."""
    dead = row("10.0.0.12", alive=False, message="missing too many heartbeats")
    findings = cluster(load, table(BOTH[0], dead))["gpu02"]

    assert (findings.status, findings.text) == (
        "wait",
        "has not joined Ray under 10.0.0.12: missing too many heartbeats",
    )


def test_a_node_under_another_address_is_foreign(load: Load) -> None:
    """And the declared one is missing: vLLM addresses nodes by the declared address, so the right
    count is not enough.
    """
    findings = cluster(load, table(BOTH[0], row("172.17.0.1")))

    assert findings["gpu02"].status == "wait"
    assert (findings[""].status, findings[""].text) == (
        "fail",
        "Ray has nodes that are not in the inventory: 172.17.0.1",
    )


@pytest.mark.parametrize("brought", [1, 3])
def test_another_number_of_gpus_fails_at_once(brought: int, load: Load) -> None:
    """Waiting would not help."""
    findings = cluster(load, table(BOTH[0], row("10.0.0.12", brought)))["gpu02"]

    assert (findings.status, findings.text) == (
        "fail",
        f"has {format_count(brought, 'GPU')} in Ray, but 2 in the inventory",
    )
    assert "correct `gpus:` of gpu02" in findings.fix


def test_a_node_reachable_in_one_direction_only_is_reported(load: Load) -> None:
    """It joined, but the head cannot connect to it: Ray would drop it half a minute later."""
    findings = cluster(load, table(*BOTH, unreachable=("10.0.0.12:6380",)))["gpu02"]

    assert (findings.status, findings.text) == (
        "wait",
        "joined, but the head cannot connect to 10.0.0.12:6380",
    )
    assert "allow TCP from 10.0.0.11 to 10.0.0.12" in findings.fix


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (state("gpu02", status="restarting", restarts=1), "wait", "its container is restarting"),
        (
            state("gpu02", status="restarting", restarts=3, code=1),
            "fail",
            "its container exited with code 1 (3 restarts)",
        ),
        (
            state("gpu02", status="exited", code=137),
            "fail",
            "its container exited with code 137 (0 restarts)",
        ),
        (Answer(node="gpu02", code=1, err="No such container"), "fail", "its container is gone"),
        (Answer(node="gpu02", code=0, out="[]"), "fail", "its container is gone"),
        (Answer(node="gpu02", code=255, err="lost"), "fail", "no longer responds"),
        (Answer(node="gpu02", code=124, timed_out=True), "fail", "no longer responds"),
    ],
)
def test_the_state_of_the_container_comes_first(
    answer: Answer, status: str, text: str, load: Load
) -> None:
    """An exited container explains a node missing in Ray."""
    findings = cluster(load, table(BOTH[0]), worker=answer)

    assert {node: (finding.status, finding.text) for node, finding in findings.items()} == {
        "gpu02": (status, text)
    }


@pytest.mark.parametrize("out", ["not JSON", "{}", "{oops", '"text"', "[]"])
def test_an_unreadable_inspect_is_no_container(out: str, load: Load) -> None:
    """One finding, no exception."""
    assert (
        cluster(load, table(*BOTH), worker=Answer(node="gpu02", code=0, out=out))["gpu02"].status
        == "fail"
    )


@pytest.mark.parametrize(
    "reply",
    [
        Answer(node="gpu01", code=1, out='{"error": "Connection refused"}'),
        Answer(node="gpu01", code=1, err="container is restarting"),
        Answer(node="gpu01", code=0, out=""),
        Answer(node="gpu01", code=0, out="{}"),
        Answer(node="gpu01", code=0, out='{"nodes": null}'),
        Answer(node="gpu01", code=124, timed_out=True),
    ],
)
def test_an_unresponsive_dashboard_is_awaited(reply: Answer, load: Load) -> None:
    """It starts some seconds after Ray's port."""
    findings = cluster(load, reply)

    assert {node: (finding.status, finding.text) for node, finding in findings.items()} == {
        "gpu01": ("wait", "Ray's dashboard does not answer yet")
    }


@pytest.mark.parametrize(
    ("container", "port", "status", "text"),
    [
        (state("gpu01"), 0, "pass", "Ray listens on 10.0.0.11:6379"),
        (state("gpu01"), 1, "wait", "Ray does not listen on 10.0.0.11:6379 yet"),
        (
            state("gpu01", status="exited", code=1),
            1,
            "fail",
            "its container exited with code 1 (0 restarts)",
        ),
    ],
)
def test_the_head_is_judged_by_its_port(
    container: Answer, port: int, status: str, text: str, load: Load
) -> None:
    """An exited container will not listen."""
    (findings,) = ray_judges.judge_head(load())(
        {"gpu01": [container, Answer(node="gpu01", code=port)]}
    )

    assert (findings.node, findings.status, findings.text) == ("gpu01", status, text)


@pytest.mark.parametrize(
    ("active", "gpus", "status"),
    [
        (2, "0.0/4.0 GPU", "pass"),
        (1, "0.0/2.0 GPU", "wait"),
        (2, "0.0/2.0 GPU", "wait"),
        (2, "", "wait"),
    ],
)
def test_ray_status_must_count_the_same(active: int, gpus: str, status: str, load: Load) -> None:
    """It lags behind the node table by some seconds."""
    text = "Active:\n" + " 1 node_x\n" * active + f"\nTotal Usage:\n {gpus}\n"
    findings = judge_status(load, text)

    assert (findings.node, findings.status) == ("gpu01", status)


@pytest.mark.parametrize(
    ("text", "status"), [("Usage: none", "wait"), ("", "skip"), (None, "skip")]
)
def test_an_unreadable_ray_status_does_not_pass(text: str | None, status: str, load: Load) -> None:
    """It is awaited; a missing one is reported."""
    assert judge_status(load, text).status == status


def judge_status(load: Load, text: str | None) -> Finding:
    """Check `ray status` of a healthy cluster."""
    answers = {"gpu01": [state("gpu01"), table(*BOTH, status=text)], "gpu02": [state("gpu02")]}
    return ray_judges.judge_cluster(load(), {})(answers)[-1]


def test_a_symptom_in_the_log_explains_a_failure() -> None:
    """The cause is added to the text, the line is the evidence, and the fix is the cause's."""
    waits = [
        Finding(node="gpu02", status="wait", text="has not joined", fix="look"),
        Finding(node="gpu01", status="pass", text="in"),
    ]
    log = (LOGS / "ray_start_worker_fail_invalid_auth_token.log").read_text()
    findings, other = ray_judges.explain_logs(
        waits, {"gpu02": Answer(node="gpu02", code=0, out=log)}
    )

    cause = "this node's Ray token differs from the head's, or is missing"
    assert findings.text == f"has not joined: {cause}"
    assert "InvalidAuthToken" in findings.evidence
    assert "vlaunch down" in findings.fix
    assert other == waits[1]


def test_an_unknown_log_is_shown_by_its_end() -> None:
    """With the finding's own fix."""
    (findings,) = ray_judges.explain_logs(
        [Finding(node="a", status="fail", text="ended", fix="look")],
        {"a": Answer(node="a", code=0, out="1\n2\n3\n4\n5\n6\n")},
    )

    assert (findings.text, findings.evidence, findings.fix) == ("ended", "2\n3\n4\n5\n6", "look")


def test_a_container_removed_between_two_queries() -> None:
    """`docker rm -f` kills before it removes: the exit code is 137, and the log is gone."""
    state = Finding(
        node="a",
        status="fail",
        text="its container exited with code 137 (0 restarts)",
        fix="look",
    )
    output = "Error response from daemon: No such container: vlaunch-lab-node1"
    # both streams come as one
    (findings,) = ray_judges.explain_logs([state], {"a": Answer(node="a", code=1, out=output)})
    # a log of another failure
    (other,) = ray_judges.explain_logs([state], {"a": Answer(node="a", code=0, out=output)})

    assert (findings.text, findings.evidence, findings.fix) == (
        "its container is gone",
        output,
        "run `vlaunch up` again",
    )
    assert other.text.startswith(state.text)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(node="a", code=0, out=""), "a: the head container did not respond"),
        (Answer(node="a", code=0, out="[1]"), "a: the head container did not respond"),
        *(
            (Answer(node="a", code=22, out=output), "a: its agent runs another version of vlaunch")
            for output in ("404: Not Found", "405: Method Not Allowed")
        ),
        (Answer(node="a", code=1, out='{"error": "refused"}'), "a: refused"),
    ],
)
def test_an_invalid_answer_of_the_payload_is_unreadable(answer: Answer, message: str) -> None:
    """With the node's name."""
    with pytest.raises(UnreadableAnswer) as caught:
        ray_judges.parse_payload(answer)

    assert caught.value.message == message


def test_the_last_line_of_the_payload_is_its_answer() -> None:
    """Interpreters print warnings before it."""
    assert ray_judges.parse_payload(Answer(node="a", code=0, out='warning\n{"status": 200}\n')) == {
        "status": 200
    }
