"""State of a running engine: progress, messages, ranks, and the cost of a death."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.agent import apis, records
from launcher.agent.desired import Desired
from launcher.agent.node import KEEP
from launcher.agent.probe import ProbeReport
from launcher.agent.ray_view import RayRank
from launcher.agent.task import ONLY_HEALTH
from tests.agent import specs
from tests.agent.specs import AWAY, RAY
from tests.agent.stage import Engine, Make, Node, Stage, View


def test_a_node_that_cannot_be_asked_ends_nothing_while_work_is_done(ready: Make) -> None:
    """The control network had a hiccup; that the node is away is said."""
    stage = ready()
    stage.lead.away["gpu2"] = "its connection closed"
    stage.run(1000, step=5)
    assert (stage.status.state, stage.status.faults) == ("ready", [])
    assert stage.status.warning == "no answer from the agent of gpu2"
    assert stage.status.verdict == "answering"

    stage.lead.away.clear()
    stage.run(5)
    assert (stage.status.state, stage.status.warning, stage.status.generation) == ("ready", "", 1)


def test_a_node_that_is_gone_with_its_rank(ready: Make) -> None:
    """No answer and no counter for three canaries, though the other ranks are busy waiting for
    it.
    """
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


def test_a_node_that_may_come_back_in_a_moment(ready: Make) -> None:
    """Its connection was closed just now: that alone says nothing, whatever else stands still."""
    stage = ready()
    stage.lead.away["gpu2"] = ""
    stage.engine.answers = False
    stage.run(60)

    assert (stage.status.state, stage.status.faults) == ("ready", [])


def test_a_container_that_was_started_anew(ready: Make) -> None:
    """Its rank is gone with it, however quickly its agent is back; it is not started alone."""
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
def test_an_agent_that_is_silent_makes_nothing_stand_still(
    make: Make, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last report is no news: it is stopped, or the network drops its messages."""
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
    """Stands in for the probe that the head itself sends out."""

    def __init__(self, payload: dict[str, Any]) -> None:
        self.payload, self.stopped = payload, False

    def report(self) -> ProbeReport:
        """Return what it saw."""
        return records.parse_record(ProbeReport, self.payload, "report")

    def stop(self) -> None:
        """Look no more."""
        self.stopped = True


@pytest.mark.parametrize(
    ("bound", "host"), [("0.0.0.0", "10.0.0.2"), ("::", "10.0.0.2"), ("192.0.2.7", "192.0.2.7")]
)
def test_an_api_whose_agent_is_silent_is_asked_from_here(
    ready: Make, monkeypatch: pytest.MonkeyPatch, bound: str, host: str
) -> None:
    """It serves on, and the record goes on saying so; when the agent is back, it is believed
    again.
    """
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
def test_a_server_that_rests_is_left_alone(ready: Make, text: str) -> None:
    """Somebody wants it so; when it wakes, it has all the time that a server has."""
    stage = ready()
    stage.engine = Engine(answers=False, resting=text)
    stage.run(1000, step=2)
    assert (stage.status.verdict, stage.status.faults, stage.status.reason) == ("resting", [], text)
    assert (stage.status.still, stage.status.longest_step) == (0.0, 0.0)

    stage.engine.resting = ""
    stage.run(29)
    assert stage.status.verdict == "busy"


def test_a_503_of_a_rescaled_server_is_no_death(ready: Make) -> None:
    """While expert parallelism is rescaled, `/health` answers 503; afterwards 503 means dead."""
    stage = ready()
    stage.engine = Engine(answers=False, health=503, resting="it is being rescaled")
    stage.run(600, step=2)
    assert (stage.status.state, stage.status.faults) == ("ready", [])

    stage.engine.resting = ""
    stage.run(5)
    assert len(stage.status.faults) == 1


def replicas() -> Desired:
    """Two replicas, one on each node."""
    first = specs.process("gpu1", replicas=(0, 1))
    second = specs.process("gpu2", *specs.HEADLESS, replicas=(1, 1))
    return specs.mp("gpu1", "gpu2", processes=(first, second), replicas=2)


