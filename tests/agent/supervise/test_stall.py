"""An engine without progress: its verdicts, its restart, and the rank to blame."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from launcher.agent.observed import Wedge
from launcher.agent.processes.ray_view import Culprit
from tests.agent import specs
from tests.agent.specs import AWAY, RAY
from tests.agent.stage import KILLED, Engine, Make, Node, Stage, View
from tests.agent.supervise.test_supervisor import reboot

LOOP = "worker_busy_loop (vllm/v1/executor/multiproc_executor.py:1)"
WAITS = ("dequeue (vllm/distributed/device_communicators/shm_broadcast.py:2)", LOOP)
STEPS = ("execute_model (vllm/v1/worker/gpu_worker.py:3)", LOOP)
WHERE = f"rank PP1 on gpu2 in {STEPS[0]}"


def hang(stage: Stage, rank: str = "PP1", node: str = "gpu2") -> Stage:
    """Make a rank hang in its step, while the other ranks wait for work."""
    for name, host in stage.lead.nodes.items():
        host.stacks = {rank: STEPS} if name == node else {"PP0": WAITS}
    stage.engine.answers = False
    return stage


def verdicts(stage: Stage, seconds: float, step: float = 0.5) -> list[str]:
    """Advance the time; return the sequence of distinct verdicts."""
    sequence: list[str] = []
    for _ in range(round(seconds / step)):
        stage.step(step)
        if not sequence or sequence[-1] != stage.status.verdict:
            sequence.append(stage.status.verdict)
    return sequence


# ---- thresholds ----------------------------------------------------------------------------------


def test_a_hanging_rank_is_named(ready: Make) -> None:
    """The server is quiet at first, and suspect once two samples of all ranks are equal."""
    stage = hang(ready())
    assert verdicts(stage, 59) == ["answering", "busy", "quiet"]
    assert (stage.status.state, stage.status.faults) == ("ready", [])
    stage.run(3)

    status = stage.status
    assert (status.verdict, status.reason) == ("suspect", f"no step has ended for 60 s: {WHERE}")
    assert status.endpoints["gpu1"].verdict == "suspect"
    assert status.wedge is not None
    assert (status.wedge.rank, status.wedge.node, status.wedge.frame) == ("PP1", "gpu2", STEPS[0])
    assert stage.clock.time() - status.wedge.since == pytest.approx(62, abs=2)
    assert len(status.wedge.stacks) == 2


def test_only_ranks_of_a_quiet_server_are_inspected(ready: Make) -> None:
    """Inspections cost CPU."""
    stage = hang(ready())
    stage.run(28)
    assert not any(order.inspect for order in stage.orders.values())
    stage.run(5)
    assert all(order.inspect for order in stage.orders.values())
    stage.engine.answers = True
    stage.run(2)

    assert not any(order.inspect for order in stage.orders.values())


@pytest.mark.parametrize("after", [40, 75])
def test_progress_clears_the_verdict(ready: Make, after: int) -> None:
    """The step was long; the thresholds for the next one follow from its duration."""
    stage = hang(ready())
    stage.run(after)
    assert stage.status.verdict == ("quiet" if after == 40 else "suspect")
    stage.engine.answers = True
    stage.run(1)
    assert (stage.status.verdict, stage.status.wedge, stage.status.still) == (
        "answering",
        None,
        0.0,
    )
    assert stage.status.longest_step == pytest.approx(after, abs=1.5)
    stage.engine.answers = False

    assert verdicts(stage, 3 * after - 2)[-1] == "busy"
    assert verdicts(stage, 4)[-1] == "quiet"


def test_a_healthy_server_with_long_steps(ready: Make) -> None:
    """Steps of 25 s cause neither a warning nor an inspection."""
    stage = ready()
    stage.engine.answers = False
    for _ in range(20):
        stage.run(25)
        assert stage.status.verdict == "busy"
        stage.engine.works = True
        stage.step()
        stage.engine.works = False

    assert stage.status.longest_step == pytest.approx(25, abs=1)


def test_a_slow_prefill(ready: Make) -> None:
    """Its ranks make progress, so the server is quiet but not suspect."""
    stage = hang(ready())
    for layer in range(45):
        stage.lead.nodes["gpu2"].stacks = {"PP1": (f"layer{layer} (vllm/model.py:1)", *STEPS)}
        stage.run(2)
        assert stage.status.verdict in ("answering", "busy", "quiet")

    assert (stage.status.verdict, stage.status.wedge, stage.status.faults) == ("quiet", None, [])


@pytest.mark.parametrize("reason", ["it sleeps", "it is paused", "it is being rescaled"])
def test_a_paused_server_does_not_hang(ready: Make, reason: str) -> None:
    """It makes no progress on purpose."""
    stage = hang(ready())
    stage.engine.resting = reason

    assert verdicts(stage, 400) == ["resting"]
    assert (stage.status.still, stage.status.longest_step, stage.status.faults) == (0.0, 0.0, [])


def test_before_the_first_answer_nothing_hangs(make: Make) -> None:
    """Loading and compiling may take an hour."""
    stage = hang(make())

    assert set(verdicts(stage, 3600, 10)) == {"waiting", "starting"}
    assert (stage.status.still, stage.status.longest_step) == (0.0, 0.0)


def test_an_idle_server_does_not_hang(ready: Make) -> None:
    """Its counters do not change between two canaries, which are answered at once."""
    stage = ready(specs.mp("gpu1", policy=dataclasses.replace(specs.POLICY, canary=300.0)))

    assert verdicts(stage, 1000, 10) == ["answering"]
    assert stage.status.longest_step == 0.0


def test_a_server_with_an_unreachable_agent_is_not_suspect(ready: Make) -> None:
    """The state of that node's rank is unknown until it has been sampled twice again."""
    stage = hang(ready())
    stage.lead.stale.add("gpu2")
    assert verdicts(stage, 200)[-1] == "quiet"
    assert stage.status.reason.endswith("gpu2: fewer than two inspections")
    stage.lead.stale.clear()
    assert verdicts(stage, 15)[-1] == "suspect"
    stage.lead.away["gpu2"] = ""

    assert verdicts(stage, 5)[-1] == "quiet"
    assert (stage.status.wedge, stage.status.state) == (None, "ready")


