"""The state of a running engine: progress, messages, ranks, and losses."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.agent import records
from launcher.agent.desired import Desired
from launcher.agent.health.probe import ProbeReport
from launcher.agent.health.task import ONLY_HEALTH
from launcher.agent.processes.node import KEEP
from launcher.agent.processes.ray_view import RayRank
from launcher.agent.supervise import apis
from tests.agent import specs
from tests.agent.specs import AWAY, RAY
from tests.agent.stage import Engine, Make, Node, Stage, View


def test_an_unreachable_node_is_tolerated_during_progress(ready: Make) -> None:
    """The outage of the control network is reported."""
    stage = ready()
    stage.lead.away["gpu2"] = "its connection closed"
    stage.run(1000, step=5)
    assert (stage.status.state, stage.status.faults) == ("ready", [])
    assert stage.status.warning == "no answer from the agent of gpu2"
    assert stage.status.verdict == "answering"

    stage.lead.away.clear()
    stage.run(5)
    assert (stage.status.state, stage.status.warning, stage.status.generation) == ("ready", "", 1)


def test_a_lost_node(ready: Make) -> None:
    """No answer and no counter for three canaries, although other ranks spin waiting for it."""
    stage = ready()
    stage.lead.away["gpu2"] = "no report for 60 s"
    stage.engine.answers = False
    stage.run(14)
    assert stage.status.state == "ready"
    stage.until("stopping", within=4)
    (fault,) = stage.status.faults

    assert (fault.what, fault.node, fault.rank) == ("gpu2 is gone", "gpu2", "1")
    assert fault.evidence == "its agent: no report for 60 s"
    stage.run(60)
    assert (stage.status.state, stage.status.doing) == ("waiting", "waiting for the agent of gpu2")
    stage.lead.nodes["gpu2"] = Node(boot="b2")
    stage.lead.away.clear()
    stage.until("ready")


def test_a_node_is_lost_during_the_start(make: Make) -> None:
    """A start shows no work, and a busy node may take long to connect again."""
    stage = make()
    stage.engine.takes = 200
    stage.until("starting")
    stage.run(5)
    stage.lead.away["gpu2"] = "its connection closed"
    stage.run(5)

    assert (stage.status.state, stage.status.faults) == ("starting", [])
    stage.lead.patience = 50.0
    stage.until("failed", within=10)
    assert stage.status.reason == "it never answered: gpu2 is gone"


def test_a_node_that_may_return(ready: Make) -> None:
    """Its connection has just closed: that alone proves nothing, even without progress."""
    stage = ready()
    stage.lead.away["gpu2"] = ""
    stage.engine.answers = False
    stage.run(60)

    assert (stage.status.state, stage.status.faults) == ("ready", [])


def test_a_restarted_container(ready: Make) -> None:
    """Its rank is lost, however quickly its agent returns; the rank is not restarted alone."""
    stage = ready()
    stage.lead.nodes["gpu2"] = Node(boot="b2")
    stage.step()
    assert stage.lead.nodes["gpu2"].state == "idle"
    stage.until("pausing")
    assert (stage.status.faults[0].what, stage.status.faults[0].node) == (
        "the container of gpu2 was restarted",
        "gpu2",
    )

    stage.until("ready")
    assert [stage.lead.nodes[node].last for node in ("gpu1", "gpu2")] == [2, 2]


@pytest.mark.parametrize("node", ["gpu1", "gpu2"])
def test_a_silent_agent_is_no_hang(make: Make, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last report is stale: it is stopped, or the network drops its messages."""
    stage = make(
        specs.mp("gpu2", "gpu3", addresses={"gpu2": "10.0.0.2"}) if node == "gpu1" else AWAY
    )
    monkeypatch.setattr(apis, "ApiProbe", lambda *_: Eye({}))
    stage.until("ready")
    stage.run(10)
    stage.engine.answers = False
    stage.lead.stale |= {"gpu2", "gpu3"}
    stage.run(1000, step=2)

    assert (stage.status.state, stage.status.faults, stage.status.still) == ("ready", [], 0.0)
    assert stage.status.verdict == "unknown"


