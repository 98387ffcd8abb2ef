"""Prometheus metrics of the head's agent, from files alone."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launcher.agent import metrics, state
from launcher.agent.desired import Desired
from launcher.agent.observed import STATES, VERDICTS, Fault, Load, Observed, Wedge
from tests.agent.specs import mp

NOW = 1_700_000_100.0
WRITTEN = "agent_written_timestamp_seconds"
TWO = mp("gpu1", "gpu2", addresses={"gpu1": "10.0.0.1", "gpu2": "10.0.0.2", "gpu3": "10.0.0.3"})


def make_status(**fields: Any) -> Observed:
    """Return the status of a ready server."""
    created = Observed(
        name="chat",
        id="abcd1234",
        asked=1.0,
        model="org/m",
        state="ready",
        written=NOW - 2,
        ready_at=NOW - 50,
        generation=3,
        first_start=30.5,
        answered=NOW - 3,
        seconds=0.08,
        load=Load(running=3, waiting=12, tokens_per_s=310.5),
        task="chat",
        fault_count=2,
        faults=[Fault(at=NOW - 90, what="it died", ready_again_after=41.0)],
        alive={"gpu1": {"PP0": True}, "gpu2": {"PP1": False}},
        verdict="answering",
    )
    return dataclasses.replace(created, **fields)


def write_server(folder: Path, spec: Desired | None = TWO, status: Observed | None = None) -> None:
    """Write a server's files."""
    if spec is not None:
        state.write_json(
            state.server_file("chat", state.DESIRED, str(folder)), spec.as_json(), durable=False
        )
    if status is not None:
        state.write_json(
            state.server_file("chat", state.OBSERVED, str(folder)), status.as_json(), durable=False
        )