def test_the_freeze_of_an_agent_is_not_a_long_step(ready: Make) -> None:
    """The head's agent does not know when the step ended."""
    stage = ready()
    stage.engine.answers = False
    stage.run(5)
    stage.clock.now += 100
    stage.engine.answers = True
    stage.run(5)

    assert stage.status.longest_step < 10


def replicas() -> Any:
    """Return the spec of a server with a replica on each of two nodes."""
    first = specs.process("gpu1", replicas=(0, 1))
    second = specs.process("gpu2", *specs.HEADLESS, replicas=(1, 1))
    return specs.mp("gpu1", "gpu2", processes=(first, second), replicas=2)


def test_one_replica_of_two_hangs(ready: Make) -> None:
    """It is judged by its own ranks, while the other replica works."""
    stage = ready(replicas())
    stage.lead.nodes["gpu2"].stacks = {"DP1": STEPS}
    stage.engine.mute = ("1",)
    stage.run(65)

    assert stage.status.verdict == "suspect"
    reason = f"no step of replica 1 has ended for 6. s: rank DP1 on gpu2 in {STEPS[0]}"
    assert stage.status.reason[:36] == reason[:36]
    assert stage.status.wedge is not None
    assert stage.status.wedge.rank == "DP1"


def test_replicas_that_wait_for_one_rank(ready: Make) -> None:
    """Replicas of a mixture of experts compute together, so all ranks are compared."""
    stage = ready(replicas())
    stage.lead.nodes["gpu1"].stacks = {"DP0": WAITS}
    stage.lead.nodes["gpu2"].stacks = {"DP1": STEPS}
    stage.engine.mute = ("0", "1")
    stage.run(65)

    assert stage.status.reason.startswith("no step has ended for 6")
    assert stage.status.wedge is not None
    assert (stage.status.verdict, stage.status.wedge.rank) == ("suspect", "DP1")