class Eye:
    """Replacement of the head's own probe."""

    def __init__(self, payload: dict[str, Any]) -> None:
        self.payload, self.stopped = payload, False

    def report(self) -> ProbeReport:
        """Return the probe's result."""
        return records.parse_record(ProbeReport, self.payload, "report")

    def stop(self) -> None:
        """Stop probing."""
        self.stopped = True


@pytest.mark.parametrize(
    ("bound", "host"), [("0.0.0.0", "10.0.0.2"), ("::", "10.0.0.2"), ("192.0.2.7", "192.0.2.7")]
)
def test_the_head_probes_the_api_of_a_silent_agent(
    ready: Make, monkeypatch: pytest.MonkeyPatch, bound: str, host: str
) -> None:
    """It serves, and stays ready; the agent's own reports count again once it is back."""
    requests: list[Any] = []
    eye = Eye({})
    monkeypatch.setattr(apis, "ApiProbe", lambda *args: requests.append(args) or eye)
    stage = ready(specs.mp("gpu2", addresses={"gpu2": "10.0.0.2"}, host=bound))
    stage.lead.stale.add("gpu2")
    for _ in range(100):
        eye.payload = stage.probe()
        stage.step(5)
    assert requests == [(host, 8000, range(0), 5.0)]
    assert (stage.status.verdict, stage.status.warning) == (
        "answering",
        "no answer from the agent of gpu2",
    )
    assert stage.status.answered is not None and stage.clock.time() - stage.status.answered < 6

    stage.lead.stale.clear()
    stage.run(5)
    assert (stage.status.warning, eye.stopped) == ("", True)


@pytest.mark.parametrize("text", ["it sleeps", "it is paused", "it is being rescaled"])
def test_a_paused_server_is_not_restarted(ready: Make, text: str) -> None:
    """An operator paused it; once resumed, all deadlines start again."""
    stage = ready()
    stage.engine = Engine(answers=False, resting=text)
    stage.run(1000, step=2)
    assert (stage.status.verdict, stage.status.faults, stage.status.reason) == ("resting", [], text)
    assert (stage.status.still, stage.status.longest_step) == (0.0, 0.0)

    stage.engine.resting = ""
    stage.run(29)
    assert stage.status.verdict == "busy"


def test_a_503_of_a_rescaled_server_is_no_death(ready: Make) -> None:
    """`/health` answers 503 while expert parallelism is rescaled; later 503 means death."""
    stage = ready()
    stage.engine = Engine(answers=False, health=503, resting="it is being rescaled")
    stage.run(600, step=2)
    assert (stage.status.state, stage.status.faults) == ("ready", [])

    stage.engine.resting = ""
    stage.run(5)
    assert len(stage.status.faults) == 1


def replicas() -> Desired:
    """Two replicas, one per node."""
    first = specs.process("gpu1", replicas=(0, 1))
    second = specs.process("gpu2", *specs.HEADLESS, replicas=(1, 1))
    return specs.mp("gpu1", "gpu2", processes=(first, second), replicas=2)


def test_a_replica_without_steps_is_quiet(ready: Make) -> None:
    """Although the other one answers: half of all requests would never return."""
    stage = ready(replicas())
    stage.engine.mute = ("1",)
    stage.run(32)

    assert stage.status.verdict == "quiet"
    assert stage.status.reason.startswith("no step of replica 1 has ended for 3")


def test_a_500_is_tolerated_during_progress(ready: Make) -> None:
    """Our request may be at fault. The verdict is withdrawn when one succeeds."""
    stage = ready()
    stage.engine.failing, stage.engine.works = (500, "grammar error"), True
    stage.run(1000, step=2)
    assert (stage.status.verdict, stage.status.faults) == ("busy", [])
    assert stage.status.reason == "canary failed: HTTP 500: grammar error"

    stage.engine.failing = None
    stage.run(2)
    assert (stage.status.verdict, stage.status.reason) == ("answering", "")