def test_a_replica_that_ends_no_step_is_quiet(ready: Make) -> None:
    """Though the other one answers meanwhile: half of all requests would never come back."""
    stage = ready(replicas())
    stage.engine.mute = ("1",)
    stage.run(32)

    assert stage.status.verdict == "quiet"
    assert stage.status.reason.startswith("no step of replica 1 has ended for 3")


def test_an_answer_of_500_ends_nothing_while_others_are_served(ready: Make) -> None:
    """The fault may be in our request. The verdict is withdrawn when one succeeds."""
    stage = ready()
    stage.engine.failing, stage.engine.works = (500, "grammar error"), True
    stage.run(1000, step=2)
    assert (stage.status.verdict, stage.status.faults) == ("busy", [])
    assert stage.status.reason == "canary failed: HTTP 500: grammar error"

    stage.engine.failing = None
    stage.run(2)
    assert (stage.status.verdict, stage.status.reason) == ("answering", "")


@pytest.mark.parametrize("how", [{"health": 503}, {"failing": (500, "EngineDeadError: x")}])
def test_an_engine_that_says_that_it_is_dead(ready: Make, how: dict[str, Any]) -> None:
    """Its API may live on for long; what it printed is the evidence."""
    stage = ready()
    stage.lead.nodes["gpu1"].extra = {"evidence": "lines", "cause": "RuntimeError: x"}
    stage.engine = Engine(answers=False, **how)
    (fault,) = stage.until("stopping", within=3).faults

    assert (fault.what, fault.evidence, fault.cause) == (
        "the engine reports that it is dead",
        "lines",
        "RuntimeError: x",
    )


def test_a_server_that_starts_may_say_503(make: Make) -> None:
    """It is not ready yet."""
    stage = make()
    stage.engine = Engine(takes=50, health=503)
    stage.run(40)
    assert (stage.status.state, stage.status.faults) == ("starting", [])


def test_a_busy_server_says_so(ready: Make) -> None:
    """Running and waiting requests, tokens per second, and the ages of the canaries."""
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


def test_requests_that_were_lost_while_nobody_looked_are_unknown(ready: Make) -> None:
    """Figures of a minute ago say nothing."""
    stage = ready()
    stage.engine.open = 3
    stage.run(10)
    stage.engine.counts = False
    stage.run(60)
    stage.kill("gpu2")

    assert stage.until("pausing").faults[0].lost is None


def test_the_ranks_of_ray_are_watched(ready: Make, view: type[View]) -> None:
    """Each node is told the processes of its own; only the first one starts anything."""
    stage = ready(RAY)

    assert stage.status.ranks == {"gpu1": ["PP0"], "gpu2": ["PP1"]}
    assert {node: item.pids for node, item in stage.orders.items()} == {
        "gpu1": (41,),
        "gpu2": (42,),
    }
    assert (stage.orders["gpu2"].argv, stage.phases) == ((), {"gpu1": KEEP, "gpu2": KEEP})


def test_ranks_are_told_in_their_order(make: Make, view: type[View]) -> None:
    """Ray's table has none: nodes as the server has them, ranks by their numbers."""
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


