"""Which rank a stuck engine waits for, judged from samples that were taken of real ones.

The files in `fixtures/stacks` are of two nodes of the lab, 10 s apart: vLLM 0.32 with `mp` and TP
2, and with Ray and PP 2; idle, under load, and with a rank that spins in C, in Python, or sleeps.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.payload.agent import blame, records
from launcher.payload.agent.blame import Finding, Inspections, Sample

STACKS = Path(__file__).parents[2] / "fixtures" / "stacks"
NODES: dict[str, dict[int, str]] = {"node1": {}, "node2": {}}
Recorded = dict[str, list[dict[str, Any]]]


def recorded(name: str) -> Recorded:
    """Return the samples of each node."""
    found: Recorded = json.loads((STACKS / f"{name}.json").read_text())
    return found


def named(samples: Recorded) -> dict[str, dict[int, str]]:
    """Return the ranks that Ray runs, as the head knows them; none of `mp`."""
    return {
        node: {
            each["pid"]: f"PP{n}"
            for each in (taken[0]["ranks"] if taken else ())
            if "ray::" in each["title"]
        }
        for n, (node, taken) in enumerate(samples.items())
    }


def judge(samples: Recorded, replica: int | None = None) -> Finding:
    """Compare what the nodes reported."""
    inspections = Inspections()
    for node, taken in samples.items():
        inspections.take(node, None)
        for each in taken:
            inspections.take(node, records.read(Sample, each, "inspection"))
    return inspections.finding(named(samples), replica=replica)


def rank_of(samples: Recorded, node: str) -> list[dict[str, Any]]:
    """Return the rank of a node, in both samples."""
    return [each for taken in samples[node] for each in taken["ranks"] if not each["engine"]]


WEDGED = sorted(path.stem for path in STACKS.glob("*-rank*.json"))


@pytest.mark.parametrize("name", WEDGED)
def test_wedged_rank(name: str) -> None:
    """It is named with its node, and what its stack shows."""
    found = judge(recorded(name))
    number = int(name.split("-rank")[1][0])

    assert found.progress is False, found
    assert (found.rank[2:], found.node) == (str(number), f"node{number + 1}")
    assert "sitecustomize.py" in found.frame
    assert any("sitecustomize.py" in stack for stack in found.stacks)


def test_rank_that_compiles() -> None:
    """A rank that waits for its compilers makes progress."""
    samples = recorded("mp-tp2-rank1-sleep")
    (_, rank) = rank_of(samples, "node2")[-2:]
    rank["helpers"] = 500

    found = judge(samples)

    assert found.progress is True
    assert any("its child processes use" in each for each in found.observations)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("mp-tp2", "TP0 on node1, TP1 on node2"), ("ray-pp2", "PP0 on node1, PP1 on node2")],
)
def test_idle_server(name: str, ranks: str) -> None:
    """Nothing moves in a server without requests either: all ranks wait for work, none is
    blamed.
    """
    found = judge(recorded(f"{name}-idle"))

    assert (found.progress, found.rank, found.node) == (False, "", "")
    assert f"{ranks}: waiting for work" in found.observations


@pytest.mark.parametrize("name", ["mp-tp2-load", "ray-pp2-load"])
def test_loaded_server(name: str) -> None:
    """A server that works makes progress."""
    found = judge(recorded(name))

    assert (found.progress, found.rank) == (True, "")


def test_bytes_are_progress() -> None:
    """A transfer over a slow link changes no stack."""
    samples = recorded("mp-tp2-rank1-c")
    first, second = samples["node2"]
    seconds = second["at"] - first["at"]
    second["bytes"]["eth0"][0] = first["bytes"]["eth0"][0] + int(1_000_000 * seconds)

    found = judge(samples)

    assert (found.progress, found.rank) == (True, "")
    assert "node2: 1.0 MB/s" in found.observations
    assert judge(samples, replica=0).progress is False


def test_context_switches_are_progress() -> None:
    """A rank that reads or writes in one place all the time is not wedged."""
    samples = recorded("mp-tp2-rank1-sleep")
    rank_of(samples, "node2")[1]["voluntary"] += 2000

    assert judge(samples).progress is True


def test_lines_of_a_loop() -> None:
    """A loop in Python is at another line each time."""
    samples = recorded("mp-tp2-rank1-python")
    frames = rank_of(samples, "node2")[1]["frames"]
    frames[0] = frames[0].replace(":8)", ":9)")

    assert judge(samples).rank == "TP1"


@pytest.mark.parametrize("change", ["stack", "process", "sample", "node"])
def test_unknown_is_not_stuck(change: str) -> None:
    """A rank that could not be read, or a node that could not be asked, may well make progress."""
    samples = recorded("mp-tp2-rank1-c")
    if change == "stack":
        rank_of(samples, "node1")[1].update(frames=[], why="unreadable")
    elif change == "process":
        samples["node1"][1]["ranks"].pop()
    elif change == "sample":
        samples["node1"].pop()
    else:
        samples["node1"].clear()

    found = judge(samples)

    assert (found.progress, found.rank) == (None, "")
    assert any(
        each.startswith(("node1: ", "TP0 on node1: no stack")) for each in found.observations
    )


def test_two_suspects() -> None:
    """No rank is named when two wait for nothing."""
    samples = recorded("mp-tp2-rank1-c")
    for mine, other in zip(rank_of(samples, "node1"), rank_of(samples, "node2"), strict=True):
        mine["frames"] = other["frames"]

    found = judge(samples)

    assert (found.progress, found.rank) == (False, "")
    assert any(
        "TP1 on node2 (94% of a core): running _spin_c" in each for each in found.observations
    )
    assert any("TP0 on node1: sleeping in _spin_c" in each for each in found.observations)


def test_ranks_that_all_compute() -> None:
    """A long prompt in one step keeps all ranks in one operator; a hang leaves some waiting."""
    samples = recorded("mp-tp2-rank1-c")
    for waiting, spinning in zip(rank_of(samples, "node1"), rank_of(samples, "node2"), strict=True):
        waiting["ticks"], spinning["frames"] = spinning["ticks"], waiting["frames"]

    found = judge(samples)

    assert (found.progress, found.rank) == (None, "")
    assert found.observations[0] == "all ranks compute, as in one long step"


def test_engine_alone() -> None:
    """The process that schedules is named when all ranks wait for it."""
    samples = recorded("mp-tp2-idle")
    for taken in samples["node1"]:
        for each in taken["ranks"]:
            if each["engine"]:
                each["frames"] = ["compile (xgrammar/compiler.py:7)", *each["frames"][-3:]]

    found = judge(samples)

    assert (found.rank, found.node) == (blame.ENGINE, "node1")


def test_sleep_in_the_kernel() -> None:
    """It is told where a rank sleeps: a driver's function, a file system's, or a timer's."""
    samples = recorded("mp-tp2-rank1-sleep")
    assert any(each.endswith(" (hrtimer_nanosleep)") for each in judge(samples).observations)

    rank_of(samples, "node2")[1].update(state="D", wchan="nfs_wait_bit_killable")
    assert any(
        each.endswith(" (uninterruptible, nfs_wait_bit_killable)")
        for each in judge(samples).observations
    )


