"""Models that do not generate, over two nodes: each is asked for what it does, is kept like any
other, and who wants to chat with it learns how to ask it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from launcher.lab import models
from launcher.lab.layout import HF_HOME
from tests.integration.batches import kill_one
from tests.integration.conftest import Practice, Ran
from tests.integration.servers import AGAIN, await_state, record, serve, status

pytestmark = [pytest.mark.lab, pytest.mark.long]


@dataclass(frozen=True)
class Kind:
    """A model, how it is split over the nodes, and what it does."""

    model: str
    words: tuple[str, ...]
    rank: str  # what the process of its second rank is called
    task: str
    came: str


EMBED = Kind(
    model=models.EMBED,
    words=("--backend", "ray", "--tp", "1", "--pp", "2", "--", "--runner", "pooling"),
    rank="RayWorker",
    task="embedding",
    came="an embedding of 128 numbers",
)
RERANK = Kind(
    model=models.RERANK,
    words=("--backend", "mp", "--tp", "2", "--pp", "1"),
    rank="Worker_TP1",
    task="rerank",
    came="a score of ",
)


@pytest.fixture(scope="module")
def cluster(practice: Practice) -> Iterator[Practice]:
    """Two nodes, no server."""
    practice.bring_up_anew()
    yield practice
    practice.vlaunch("down", "--yes")


@pytest.mark.parametrize("kind", [EMBED, RERANK], ids=lambda kind: kind.task)
def test_a_model_that_does_not_generate(cluster: Practice, kind: Kind) -> None:
    """It is ready with what it gives, `status` is green, a rank's death is mended, and `chat` tells
    the line that asks it.
    """
    ran = serve(cluster, "--model", f"{HF_HOME}/{kind.model}", "--replace", *kind.words)
    assert f"{kind.came}" in ran.err
    assert " received" in ran.err

    green, server = status(cluster)
    assert green.code == 0, green.said
    assert (server["state"], server["observed"]["task"]) == ("answering", kind.task)
    assert server["came"].startswith(kind.came)
    assert (server["warning"], server["observed"]["faults"]) == ("", [])
    _asked(cluster, cluster.vlaunch("chat", "hi"), kind)

    kill_one(cluster, kind.rank, "node2")
    await_state(cluster, "recovering", within=60)
    again = await_state(cluster, "answering", within=AGAIN * max(ran.seconds, 100.0))
    assert again["came"].startswith(kind.came)
    seen, before = record(cluster), server["observed"]["generation"]
    assert (seen["fault_count"], seen["generation"], seen["task"]) == (1, before + 1, kind.task)
    _asked(cluster, cluster.vlaunch("chat", "hi"), kind)


def _asked(cluster: Practice, refused: Ran, kind: Kind) -> None:
    """Hold that `chat` refuses, and that the line in its hint works where the key is known."""
    assert (refused.code, refused.out) == (2, ""), refused.said
    line = re.search(r"`(curl .*)`", refused.err)
    assert line is not None, refused.err
    assert '"Authorization: Bearer $VLLM_API_KEY"' in line[1]
    shell = f"VLLM_API_KEY=$(cat /run/vlaunch/secrets/VLLM_API_KEY); {line[1]}"
    said = json.loads(
        cluster.docker("node1", "exec", "vlaunch-lab-node1", "sh", "-c", shell).splitlines()[-1]
    )
    found = said["results"] if kind.task == "rerank" else said["data"]
    assert len(found) == 1, said