def test_ranks_of_ray(ready: Make, view: type[View]) -> None:
    """Ray's actors name their processes."""
    stage = ready(RAY)
    stage.run(5)
    stage.lead.nodes["gpu1"].stacks = {"": WAITS}
    stage.lead.nodes["gpu2"].stacks = {"other": WAITS, "": STEPS}
    stage.engine.answers = False
    stage.run(65)

    assert stage.status.wedge is not None
    assert (stage.status.wedge.rank, stage.status.wedge.node) == ("PP1", "gpu2")


def test_the_longest_step_is_remembered(ready: Make) -> None:
    """It survives a restart of the head's agent, and a stop and start of the same server."""
    stage = hang(ready(AWAY))
    stage.run(40)
    stage.engine.answers = True
    stage.run(3)
    reboot(stage)
    stage.until("ready")
    assert stage.status.longest_step == pytest.approx(40, abs=2)

    stage.store_spec(None)
    stage.until("stopped")
    (stage.folder / "chat" / "observed.json").unlink()
    stage.store_spec(dataclasses.replace(AWAY, asked=2.0))
    stage.until("ready")
    assert stage.status.longest_step == pytest.approx(40, abs=2)
    stage.store_spec(specs.mp("gpu2", id="other", asked=3.0))
    stage.until("starting")
    assert stage.status.longest_step == 0.0


# ---- restart -------------------------------------------------------------------------------------


def test_a_hanging_engine_is_restarted(ready: Make) -> None:
    """The fault has the rank, its frame, and the stacks of all ranks."""
    stage = hang(ready())
    stage.run(355)
    assert (stage.status.state, stage.status.verdict) == ("ready", "suspect")
    status = stage.until("stopping", within=10)
    (fault,) = status.faults

    assert fault.what == f"no step had ended for 360 s: the rank hung in {STEPS[0]}"
    assert (fault.node, fault.rank, status.wedge, status.endpoints) == ("gpu2", "PP1", None, {})
    stage.until("pausing")
    stage.lead.nodes["gpu2"].waits = "memory"
    stage.until("waiting")
    assert not any(order.inspect for order in stage.orders.values())
    stage.lead.nodes["gpu2"].waits = ""
    assert fault.lost is None
    assert STEPS[0] in fault.evidence
    assert WAITS[0] in fault.evidence
    stage.engine = Engine()
    assert stage.until("ready").verdict == "answering"


def test_an_engine_that_may_hang_is_not_restarted(ready: Make) -> None:
    """Its ranks cannot be compared."""
    stage = ready()
    stage.engine.answers = False
    stage.run(1000, step=2)

    assert (stage.status.verdict, stage.status.state, stage.status.faults) == ("quiet", "ready", [])


@pytest.mark.parametrize("how", ["ended with exit code 1", "was killed by SIGABRT"])
@pytest.mark.parametrize("node", ["gpu1", "gpu2"])
def test_an_exit_during_a_hang_is_blamed_on_the_rank(ready: Make, node: str, how: str) -> None:
    """vLLM's deadline stops its processes in any order; the last samples may lack a rank."""
    stage = hang(ready())
    stage.run(100)
    stage.lead.nodes["gpu1"].stacks = {}
    stage.step()
    stage.kill(node, how, "TimeoutError: RPC call timed out", "lines")
    (fault,) = stage.until("stopping", within=5).faults

    assert fault.what.endswith(f"s: the rank hung in {STEPS[0]}")
    assert (fault.node, fault.rank) == ("gpu2", "PP1")
    assert fault.cause == "TimeoutError: RPC call timed out"
    assert fault.evidence.startswith(f"then: vLLM's process on {node} {how}\n")
    assert fault.evidence.endswith("lines")