@pytest.mark.parametrize("engine", [False, True])
def test_stopped_process(engine: bool) -> None:
    """A process that SIGSTOP has frozen is the culprit wherever it is, also while it waits."""
    samples = recorded("mp-tp2-idle")
    for taken in samples["node1"]:
        for each in taken["ranks"]:
            if each["engine"] is engine:
                each.update(state="T", wchan="do_signal_stop", voluntary=7, ticks=7)

    found = judge(samples)

    assert (found.rank, found.node) == (blame.ENGINE if engine else "TP0", "node1")
    assert any(
        each.endswith(" (stopped by a signal, do_signal_stop)") for each in found.observations
    )


def test_gpu_of_the_culprit() -> None:
    """It is told where the node knows it."""
    samples = recorded("mp-tp2-rank1-c")
    for each in rank_of(samples, "node2"):
        each["gpus"] = [{"index": 3, "utilization": 100.0, "power_w": 95.0}]

    found = judge(samples)

    assert found.gpu == "3"
    assert any(
        "TP1 on node2 (94% of a core, GPU 3 at 100 %, 95 W)" in each for each in found.observations
    )


def test_replicas() -> None:
    """A replica that is stuck is found beside one that works."""
    samples = recorded("mp-tp2-rank1-c")
    for each in (*rank_of(samples, "node1"), *rank_of(samples, "node2")):
        each["rank"] = f"DP0 {each['rank']}"
    beside = copy.deepcopy(rank_of(recorded("mp-tp2-load"), "node2"))
    for taken, each in zip(samples["node2"], beside, strict=True):
        taken["ranks"].append({**each, "pid": 9, "rank": "DP1 TP0"})
        taken["ranks"].append({**each, "pid": 10, "rank": "the engine DP1", "engine": True})

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
    """What a stack says that a rank does."""
    assert blame.kind(frames) == getattr(blame, kind)