def read_samples(folder: Path, age: float = 0.0, **agents: float) -> dict[str, float]:
    """Return the samples by name and labels, parsed by Prometheus' client."""
    text = metrics.render_metrics(NOW, age, agents, str(folder))
    return {
        sample.name.removeprefix("vlaunch_")
        + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_ready_server(tmp_path: Path) -> None:
    """Its state, faults, canary, queue and ranks."""
    write_server(tmp_path, status=make_status())
    result = read_samples(tmp_path)

    assert result["server_info backend=mp model=org/m server=chat task=chat"] == 1
    assert {item: result[f"server_state server=chat state={item}"] for item in STATES} == {
        item: float(item == "ready") for item in STATES
    }
    assert {
        name: result[f"server_{name} server=chat"]
        for name in (
            "engine_starts_total",
            "faults_total",
            "recovery_seconds",
            "canary_seconds",
            "canary_waiting_seconds",
            "canary_timestamp_seconds",
            "requests_running",
            "requests_waiting",
            "tokens_per_second",
        )
    } == {
        "engine_starts_total": 3,
        "faults_total": 2,
        "recovery_seconds": 41,
        "canary_seconds": 0.08,
        "canary_waiting_seconds": 0,
        "canary_timestamp_seconds": NOW - 3,
        "requests_running": 3,
        "requests_waiting": 12,
        "tokens_per_second": 310.5,
    }
    assert result["rank_up node=gpu1 rank=PP0 server=chat"] == 1
    assert result["rank_up node=gpu2 rank=PP1 server=chat"] == 0
    assert result["endpoint_up node=gpu1 port=8000 server=chat"] == 1


def test_a_hanging_server(tmp_path: Path) -> None:
    """Its verdict and its duration, and the rank once it is suspect."""
    wedge = Wedge(since=NOW - 70, rank="TP1", node="gpu2", gpu="3", frame="FRAME (x.py:1)")
    status = make_status(
        verdict="suspect", reason="REASON", still=70.0, longest_step=4.0, wedge=wedge
    )
    write_server(tmp_path, status=status)
    result = read_samples(tmp_path)

    assert {
        verdict: result[f"server_health server=chat verdict={verdict}"] for verdict in VERDICTS
    } == {verdict: float(verdict == "suspect") for verdict in VERDICTS}
    assert result["server_still_seconds server=chat"] == 70
    assert result["server_longest_step_seconds server=chat"] == 4
    assert result["server_wedged gpu=3 node=gpu2 rank=TP1 server=chat"] == 1
    write_server(tmp_path, status=dataclasses.replace(status, wedge=Wedge(since=NOW)))
    assert read_samples(tmp_path)["server_wedged gpu= node= rank=unknown server=chat"] == 1
    write_server(tmp_path, status=dataclasses.replace(status, verdict="quiet"))
    assert not [name for name in read_samples(tmp_path) if "wedged" in name]


def test_unknown_values_are_absent(tmp_path: Path) -> None:
    """Neither 0 nor any other number."""
    write_server(
        tmp_path, status=make_status(state="starting", seconds=None, load=None, alive={}, faults=[])
    )
    result = read_samples(tmp_path)

    assert result["server_state server=chat state=starting"] == 1
    assert result["endpoint_up node=gpu1 port=8000 server=chat"] == 0
    for absent in ("canary_seconds", "canary_waiting", "requests", "rank_up", "recovery", "left"):
        assert not [item for item in result if absent in item]


def test_removed_servers(tmp_path: Path) -> None:
    """Absent once stopped; a failed server with a spec is present."""
    write_server(tmp_path, None, make_status(state="stopping"))
    assert read_samples(tmp_path)["server_state server=chat state=stopping"] == 1
    write_server(tmp_path, None, make_status(state="stopped"))
    assert read_samples(tmp_path).keys() == {WRITTEN}
    write_server(tmp_path, TWO, make_status(state="gave-up"))
    assert read_samples(tmp_path)["server_state server=chat state=gave-up"] == 1


def test_connected_agents(tmp_path: Path) -> None:
    """All nodes of the cluster; none while the head's agent hangs."""
    write_server(tmp_path, status=make_status())
    for age, expected in ((4.0, [1, 1, 0]), (100.0, [0, 0, 0])):
        result = read_samples(tmp_path, age, gpu1=0.0, gpu2=1.5)
        up = {item: value for item, value in result.items() if item.startswith("node_agent_up")}
        assert (result[WRITTEN], list(up.values())) == (NOW - age, expected)


def test_a_full_disk(tmp_path: Path) -> None:
    """The agent continues, and the age of its records grows."""
    for age, late in ((4.0, 0.0), (90.0, 85.0)):
        write_server(tmp_path, status=make_status(written=NOW - age))
        assert read_samples(tmp_path)[WRITTEN] == NOW - late


def test_the_last_network_check(tmp_path: Path) -> None:
    """From the launcher's record, with its time."""
    file = tmp_path / "network.json"
    file.write_text(json.dumps({"passed": True, "required": "tcp", "summary": "2 pairs"}))
    os.utime(file, (NOW, NOW))
    result = read_samples(tmp_path)

    mapping = {"network_passed required=tcp": 1, "network_check_timestamp_seconds": NOW}
    assert result == {**mapping, WRITTEN: NOW}
    file.write_text('{"passed": "yes"}')
    assert read_samples(tmp_path).keys() == {WRITTEN}


@pytest.mark.parametrize("text", ["", "[]", '{"passed": "x"}'])
def test_unreadable_files(tmp_path: Path, text: str) -> None:
    """They count as missing."""
    for file in ("network.json", "chat/observed.json", "chat/desired.json"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)

    assert read_samples(tmp_path).keys() == {WRITTEN}


def test_labels_are_escaped(tmp_path: Path) -> None:
    """For any name of a model."""
    write_server(tmp_path, status=make_status(model='a"b\\c\nd'))

    assert 'server_info backend=mp model=a"b\\c\nd server=chat task=chat' in read_samples(tmp_path)


def test_no_text_of_a_log_is_exported(tmp_path: Path) -> None:
    """It may contain anything."""
    faults = [Fault(at=NOW, what="WHAT", cause="CAUSE", evidence="EVIDENCE", node="gpu2")]
    write_server(tmp_path, status=make_status(faults=faults, doing="DOING", warning="WARNING"))
    text = metrics.render_metrics(NOW, 0.0, {}, str(tmp_path))

    assert not [
        label for label in ("WHAT", "CAUSE", "EVIDENCE", "DOING", "WARNING") if label in text
    ]


def test_every_metric_is_in_the_documentation() -> None:
    """With its name and meaning."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()

    assert [name for name in metrics.HELP if f"`vlaunch_{name}`" not in page] == []