def test_ray_is_asked_until_it_has_all_ranks(make: Make, view: type[View]) -> None:
    """Engines are in it before their ranks, and one replica's before the other's; until then what
    it said last counts.
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


def test_ranks_that_ray_does_not_tell_at_once_are_asked_for_again(
    make: Make, view: type[View]
) -> None:
    """Its dashboard is late."""
    result, view.placed = view.placed, []
    stage = make(RAY)
    stage.until("ready")
    stage.run(5)
    assert stage.status.ranks == {}
    view.placed = result
    stage.run(15)
    assert stage.status.ranks == {"gpu1": ["PP0"], "gpu2": ["PP1"]}


def with_ranks(ready: Make, *, met: bool = True) -> Stage:
    """Return a server that is ready, whose ranks Ray runs and, where they are `met`, agents see."""
    stage = ready(RAY)
    stage.lead.nodes["gpu1"].ranks = [41]
    stage.lead.nodes["gpu2"].ranks = [42] if met else []
    stage.run(15)
    return stage


def test_a_rank_that_has_ended_under_an_engine_that_goes_on(ready: Make, view: type[View]) -> None:
    """vLLM may wait for ever for what its rank would have answered; the agent beside it knows."""
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


def test_ranks_that_come_back_are_forgiven(ready: Make, view: type[View]) -> None:
    """An agent that reports them again was wrong, or they were not these."""
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
def test_a_rank_of_which_nothing_is_known_ends_nothing(
    ready: Make, view: type[View], why: str
) -> None:
    """Its process was never seen, its agent cannot be asked now, or the server is scaled."""
    stage = with_ranks(ready, met=why != "unmet")
    stage.lead.nodes["gpu2"].ranks = []
    if why == "silent":
        stage.lead.stale.add("gpu2")
    if why == "rests":
        stage.engine.resting = "it is being scaled"
    stage.run(60)

    assert (stage.status.state, stage.status.faults) == ("ready", [])


def test_a_node_with_ranks_of_ray_that_was_started_anew(ready: Make, view: type[View]) -> None:
    """Its ranks are gone with it, though the engine has not noticed."""
    stage = ready(RAY)
    stage.run(5)
    stage.lead.nodes["gpu2"] = Node(boot="b2")
    (fault,) = stage.until("stopping", within=5).faults

    assert (fault.what, fault.node, fault.rank) == (
        "the container of gpu2 was restarted",
        "gpu2",
        "PP1",
    )


def test_a_node_with_ranks_of_ray_that_is_gone(ready: Make, view: type[View]) -> None:
    """Only if the engine does no work without it."""
    stage = ready(RAY)
    stage.run(5)
    stage.lead.away["gpu2"] = "no report for 60 s"
    stage.run(100)
    assert stage.status.state == "ready"
    stage.engine.answers = False
    (fault,) = stage.until("stopping", within=20).faults

    assert (fault.what, fault.node, fault.rank) == ("gpu2 is gone", "gpu2", "PP1")


def test_what_a_model_does_is_written_down(ready: Make) -> None:
    """Once it has answered; a restart finds it out anew: another model may be behind it then."""
    stage = ready(specs.mp("gpu1"))
    assert stage.status.task == "chat"
    stage.engine.task = "embedding"
    stage.kill("gpu1")
    status = stage.until("starting", within=30)
    assert status.task == ""

    assert stage.until("ready").task == "embedding"


@pytest.mark.parametrize("task", ["", "7", "poetry"])
def test_a_task_that_nobody_knows_changes_nothing(ready: Make, task: str) -> None:
    """An agent of another version may say what it likes: answers count all the same."""
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
def test_a_model_that_embeds_is_called_so(
    ready: Make, failing: tuple[int, str], expected: str
) -> None:
    """In reasons, too."""
    stage = ready()
    stage.engine.task, stage.engine.failing = "embedding", failing
    stage.run(2)

    assert stage.status.reason == expected


def test_where_health_is_all_there_is_it_is_believed_and_said(ready: Make) -> None:
    """A server that nobody can ask anything else lives as long as `/health` says so."""
    stage = ready()
    stage.engine.task, stage.engine.refused = "health", "/pooling: 400 no plugin"
    stage.run(1000, step=5)
    assert (stage.status.state, stage.status.faults) == ("ready", [])
    assert stage.status.warning == f"{ONLY_HEALTH} (/pooling: 400 no plugin)"

    stage.engine.health = 503
    assert stage.until("stopping").faults[-1].what == "the engine reports that it is dead"


@pytest.mark.parametrize(("task", "ends"), [("embedding", False), ("health", True)])
def test_the_word_of_health_is_no_work_of_another_node(ready: Make, task: str, ends: bool) -> None:
    """A node that is gone is missed by every request, but not by `/health`: it answers without
    it.
    """
    stage = ready()
    stage.engine.task = task
    stage.engine.counts = False
    stage.run(5)
    stage.lead.away["gpu2"] = "timed out"
    stage.run(60)

    assert bool(stage.status.faults) is ends


def test_each_rank_lives_or_does_not(ready: Make) -> None:
    """As the agents beside them say; of one that is not heard nobody knows."""
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


def test_each_rank_of_ray_lives_or_does_not(ready: Make, view: type[View]) -> None:
    """By its process; one that nobody has seen yet is unknown."""
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
