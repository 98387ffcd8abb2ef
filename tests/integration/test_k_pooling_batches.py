"""Batches of models that do not generate: vectors and scores equal those of the server, also when a
replica dies.
"""

from __future__ import annotations

import base64
import json
import urllib.request
from array import array
from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest

from launcher.lab import models
from launcher.lab.layout import HF_HOME
from tests.integration.batches import ENGINE_ARGS, Batch, kill_process
from tests.integration.conftest import API_KEY, LabCluster
from tests.integration.servers import serve, url

pytestmark = [pytest.mark.lab, pytest.mark.long]

ROWS, PAIRS, AT_ONCE, CLOSE = 10_000, 200, 500, 1e-3
NUMBERS = 128  # of a vector of the tiny model
POOLING = {key: value for key, value in ENGINE_ARGS.items() if key != "max_num_seqs"}


@pytest.fixture(scope="module")
def cluster(lab_cluster: LabCluster) -> Iterator[LabCluster]:
    """Two nodes, no server."""
    lab_cluster.recreate()
    yield lab_cluster
    lab_cluster.vlaunch("down", "--yes")


def make_text(number: int) -> str:
    """Return a unique text of varying length."""
    return f"What comes after {number}? " + "Nothing. " * (number % 17)


def send_request(lab_cluster: LabCluster, path: str, **body: Any) -> list[dict[str, Any]]:
    """Send the server a request."""
    request = urllib.request.Request(
        url(lab_cluster) + path,
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        rows: list[dict[str, Any]] = json.load(answer)["data"]
    return sorted(rows, key=lambda row: int(row["index"]))


def max_difference(vector: list[float], other: list[float]) -> float:
    """Return the largest difference between two vectors."""
    return max(abs(a - b) for a, b in zip(vector, other, strict=True))


def test_vectors_equal_those_of_the_server(cluster: LabCluster) -> None:
    """Ten thousand rows, each once, with a replica killed meanwhile; the column has a fixed
    length.
    """
    model = f"{HF_HOME}/{models.EMBED}"
    job = Batch(cluster, "vectors").write(
        [{"id": number, "prompt": make_text(number)} for number in range(ROWS)],
        task="embed",
        model=model,
        keep=["id"],
        engine={"args": POOLING, "replicas": 2, "batch_size": 50},
    )
    job.detach().await_progress()
    kill_process(cluster, "VLLM::EngineCore")
    result = job.run()
    assert result.code == 0, result.output
    assert job.progress["restarts"] >= 1
    job.assert_complete(ROWS)
    table = pq.read_table(job.out / "rows").sort_by("row")
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float32(), NUMBERS)
    rows = table.to_pylist()

    serve(
        cluster,
        "--model",
        model,
        "--backend",
        "mp",
        "--nodes",
        "node1",
        "--",
        "--runner",
        "pooling",
    )
    worst = 0.0
    for first in range(0, ROWS, AT_ONCE):
        part = range(first, first + AT_ONCE)
        answers = send_request(
            cluster,
            "/embeddings",
            model=model,
            input=[make_text(number) for number in part],
            encoding_format="base64",
        )
        for number, answer in zip(part, answers, strict=True):
            vector = array("f", base64.b64decode(answer["embedding"])).tolist()
            assert rows[number]["id"] == number
            worst = max(worst, max_difference(rows[number]["embedding"], vector))
    cluster.vlaunch("stop")
    assert worst <= CLOSE


def test_scores_equal_those_of_the_server(cluster: LabCluster) -> None:
    """Of pairs of texts, by a model that reads both together."""
    model = f"{HF_HOME}/{models.RERANK}"
    job = Batch(cluster, "scores").write(
        [{"question": make_text(0), "passage": make_text(number)} for number in range(PAIRS)],
        task="score",
        model=model,
        prompt={"pair": ["{{ question }}", "{{ passage }}"]},
        keep=[],
        engine={"args": POOLING, "batch_size": 50},
    )
    result = job.run()
    assert result.code == 0, result.output
    job.assert_complete(PAIRS)
    scores = [row["score"] for row in job.answers()]

    serve(cluster, "--model", model, "--backend", "mp", "--nodes", "node1")
    answers = send_request(
        cluster,
        "/score",
        model=model,
        text_1=make_text(0),
        text_2=[make_text(number) for number in range(PAIRS)],
    )
    cluster.vlaunch("stop")
    assert max_difference(scores, [answer["score"] for answer in answers]) <= CLOSE
    assert len(set(scores)) > 1