@pytest.mark.parametrize("how", [{"health": 503}, {"failing": (500, "EngineDeadError: x")}])
def test_an_engine_that_reports_its_death(ready: Make, how: dict[str, Any]) -> None:
    """Its API may run on for long; its output is the evidence."""
    stage = ready()
    stage.lead.nodes["gpu1"].extra = {"evidence": "lines", "cause": "RuntimeError: x"}
    stage.engine = Engine(answers=False, **how)
    (fault,) = stage.until("stopping", within=3).faults

    assert (fault.what, fault.evidence, fault.cause) == (
        "the engine reports that it is dead",
        "lines",
        "RuntimeError: x",
    )


def test_a_503_during_the_start(make: Make) -> None:
    """The server is not ready yet."""
    stage = make()
    stage.engine = Engine(takes=50, health=503)
    stage.run(40)
    assert (stage.status.state, stage.status.faults) == ("starting", [])


def test_a_busy_server(ready: Make) -> None:
    """Running and waiting requests, tokens per second, and ages of canaries."""
    stage = ready()
    stage.engine.open, stage.engine.answers = 8, False
    stage.run(20)
    observed = stage.keeper.status
    assert observed is not None
    assert observed.load is not None

    assert (observed.load.running, observed.load.waiting) == (8, 1)
    assert (19 <= observed.asking <= 20.5, observed.answered is not None) == (True, True)


@pytest.mark.parametrize(
    ("how", "lost"),
    [
        ({"open": 3}, 3),
        ({"open": 0}, 0),
        ({"open": 1, "failed": 9.0}, 9),
        ({"counts": False}, None),
    ],
)
def test_lost_requests(ready: Make, how: dict[str, Any], lost: int | None) -> None:
    """Open requests at the death, or 5xx answers since; unknown, not 0, without vLLM's counters."""
    stage = ready()
    failed = how.pop("failed", 0.0)
    stage.engine = Engine(**how)
    received = stage.keeper.server._engine().apis
    received._well = received._counted = None
    stage.run(10)
    if failed:
        stage.engine.failed, stage.engine.answers = failed, False
        stage.step()
    stage.kill("gpu2")

    assert stage.until("pausing").faults[0].lost == lost


def test_stale_counters_prove_no_lost_requests(ready: Make) -> None:
    """Figures from a minute ago prove nothing."""
    stage = ready()
    stage.engine.open = 3
    stage.run(10)
    stage.engine.counts = False
    stage.run(60)
    stage.kill("gpu2")

    assert stage.until("pausing").faults[0].lost is None


def test_the_ranks_of_ray_are_watched(ready: Make, view: type[View]) -> None:
    """Every node gets the processes of its own ranks; only the first one starts any."""
    stage = ready(RAY)

    assert stage.status.ranks == {"gpu1": ["PP0"], "gpu2": ["PP1"]}
    assert {node: item.pids for node, item in stage.orders.items()} == {
        "gpu1": (41,),
        "gpu2": (42,),
    }
    assert (stage.orders["gpu2"].argv, stage.phases) == ((), {"gpu1": KEEP, "gpu2": KEEP})


def test_ranks_are_ordered(make: Make, view: type[View]) -> None:
    """Ray's table is not: nodes as in the spec, ranks by number."""
    names = ("DP10", "DP2", "an engine")
    view.placed = [
        RayRank(f"{node}{name}", name, node, number)
        for node in ("gpu2", "gpu1")
        for number, name in enumerate(names, start=1)
    ]
    stage = make(RAY)
    stage.until("ready")
    stage.run(2)

    assert list(stage.status.ranks.items()) == [
        ("gpu1", ["DP2", "DP10"]),
        ("gpu2", ["DP2", "DP10"]),
    ]


