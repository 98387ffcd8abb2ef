"""The rank to blame for a stuck engine, from samples of real ranks.

The files in `fixtures/stacks` have two samples, 10 s apart, of two lab nodes: vLLM 0.32 with `mp`
and TP 2, and with Ray and PP 2; idle, loaded, and with a rank that spins in C or Python, or sleeps.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import records
from launcher.agent.processes import blame
from launcher.agent.processes.blame import Inspections, NodeSample, StallFinding

STACKS = Path(__file__).parents[2] / "fixtures" / "stacks"
NODES: dict[str, dict[int, str]] = {"node1": {}, "node2": {}}
Samples = dict[str, list[dict[str, Any]]]


def read_samples(name: str) -> Samples:
    """Return the samples of a fixture, by node."""
    samples: Samples = json.loads((STACKS / f"{name}.json").read_text())
    return samples


def ray_ranks(samples: Samples) -> dict[str, dict[int, str]]:
    """Return the names of Ray's ranks by node and process; none for `mp`."""
    return {
        node: {
            rank["pid"]: f"PP{number}"
            for rank in (pair[0]["ranks"] if pair else ())
            if "ray::" in rank["title"]
        }
        for number, (node, pair) in enumerate(samples.items())
    }


def judge(samples: Samples, replica: int | None = None) -> StallFinding:
    """Compare the samples of all nodes."""
    inspections = Inspections()
    for node, pair in samples.items():
        inspections.add_sample(node, None)
        for sample in pair:
            inspections.add_sample(node, records.parse_record(NodeSample, sample, "inspection"))
    return inspections.compare_newest(ray_ranks(samples), replica=replica)


def rank_of(samples: Samples, node: str) -> list[dict[str, Any]]:
    """Return a node's rank in both samples."""
    return [rank for sample in samples[node] for rank in sample["ranks"] if not rank["engine"]]


def has_observation(finding: StallFinding, text: str) -> bool:
    return any(text in observation for observation in finding.observations)


WEDGED = sorted(path.stem for path in STACKS.glob("*-rank*.json"))


@pytest.mark.parametrize("name", WEDGED)
def test_wedged_rank(name: str) -> None:
    """It is named with its node and frame."""
    finding = judge(read_samples(name))
    number = int(name.split("-rank")[1][0])

    assert finding.progress is False, finding
    assert (finding.rank[2:], finding.node) == (str(number), f"node{number + 1}")
    assert "sitecustomize.py" in finding.frame
    assert any("sitecustomize.py" in stack for stack in finding.stacks)


def test_compilers_are_progress() -> None:
    """A rank may wait for its child processes."""
    samples = read_samples("mp-tp2-rank1-sleep")
    (_, rank) = rank_of(samples, "node2")[-2:]
    rank["helpers"] = 500

    finding = judge(samples)

    assert finding.progress is True
    assert has_observation(finding, "its child processes use")


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("mp-tp2", "TP0 on node1, TP1 on node2"), ("ray-pp2", "PP0 on node1, PP1 on node2")],
)
def test_idle_server(name: str, ranks: str) -> None:
    """All its ranks wait for work, and none is blamed."""
    finding = judge(read_samples(f"{name}-idle"))

    assert (finding.progress, finding.rank, finding.node) == (False, "", "")
    assert f"{ranks}: waiting for work" in finding.observations


@pytest.mark.parametrize("name", ["mp-tp2-load", "ray-pp2-load"])
def test_loaded_server(name: str) -> None:
    """Its ranks make progress."""
    finding = judge(read_samples(name))

    assert (finding.progress, finding.rank) == (True, "")


def test_bytes_are_progress() -> None:
    """The stacks do not change during a transfer over a slow link."""
    samples = read_samples("mp-tp2-rank1-c")
    first, second = samples["node2"]
    seconds = second["at"] - first["at"]
    second["bytes"]["eth0"][0] = first["bytes"]["eth0"][0] + int(1_000_000 * seconds)

    finding = judge(samples)

    assert (finding.progress, finding.rank) == (True, "")
    assert "node2: 1.0 MB/s" in finding.observations
    assert judge(samples, replica=0).progress is False


def test_context_switches_are_progress() -> None:
    """The stack does not change while a rank reads or writes a large file."""
    samples = read_samples("mp-tp2-rank1-sleep")
    rank_of(samples, "node2")[1]["voluntary"] += 2000

    assert judge(samples).progress is True


def test_lines_of_a_loop_are_no_progress() -> None:
    """A loop in Python is at different lines in the samples."""
    samples = read_samples("mp-tp2-rank1-python")
    frames = rank_of(samples, "node2")[1]["frames"]
    frames[0] = frames[0].replace(":8)", ":9)")

    assert judge(samples).rank == "TP1"


@pytest.mark.parametrize("change", ["stack", "process", "sample", "node"])
def test_missing_data_are_not_a_hang(change: str) -> None:
    """An unreadable rank or a node that does not answer may make progress."""
    samples = read_samples("mp-tp2-rank1-c")
    if change == "stack":
        rank_of(samples, "node1")[1].update(frames=[], why="unreadable")
    elif change == "process":
        samples["node1"][1]["ranks"].pop()
    elif change == "sample":
        samples["node1"].pop()
    else:
        samples["node1"].clear()

    finding = judge(samples)

    assert (finding.progress, finding.rank) == (None, "")
    assert any(
        observation.startswith(("node1: ", "TP0 on node1: no stack"))
        for observation in finding.observations
    )


