"""Programs of vLLM's and Ray's documentation on a lab cluster, run with `vlaunch exec` as users
would run them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.lab import hosts
from launcher.lab.layout import HF_HOME
from tests.integration.conftest import CommandResult, LabCluster

pytestmark = [pytest.mark.lab, pytest.mark.long]

ROOT = Path(__file__).parents[2]
INSIDE = f"{HF_HOME}/programs"


@pytest.fixture(scope="module")
def cluster(lab_cluster: LabCluster) -> Iterator[LabCluster]:
    """A cluster whose nodes have the programs."""
    lab_cluster.recreate()
    folders = [hosts.hf_home(host) / "programs" for host in lab_cluster.lab.hosts]
    for folder in folders:
        shutil.copytree(ROOT / "tests/fixtures/programs", folder, dirs_exist_ok=True)
        shutil.copy(ROOT / "examples/data/prompts.txt", folder)
    yield lab_cluster
    for folder in folders:
        shutil.rmtree(folder)
    assert lab_cluster.vlaunch("down", "--yes").code == 0


def run(cluster: LabCluster, *arguments: str) -> CommandResult:
    """Run a program, and assert that it succeeds."""
    result = cluster.vlaunch("exec", "--timeout", "600", *arguments, timeout=660)
    assert result.code == 0, result.output
    return result


@pytest.mark.parametrize(
    ("program", "answers"),
    [
        ("ray_predictors", ("'data': 'Complete this', 'output': ", "'output': array([0.")),
        ("offline_distributed", ("Prompt: 'The best way to learn a language is', Generated",)),
        ("ray_llm", ("'answer': ",)),
    ],
)
def test_a_program_runs_on_the_head(
    cluster: LabCluster, program: str, answers: tuple[str, ...]
) -> None:
    """Ray distributes its actors; the head prints their results."""
    result = run(cluster, "--head", "--", "python3", f"{INSIDE}/{program}.py")

    for answer in answers:
        assert answer in result.out


def test_data_parallel_ranks_run_on_two_nodes(cluster: LabCluster) -> None:
    """Each node runs the same program with its own rank."""
    head = cluster.lab.hosts[0].ip
    number = "$(($(hostname | tr -dc 0-9) - 1))"
    program = (
        f"python3 {INSIDE}/data_parallel.py --dp-size=2 --tp-size=1 --node-size=2"
        f" --node-rank={number} --master-addr={head} --master-port=13345"
    )
    result = run(cluster, "--", "sh", "-c", program)

    for rank in range(2):
        assert f"DP rank {rank} needs to process 200 prompts" in result.out
        assert result.out.count(f"DP rank {rank}, Prompt: ") == 5