def test_ray_is_queried_until_it_has_all_ranks(make: Make, view: type[View]) -> None:
    """Engines appear before their ranks, and replicas one by one; until then the last answer
    counts.
    """
    stage = make(RAY)
    (first, second), view.placed = view.placed, [RayRank("e0", "an engine", "gpu1", 40)]
    stage.until("ready")
    view.placed = [*view.placed, first]
    stage.run(12)
    assert stage.status.ranks == {"gpu1": ["PP0"]}

    view.placed = [*view.placed, second]
    pids = set[tuple[int, ...]]()
    for _ in range(12):
        stage.step(1)
        pids.add(stage.orders["gpu1"].pids)
    assert stage.status.ranks == {"gpu1": ["PP0"], "gpu2": ["PP1"]}
    assert pids == {(40, 41)}


def test_missing_ranks_are_queried_again(make: Make, view: type[View]) -> None:
    """Ray's dashboard lags behind."""
    result, view.placed = view.placed, []
    stage = make(RAY)
    stage.until("ready")
    stage.run(5)
    assert stage.status.ranks == {}
    view.placed = result
    stage.run(15)
    assert stage.status.ranks == {"gpu1": ["PP0"], "gpu2": ["PP1"]}


def with_ranks(ready: Make, *, met: bool = True) -> Stage:
    """Return a ready server with ranks in Ray; agents know them if `met`."""
    stage = ready(RAY)
    stage.lead.nodes["gpu1"].ranks = [41]
    stage.lead.nodes["gpu2"].ranks = [42] if met else []
    stage.run(15)
    return stage


def test_an_exited_rank_of_a_running_engine(ready: Make, view: type[View]) -> None:
    """vLLM may wait forever for the rank's answer; the agent on its node reports the exit."""
    stage = with_ranks(ready)
    stage.run(20)
    stage.engine.answers = False
    stage.lead.nodes["gpu2"].ranks = []
    stage.run(4)
    assert stage.status.state == "ready"  # vLLM may still say why
    stage.until("stopping", within=4)
    (fault,) = stage.status.faults

    assert fault.what == "vLLM is running, but its rank PP1 has exited"
    assert (fault.node, fault.rank) == ("gpu2", "PP1")


def test_returning_ranks_are_no_fault(ready: Make, view: type[View]) -> None:
    """The agent was wrong, or reported other processes."""
    stage = with_ranks(ready)
    for _ in range(5):
        stage.lead.nodes["gpu2"].ranks = []
        stage.run(3)
        stage.lead.nodes["gpu2"].ranks = [42]
        stage.run(3)

    assert (stage.status.state, stage.status.faults) == ("ready", [])


def test_ranks_that_end_with_their_engine_are_not_to_blame(ready: Make, view: type[View]) -> None:
    """vLLM's own message is reported, and Ray is queried for the first death."""
    stage = with_ranks(ready)
    for node in stage.lead.nodes.values():
        node.ranks = []
    stage.run(3)
    stage.kill("gpu1", "ended with exit code 1", cause="ValueError: no")
    stage.until("stopping", within=3)

    assert stage.status.faults[0].what == "vLLM ended with exit code 1"


@pytest.mark.parametrize("why", ["unmet", "silent", "rests"])
def test_an_unknown_rank_is_no_fault(ready: Make, view: type[View], why: str) -> None:
    """Its process was never reported, its agent is unreachable, or the server is being scaled."""
    stage = with_ranks(ready, met=why != "unmet")
    stage.lead.nodes["gpu2"].ranks = []
    if why == "silent":
        stage.lead.stale.add("gpu2")
    if why == "rests":
        stage.engine.resting = "it is being scaled"
    stage.run(60)

    assert (stage.status.state, stage.status.faults) == ("ready", [])


def test_a_restarted_node_with_ranks_of_ray(ready: Make, view: type[View]) -> None:
    """Its ranks are lost, although the engine has not noticed."""
    stage = ready(RAY)
    stage.run(5)
    stage.lead.nodes["gpu2"] = Node(boot="b2")
    (fault,) = stage.until("stopping", within=5).faults

    assert (fault.what, fault.node, fault.rank) == (
        "the container of gpu2 was restarted",
        "gpu2",
        "PP1",
    )


