"""Programs of vLLM's and Ray's documentation on a practice cluster, run with `vlaunch exec` as
users would bring them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.lab import hosts
from launcher.lab.layout import HF_HOME
from tests.integration.conftest import Practice, Ran

pytestmark = [pytest.mark.lab, pytest.mark.long]

ROOT = Path(__file__).parents[2]
INSIDE = f"{HF_HOME}/programs"


@pytest.fixture(scope="module")
def cluster(practice: Practice) -> Iterator[Practice]:
    """A cluster that is up, whose nodes have the programs."""
    practice.bring_up_anew()
    folders = [hosts.hf_home(host) / "programs" for host in practice.lab.hosts]
    for folder in folders:
        shutil.copytree(ROOT / "tests/fixtures/programs", folder, dirs_exist_ok=True)
        shutil.copy(ROOT / "examples/data/prompts.txt", folder)
    yield practice
    for folder in folders:
        shutil.rmtree(folder)
    assert practice.vlaunch("down", "--yes").code == 0


def run(cluster: Practice, *words: str) -> Ran:
    """Run a program; it must end well."""
    ran = cluster.vlaunch("exec", "--timeout", "600", *words, timeout=660)
    assert ran.code == 0, ran.said
    return ran


@pytest.mark.parametrize(
    ("program", "answers"),
    [
        ("ray_predictors", ("'data': 'Complete this', 'output': ", "'output': array([0.")),
        ("offline_distributed", ("Prompt: 'The best way to learn a language is', Generated",)),
        ("ray_llm", ("'answer': ",)),
    ],
)
def test_a_program_runs_on_the_head(
    cluster: Practice, program: str, answers: tuple[str, ...]
) -> None:
    """Ray spreads its actors; what the program prints is there."""
    ran = run(cluster, "--head", "--", "python3", f"{INSIDE}/{program}.py")

    for answer in answers:
        assert answer in ran.out


def test_data_parallel_ranks_run_on_two_nodes(cluster: Practice) -> None:
    """Each node runs the same program with its own rank."""
    head = cluster.lab.hosts[0].ip
    number = "$(($(hostname | tr -dc 0-9) - 1))"
    program = (
        f"python3 {INSIDE}/data_parallel.py --dp-size=2 --tp-size=1 --node-size=2"
        f" --node-rank={number} --master-addr={head} --master-port=13345"
    )
    ran = run(cluster, "--", "sh", "-c", program)

    for rank in range(2):
        assert f"DP rank {rank} needs to process 200 prompts" in ran.out
        assert ran.out.count(f"DP rank {rank}, Prompt: ") == 5
