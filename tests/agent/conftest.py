"""Fixtures of the agent's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.agent import state
from launcher.agent.desired import Desired
from launcher.agent.health import api
from launcher.agent.processes.ray_view import RayRank
from launcher.agent.supervise import monitor, reservation, start_conditions, supervisor
from tests.agent.specs import TWO
from tests.agent.stage import Clock, Make, Now, Stage, View
from tests.agent.web import CHAT, Server

METRICS = (
    "# HELP vllm:cache_config_info"
    ' Information\nvllm:cache_config_info{block_size="128",kv_cache_size_tokens="262144",'
    'kv_cache_max_concurrency="512.0"}'
    ' 1.0\nvllm:num_requests_running{engine="0"} 8.0\nvllm:num_requests_waiting{engine="0"}'
    ' 892.0\nvllm:generation_tokens_total{engine="0"} 7.0\n'
)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server of Ray's dashboard and vLLM's API on one port."""
    with Server() as running:
        running.answers |= {
            "/health": "",
            "/v1/models": {"data": [{"id": "m"}]},
            "/metrics": METRICS,
            "/v1/chat/completions": CHAT,
            "/api/jobs/": [],
        }
        yield running


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a container's `secrets` and `state`."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "secrets" / "RAY_AUTH_TOKEN").write_text("ray-token\n")
    (tmp_path / "secrets" / "VLLM_API_KEY").write_text("api-key")
    monkeypatch.setattr(api, "SECRETS", str(tmp_path / "secrets"))
    monkeypatch.setattr(state, "FOLDER", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The supervisor's clock."""
    created = Clock()
    for module in (supervisor, monitor, start_conditions, reservation):
        monkeypatch.setattr(module, "Background", Now)
    monkeypatch.setattr(state, "container_id", lambda: "first")
    monkeypatch.setattr(state.os, "fsync", lambda _: None)  # thousands of records
    return created


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Make:
    """A function that puts a server on a stage."""
    return lambda spec=TWO, *args: Stage(tmp_path, clock, spec, *args)


@pytest.fixture
def ready(make: Make) -> Make:
    """A function that puts a server on a stage and starts it."""

    def answered(spec: Desired = TWO, *args: str) -> Stage:
        stage = make(spec, *args)
        stage.until("ready")
        stage.run(10)
        return stage

    return answered


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> type[View]:
    """Answers of Ray."""
    monkeypatch.setattr(supervisor, "RayView", View)
    monkeypatch.setattr(View, "lacks", "")
    monkeypatch.setattr(View, "blamed", None)
    monkeypatch.setattr(
        View, "placed", [RayRank("a0", "PP0", "gpu1", 41), RayRank("a1", "PP1", "gpu2", 42)]
    )
    return View