def test_an_exit_during_a_hang_without_samples_has_no_rank(ready: Make) -> None:
    """The process that exits first is not to blame."""
    stage = ready()
    stage.engine.answers = False
    stage.run(100)
    stage.kill("gpu2", "ended with exit code 1")
    (fault,) = stage.until("stopping", within=5).faults

    assert fault.what.endswith("s: rank unknown")
    assert (fault.node, fault.rank) == ("", "")


def test_a_fault_names_the_nodes_that_cannot_be_reached(ready: Make) -> None:
    """They are a fact, not a culprit: the fault is of no node."""
    stage = ready()
    stage.engine.answers = False
    stage.run(50)
    stage.lead.stale.add("gpu2")
    stage.kill("gpu1", "ended with exit code 1")
    (fault,) = stage.until("stopping", within=5).faults

    assert fault.what.endswith("s: gpu2 cannot be reached")
    assert (fault.node, fault.rank) == ("", "")


def test_rays_first_dead_rank_is_not_to_blame_for_a_hang(ready: Make, view: type[View]) -> None:
    """A hanging engine kills its own ranks."""
    stage = ready(RAY)
    view.blamed = Culprit("gpu1", "PP0", "Worker died")
    stage.engine.answers = False
    stage.run(100)
    stage.kill("gpu1", "ended with exit code 1")
    (fault,) = stage.until("pausing", within=10).faults

    assert (fault.node, fault.rank, fault.cause) == ("", "", "")


@pytest.mark.parametrize(
    ("how", "cause"),
    [(KILLED, ""), ("ended with exit code 1", "torch.OutOfMemoryError: CUDA out of memory")],
)
def test_a_kill_during_a_hang_is_the_cause(ready: Make, how: str, cause: str) -> None:
    """Its reason is known: a signal, or a lack of memory."""
    stage = hang(ready())
    stage.run(100)
    stage.kill("gpu1", how, cause)
    (fault,) = stage.until("stopping", within=5).faults

    assert (fault.what, fault.node) == (f"vLLM's process on gpu1 {how}", "gpu1")


def test_a_restarted_container_during_a_hang_is_the_cause(ready: Make) -> None:
    """Its ranks are lost with it."""
    stage = hang(ready())
    stage.run(100)
    stage.lead.nodes["gpu2"] = Node(boot="b2")
    (fault,) = stage.until("stopping", within=5).faults

    assert fault.what == "the container of gpu2 was restarted"


def test_an_exit_after_a_hang_is_a_separate_fault(ready: Make) -> None:
    """The engine has made progress since the hang."""
    stage = hang(ready())
    stage.run(100)
    stage.engine.answers = True
    stage.run(15)
    stage.kill("gpu1", "ended with exit code 1")
    (fault,) = stage.until("stopping", within=5).faults

    assert fault.what == "vLLM's process on gpu1 ended with exit code 1"


@pytest.mark.parametrize(
    ("wedge", "where", "how"),
    [
        (Wedge(since=1.0), "rank unknown", "rank unknown"),
        (
            Wedge(since=1.0, rank="TP1", node="gpu2", frame="spin (x.py:1)"),
            "rank TP1 on gpu2 in spin (x.py:1)",
            "the rank hung in spin (x.py:1)",
        ),
        (
            Wedge(since=1.0, rank="TP1", node="gpu2", gpu="3", frame="spin (x.py:1)"),
            "rank TP1 on gpu2 (GPU 3) in spin (x.py:1)",
            "the rank of GPU 3 hung in spin (x.py:1)",
        ),
    ],
)
def test_descriptions_of_a_hang(wedge: Wedge, where: str, how: str) -> None:
    """`how` leaves out the rank and node, which a fault has in other fields."""
    assert (wedge.location, wedge.details) == (where, how)
