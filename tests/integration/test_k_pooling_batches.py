"""Batches of models that do not generate: their vectors and scores are those of the server, row by
row, also when a replica dies.
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
from tests.integration.batches import ARGS, Batch, kill_one
from tests.integration.conftest import API_KEY, Practice
from tests.integration.servers import serve, url

pytestmark = [pytest.mark.lab, pytest.mark.long]

ROWS, PAIRS, AT_ONCE, CLOSE = 10_000, 200, 500, 1e-3
NUMBERS = 128  # of a vector of the tiny model
POOLING = {key: value for key, value in ARGS.items() if key != "max_num_seqs"}


@pytest.fixture(scope="module")
def cluster(practice: Practice) -> Iterator[Practice]:
    """Two nodes, no server."""
    practice.bring_up_anew()
    yield practice
    practice.vlaunch("down", "--yes")


def text(number: int) -> str:
    """A text of its own, and of its own length."""
    return f"What comes after {number}? " + "Nothing. " * (number % 17)


def asked(practice: Practice, path: str, **body: Any) -> list[dict[str, Any]]:
    """Ask the server."""
    request = urllib.request.Request(
        url(practice) + path,
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]
    return sorted(found, key=lambda each: int(each["index"]))


def apart(one: list[float], other: list[float]) -> float:
    """Return the largest difference between two vectors' numbers."""
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


def test_vectors_are_those_of_the_server(cluster: Practice) -> None:
    """Of ten thousand rows, each once, with a replica killed among them; a column of fixed
    length.
    """
    model = f"{HF_HOME}/{models.EMBED}"
    job = Batch(cluster, "vectors").write(
        [{"id": number, "prompt": text(number)} for number in range(ROWS)],
        task="embed",
        model=model,
        keep=["id"],
        engine={"args": POOLING, "replicas": 2, "batch_size": 50},
    )
    job.detach().under_way()
    kill_one(cluster, "VLLM::EngineCore")
    ran = job.run()
    assert ran.code == 0, ran.said
    assert job.progress["restarts"] >= 1
    job.each_once(ROWS)
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
        found = asked(
            cluster,
            "/embeddings",
            model=model,
            input=[text(number) for number in part],
            encoding_format="base64",
        )
        for number, each in zip(part, found, strict=True):
            vector = array("f", base64.b64decode(each["embedding"])).tolist()
            assert rows[number]["id"] == number
            worst = max(worst, apart(rows[number]["embedding"], vector))
    cluster.vlaunch("stop")
    assert worst <= CLOSE


def test_scores_are_those_of_the_server(cluster: Practice) -> None:
    """Of pairs of texts, by a model that looks at both together."""
    model = f"{HF_HOME}/{models.RERANK}"
    job = Batch(cluster, "scores").write(
        [{"question": text(0), "passage": text(number)} for number in range(PAIRS)],
        task="score",
        model=model,
        prompt={"pair": ["{{ question }}", "{{ passage }}"]},
        keep=[],
        engine={"args": POOLING, "batch_size": 50},
    )
    ran = job.run()
    assert ran.code == 0, ran.said
    job.each_once(PAIRS)
    scores = [row["score"] for row in job.answers()]

    serve(cluster, "--model", model, "--backend", "mp", "--nodes", "node1")
    found = asked(
        cluster,
        "/score",
        model=model,
        text_1=text(0),
        text_2=[text(number) for number in range(PAIRS)],
    )
    cluster.vlaunch("stop")
    assert apart(scores, [each["score"] for each in found]) <= CLOSE
    assert len(set(scores)) > 1
