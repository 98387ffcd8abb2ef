"""Models that do not generate, over two nodes: each answers its kind of request, is supervised like
any other, and `chat` suggests the right request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from launcher.lab import models
from launcher.lab.layout import HF_HOME
from tests.integration.batches import kill_process
from tests.integration.conftest import CommandResult, LabCluster
from tests.integration.servers import RECOVERY_FACTOR, await_state, query_status, read_record, serve

pytestmark = [pytest.mark.lab, pytest.mark.long]


@dataclass(frozen=True)
class Kind:
    """A model, its parallelism, and its task."""

    model: str
    arguments: tuple[str, ...]
    rank: str  # part of the command line of its second rank
    task: str
    came: str


EMBED = Kind(
    model=models.EMBED,
    arguments=("--backend", "ray", "--tp", "1", "--pp", "2", "--", "--runner", "pooling"),
    rank="RayWorker",
    task="embedding",
    came="an embedding of 128 numbers",
)
RERANK = Kind(
    model=models.RERANK,
    arguments=("--backend", "mp", "--tp", "2", "--pp", "1"),
    rank="Worker_TP1",
    task="rerank",
    came="a score of ",
)


@pytest.fixture(scope="module")
def cluster(lab_cluster: LabCluster) -> Iterator[LabCluster]:
    """Two nodes, no server."""
    lab_cluster.recreate()
    yield lab_cluster
    lab_cluster.vlaunch("down", "--yes")


@pytest.mark.parametrize("kind", [EMBED, RERANK], ids=lambda kind: kind.task)
def test_a_model_that_does_not_generate(cluster: LabCluster, kind: Kind) -> None:
    """It is ready after an answer, `status` is green, a dead rank is replaced, and `chat` suggests
    a request.
    """
    result = serve(cluster, "--model", f"{HF_HOME}/{kind.model}", "--replace", *kind.arguments)
    assert f"{kind.came}" in result.err
    assert " received" in result.err

    green, server = query_status(cluster)
    assert green.code == 0, green.output
    assert (server["state"], server["observed"]["task"]) == ("answering", kind.task)
    assert server["came"].startswith(kind.came)
    assert (server["warning"], server["observed"]["faults"]) == ("", [])
    _assert_hint(cluster, cluster.vlaunch("chat", "hi"), kind)

    kill_process(cluster, kind.rank, "node2")
    await_state(cluster, "recovering", within=60)
    again = await_state(cluster, "answering", within=RECOVERY_FACTOR * max(result.seconds, 100.0))
    assert again["came"].startswith(kind.came)
    record, before = read_record(cluster), server["observed"]["generation"]
    assert (record["fault_count"], record["generation"], record["task"]) == (
        1,
        before + 1,
        kind.task,
    )
    _assert_hint(cluster, cluster.vlaunch("chat", "hi"), kind)


def _assert_hint(cluster: LabCluster, refused: CommandResult, kind: Kind) -> None:
    """Assert that `chat` refuses, and that the request in its hint works with the key."""
    assert (refused.code, refused.out) == (2, ""), refused.output
    line = re.search(r"`(curl .*)`", refused.err)
    assert line is not None, refused.err
    assert '"Authorization: Bearer $VLLM_API_KEY"' in line[1]
    shell = f"VLLM_API_KEY=$(cat /run/vlaunch/secrets/VLLM_API_KEY); {line[1]}"
    payload = json.loads(
        cluster.docker("node1", "exec", "vlaunch-lab-node1", "sh", "-c", shell).splitlines()[-1]
    )
    results = payload["results"] if kind.task == "rerank" else payload["data"]
    assert len(results) == 1, payload