def test_two_suspects() -> None:
    """No rank is named if two do not wait for others."""
    samples = read_samples("mp-tp2-rank1-c")
    for first, second in zip(rank_of(samples, "node1"), rank_of(samples, "node2"), strict=True):
        first["frames"] = second["frames"]

    finding = judge(samples)

    assert (finding.progress, finding.rank) == (False, "")
    assert has_observation(finding, "TP1 on node2 (94% of a core): running _spin_c")
    assert has_observation(finding, "TP0 on node1: sleeping in _spin_c")


def test_ranks_that_all_compute() -> None:
    """A long prompt in one step keeps all ranks in one operator; during a hang, some ranks wait."""
    samples = read_samples("mp-tp2-rank1-c")
    for waiting, spinning in zip(rank_of(samples, "node1"), rank_of(samples, "node2"), strict=True):
        waiting["ticks"], spinning["frames"] = spinning["ticks"], waiting["frames"]

    finding = judge(samples)

    assert (finding.progress, finding.rank) == (None, "")
    assert finding.observations[0] == "all ranks compute, as in one long step"


def test_engine_process_is_blamed() -> None:
    """The engine's process is named when all ranks wait for it."""
    samples = read_samples("mp-tp2-idle")
    for sample in samples["node1"]:
        for rank in sample["ranks"]:
            if rank["engine"]:
                rank["frames"] = ["compile (xgrammar/compiler.py:7)", *rank["frames"][-3:]]

    finding = judge(samples)

    assert (finding.rank, finding.node) == (blame.ENGINE, "node1")


def test_sleep_in_the_kernel() -> None:
    """Its function is shown, such as a driver's, a file system's or a timer's."""
    samples = read_samples("mp-tp2-rank1-sleep")
    assert has_observation(judge(samples), " (hrtimer_nanosleep)")

    rank_of(samples, "node2")[1].update(state="D", wchan="nfs_wait_bit_killable")
    assert has_observation(judge(samples), " (uninterruptible, nfs_wait_bit_killable)")


@pytest.mark.parametrize("engine", [False, True])
def test_stopped_process(engine: bool) -> None:
    """A process stopped by SIGSTOP is blamed, whatever its stack."""
    samples = read_samples("mp-tp2-idle")
    for sample in samples["node1"]:
        for rank in sample["ranks"]:
            if rank["engine"] is engine:
                rank.update(state="T", wchan="do_signal_stop", voluntary=7, ticks=7)

    finding = judge(samples)

    assert (finding.rank, finding.node) == (blame.ENGINE if engine else "TP0", "node1")
    assert has_observation(finding, " (stopped by a signal, do_signal_stop)")


def test_gpu_of_the_culprit() -> None:
    """It is shown if the node reports it."""
    samples = read_samples("mp-tp2-rank1-c")
    for rank in rank_of(samples, "node2"):
        rank["gpus"] = [{"index": 3, "utilization": 100.0, "power_w": 95.0}]

    finding = judge(samples)

    assert finding.gpu == "3"
    assert has_observation(finding, "TP1 on node2 (94% of a core, GPU 3 at 100 %, 95 W)")


def test_replicas() -> None:
    """A stuck replica is judged separately from one that works."""
    samples = read_samples("mp-tp2-rank1-c")
    for rank in (*rank_of(samples, "node1"), *rank_of(samples, "node2")):
        rank["rank"] = f"DP0 {rank['rank']}"
    working = copy.deepcopy(rank_of(read_samples("mp-tp2-load"), "node2"))
    for sample, rank in zip(samples["node2"], working, strict=True):
        sample["ranks"].append({**rank, "pid": 9, "rank": "DP1 TP0"})
        sample["ranks"].append({**rank, "pid": 10, "rank": "the engine DP1", "engine": True})

    assert judge(samples).progress is True
    assert judge(samples, replica=0).rank == "DP0 TP1"


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        (
            ["Socket.poll (zmq/x.py:1)", "dequeue (a/device_communicators/shm_broadcast.py:2)"],
            "WAITS",
        ),
        (["Queue.get (queue.py:171)", "async_output_busy_loop (a.py:1)"], "WAITS"),
        (
            ["recv (torch/distributed/distributed_c10d.py:1)", "Worker.execute_model (a.py:2)"],
            "WITH_OTHERS",
        ),
        (["all_reduce (vllm/distributed/parallel_state.py:1)"], "WITH_OTHERS"),
        (["Event.synchronize (torch/cuda/streams.py:1)", "execute_model (a.py:2)"], "FOR_DEVICE"),
        (["linear (torch/nn/functional.py:1)", "execute_model (a.py:2)"], "OPERATOR"),
        (["call (/tmp/torchinductor_root/ab/cab.py:7)"], "OPERATOR"),
        (["read (vllm/lora/utils.py:1)", "Worker.execute_model (a.py:2)"], "OWN"),
        (["WorkerProc.worker_busy_loop (a.py:1)"], "OWN"),
        (["nonsense"], "OWN"),
    ],
)
def test_kinds(frames: list[str], kind: str) -> None:
    """The kind of wait or work follows from a stack."""
    assert blame.classify_stack(frames) == getattr(blame, kind)