def test_a_lost_node_with_ranks_of_ray(ready: Make, view: type[View]) -> None:
    """Only if the engine makes no progress without it."""
    stage = ready(RAY)
    stage.run(5)
    stage.lead.away["gpu2"] = "no report for 60 s"
    stage.run(100)
    assert stage.status.state == "ready"
    stage.engine.answers = False
    (fault,) = stage.until("stopping", within=20).faults

    assert (fault.what, fault.node, fault.rank) == ("gpu2 is gone", "gpu2", "PP1")


def test_a_models_task_is_recorded(ready: Make) -> None:
    """With the first answer; a restart detects it again, as the model may change."""
    stage = ready(specs.mp("gpu1"))
    assert stage.status.task == "chat"
    stage.engine.task = "embedding"
    stage.kill("gpu1")
    status = stage.until("starting", within=30)
    assert status.task == ""

    assert stage.until("ready").task == "embedding"


@pytest.mark.parametrize("task", ["", "7", "poetry"])
def test_an_unknown_task_is_ignored(ready: Make, task: str) -> None:
    """An agent of another version may report any task: answers count all the same."""
    stage = ready()
    stage.engine.task = task
    stage.run(1000, step=5)

    assert (stage.status.state, stage.status.task, stage.status.faults) == ("ready", "chat", [])


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ((500, "no luck"), "canary failed: HTTP 500: no luck"),
        ((0, "refused"), "canary got no embedding: refused"),
    ],
)
def test_an_embedding_model_is_named(ready: Make, failing: tuple[int, str], expected: str) -> None:
    """In reasons, too."""
    stage = ready()
    stage.engine.task, stage.engine.failing = "embedding", failing
    stage.run(2)

    assert stage.status.reason == expected


def test_health_suffices_without_other_routes(ready: Make) -> None:
    """The server is ready as long as `/health` is fine, and the record says so."""
    stage = ready()
    stage.engine.task, stage.engine.refused = "health", "/pooling: 400 no plugin"
    stage.run(1000, step=5)
    assert (stage.status.state, stage.status.faults) == ("ready", [])
    assert stage.status.warning == f"{ONLY_HEALTH} (/pooling: 400 no plugin)"

    stage.engine.health = 503
    assert stage.until("stopping").faults[-1].what == "the engine reports that it is dead"


@pytest.mark.parametrize(("task", "ends"), [("embedding", False), ("health", True)])
def test_health_proves_no_work_of_another_node(ready: Make, task: str, ends: bool) -> None:
    """Requests need a lost node, but `/health` answers without it."""
    stage = ready()
    stage.engine.task = task
    stage.engine.counts = False
    stage.run(5)
    stage.lead.away["gpu2"] = "timed out"
    stage.run(60)

    assert bool(stage.status.faults) is ends


def test_the_state_of_ranks(ready: Make) -> None:
    """From the agents on their nodes; unknown without a report."""
    stage = ready()
    stage.run(6)
    assert stage.status.alive == {"gpu1": {"PP0": True}, "gpu2": {"PP1": True}}

    stage.lead.stale.add("gpu2")
    stage.run(6)
    assert stage.status.alive == {"gpu1": {"PP0": True}}
    stage.lead.stale.clear()
    stage.kill("gpu2")
    monitor = stage.keeper.server._engine()
    stage.step(0.1)
    assert monitor.living_ranks(stage.status)["gpu2"] == {"PP1": False}
    stage.until("pausing")
    assert stage.status.alive == {}


def test_the_state_of_ranks_of_ray(ready: Make, view: type[View]) -> None:
    """By process; unknown until first reported."""
    stage = ready(RAY)
    stage.lead.nodes["gpu1"].ranks = [41]
    stage.run(12)
    assert stage.status.alive == {"gpu1": {"PP0": True}}

    stage.lead.nodes["gpu2"].ranks = [42]
    stage.run(6)
    stage.lead.nodes["gpu2"].ranks = []
    stage.step()
    assert stage.keeper.server._engine().living_ranks(stage.status) == {
        "gpu1": {"PP0": True},
        "gpu2": {"PP1": False},
    }
