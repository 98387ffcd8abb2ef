"""Watching a server: phases from recorded logs, readiness only by a completion, and every way in which none comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import DeadlineError, NodeError, StoppedError, UnwatchedError, VlaunchError
from launcher.events import Event
from launcher.model import Answer, Inventory, Node
from launcher.placement import choose
from launcher.plan.serve import Request
from launcher.plan.watched import as_job, as_ranks, endpoint
from launcher.transport import Command
from launcher.watch import Served, summary, watch
from tests.fakes import FakeTransport

LOGS = Path(__file__).parent / "fixtures" / "vllm"
NODES = (
    Node(name="n1", host="n1", ip="10.0.0.1", gpus=1, head=True),
    Node(name="n2", host="n2", ip="10.0.0.2", gpus=1),
)
INVENTORY = Inventory(path=Path("inventory.yaml"), cluster="c", image="i", nodes=NODES)
ANSWERED = {"status": 200, "tokens": 3, "text": "Hi", "model": "m", "system_fingerprint": "vllm-pp2", "seconds": 0.5}
CAPACITY = {"kv_cache_size_tokens": "65536", "kv_cache_max_concurrency": "128.0"}


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def table(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"data": {"result": {"result": list(rows)}}}


@dataclass
class World:
    """A head that says, look by look, what `looks` holds (the last one for ever), and a clock that sleeping moves."""

    looks: list[dict[str, Any] | Answer]
    completions: list[dict[str, Any]] = field(default_factory=lambda: [ANSWERED])
    states: dict[str, str] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    now: float = 0.0
    seen: int = -1
    asked: int = 0

    def look(self) -> dict[str, Any] | Answer:
        return self.looks[min(max(self.seen, 0), len(self.looks) - 1)]

    def answer(self, command: Command) -> Answer:
        argv, node = command.argv, command.node
        if "watch" in argv:
            self.seen += 1
            return self._json(node, self.look())
        if "complete" in argv:
            self.asked += 1
            return self._json(node, self.completions[min(self.asked, len(self.completions)) - 1])
        if "jobs" in argv:
            actors = [{"name": f"vllm_Worker_17_PP{i}", "state": "ALIVE", "node_id": f"id{i}"} for i in (0, 1)]
            nodes = [{"node_id": f"id{i}", "node_ip": f"10.0.0.{i + 1}", "state": "ALIVE"} for i in (0, 1)]
            return self._json(node, {"actors": table(*actors), "nodes": table(*nodes)})
        if "inspect" in argv:
            if node == "n1":
                self.seen += 1
            if self.states.get(node) == "unknown":
                return Answer(node=node, code=1, err="Cannot connect to the Docker daemon at unix:///var/run/docker.sock")
            if self.states.get(node) == "gone":
                return Answer(node=node, code=1, out="[]\n", err=f"Error response from daemon: No such container: {argv[-1]}")
            return self._json(node, [self._container(node)])
        if "server" in argv:
            return self._json(node, self.look())
        if argv[:2] == ("sh", "-c") and "tail" in argv[2]:
            said = self.look()
            assert isinstance(said, dict)
            return Answer(node=node, code=0, out=str(said.get("log", ""))[int(argv[5]) - 1 :])
        return Answer(node=node, code=0, out=self.logs.get(node, ""))

    def _json(self, node: str, said: object) -> Answer:
        return said if isinstance(said, Answer) else Answer(node=node, code=0, out=json.dumps(said))

    def _container(self, node: str) -> dict[str, Any]:
        status = self.states.get(node, "running")
        state = {"Status": status, "ExitCode": 0 if status == "running" else 1}
        return {"Id": "1", "Name": "/x", "Config": {}, "State": state}

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def look(text: str = "", status: str = "RUNNING", health: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "job": {"submission_id": "serve-1", "status": status, **more}, "log": text, "offset": len(text.encode()),
        "health": health, "capacity": CAPACITY if health == 200 else {},
    }  # fmt: skip


def follow(
    world: World, *, mp: bool = False, timeout: float = 600, attached: bool = False, dp: int = 1
) -> tuple[list[Event], Served]:
    split = choose(INVENTORY, 1, 2 // dp, dp=dp)
    request = Request(model="m", placement=split, backend="ray", host="0.0.0.0", port=8000)
    watched = as_ranks(INVENTORY, request) if mp else as_job(INVENTORY, request, "serve-1")
    events: list[Event] = []
    generator = watch(
        watched, FakeTransport(world.answer), timeout=timeout, attached=attached, clock=lambda: world.now, sleep=world.sleep
    )
    while True:
        try:
            events.append(next(generator))
        except StopIteration as over:
            return events, over.value
        except VlaunchError as error:
            error.events = events  # type: ignore[attr-defined]
            raise


def in_pieces(text: str, count: int) -> list[dict[str, Any]]:
    lines = text.splitlines(keepends=True)
    size = len(lines) // count + 1
    return [look("".join(lines[i : i + size])) for i in range(0, len(lines), size)]


def test_a_start_is_told_in_phases() -> None:
    """Each phase is told once, in order, when it is over; the end is a completion."""
    world = World([look(), *in_pieces(log("serve_ray_pp2_ok"), 40), look(health=200)])
    events, served = follow(world)
    done = [event.text for event in events if event.kind == "step"]

    assert done[0] == "starting vLLM"
    assert done[-1] == "a completion has come back"
    assert "loading weights" in done
    assert len(done) == len(set(done))
    assert served.fingerprint == "vllm-pp2"


def recovering(text: str, doing: str, state: str = "recovering", **more: Any) -> dict[str, Any]:
    return {**look(text, **more), "supervised": {"id": "1", "state": state, "doing": doing, "wanted": True, "age": 1}}


AGAIN = "vlaunch supervisor: starting the engine again (restart 1 of 3 in 3600s)\n"


def test_a_server_that_recovers_is_waited_for() -> None:
    """What its log says of the engine that died is no end, nor what a dead engine's API answers; nodes have their names."""
    dead = log("fail_rank_killed")
    world = World(
        [
            look(log("serve_ray_pp2_ok")),
            *[recovering(dead, "waiting for 10.0.0.2 to be in Ray again", health=200)] * 12,
            recovering(AGAIN + log("serve_ray_pp2_ok"), "starting the engine"),
            look(health=200),
        ],
        completions=[ANSWERED],
    )
    events, served = follow(world)
    waited = [event.text for event in events if event.kind == "wait"]

    assert served.fingerprint == "vllm-pp2"
    assert "recovering: waiting for n2 to be in Ray again" in waited
    assert any(text.startswith("recovering: getting the first answer") for text in waited)
    assert not [event for event in events if event.kind == "warning"]
    assert world.asked == 1


def test_a_supervisor_that_gave_up() -> None:
    """Its reason comes before Ray's."""
    with pytest.raises(NodeError) as raised:
        follow(World([recovering("bye\n", "no restart is left of 3 in 1 h", state="gave-up", status="FAILED")]))

    assert "gave up: no restart is left of 3 in 1 h" in str(raised.value)


def test_what_was_observed() -> None:
    """Endpoint, ranks by node, capacity and times come back as they were seen."""
    _, served = follow(World([look(health=200)]))

    assert summary(served) == {
        "endpoint": "http://10.0.0.1:8000/v1",
        "model": "m",
        "ranks": {"n1": ["PP0"], "n2": ["PP1"]},
        "kv_cache_tokens": 65536,
        "max_concurrency": 128.0,
        "system_fingerprint": "vllm-pp2",
        "seconds": 0.0,
        "first_answer_seconds": 0.5,
    }


def test_healthy_is_not_ready() -> None:
    """`/health` says 200 and no completion comes: it is asked again, and only a completion ends the wait."""
    world = World([look(health=200)], completions=[{"status": 0, "error": "timed out"}, {"status": 200, "tokens": 0}, ANSWERED])
    follow(world)

    assert world.asked == 3


def test_attaching_tells_no_phases_of_the_past() -> None:
    """The log of a server that has been up for long is read, but not told again."""
    events, _ = follow(World([look(log("serve_ray_pp2_ok"), health=200)]), attached=True)

    assert [event.text for event in events if event.kind == "step"] == ["a completion has come back"]


@pytest.mark.parametrize(
    ("name", "cause", "line"),
    [
        ("fail_cpu_platform_refuses_ray", "no Ray platform plugin", "current platform cpu does not support ray"),
        ("fail_gloo_loopback", "wrong network interface", "connectFullMesh failed"),
        ("fail_cpu_shm_across_hosts", "the engine failed: RuntimeError: open shm", "open shm in SHMManager failed"),
        ("fail_validation", "this model is dense", "not supported/useful for dense models"),
    ],
)
def test_a_start_that_fails(name: str, cause: str, line: str) -> None:
    """The job's end ends the wait at once, with the cause, the line that shows it, and a hint."""
    world = World([*in_pieces(log(name), 5), look(status="FAILED", driver_exit_code=1)])
    with pytest.raises(NodeError) as failed:
        follow(world)

    assert failed.value.message.startswith("the server did not start: ")
    assert cause in failed.value.message
    assert line in failed.value.evidence
    assert failed.value.hint
    assert world.now < 10


def test_a_failure_that_nobody_knows_leads_to_the_doctor() -> None:
    """Its exception is told, and what looks at all nodes is named."""
    text = log("fail_validation").replace("not supported/useful for dense models", "of a new kind")
    with pytest.raises(NodeError) as failed:
        follow(World([*in_pieces(text, 5), look(status="FAILED", driver_exit_code=1)]))

    assert "Offline data parallel mode is of a new kind" in failed.value.message
    assert failed.value.hint.startswith("look at every node: `vlaunch doctor`")


def test_a_fatal_line_is_told_at_once() -> None:
    """It is told with the look that saw it; a server that does not end by itself then is given up after a few seconds."""
    world = World([look("RuntimeError: No available memory for the cache blocks\n"), look()])
    with pytest.raises(NodeError, match="cannot go on: the model and its KV cache do not fit") as failed:
        follow(world)
    first = next(event for event in failed.value.events if event.kind == "warning")  # type: ignore[attr-defined]

    assert first.state == "failed"
    assert "vlaunch stop" in failed.value.hint
    assert 5 < world.now < 15


FATAL = "ERROR RuntimeError: No available memory for the cache blocks\n"


@pytest.mark.parametrize("attached", [False, True])
def test_a_completion_outdoes_a_fatal_line(attached: bool) -> None:
    """A line is read in the wrong way more easily than an answer: who answers serves, also when watched again from byte 0."""
    events, _ = follow(World([look(FATAL, health=200)]), attached=attached)

    assert [event.state for event in events if event.kind == "warning"] == ["warn"]


def test_a_healthy_server_is_not_given_up_for_a_line() -> None:
    """Its first completions may take long; only silence of `/health` counts."""
    slow = [{"status": 0, "error": "timed out"}] * 30
    follow(World([look(FATAL), look(health=200)], completions=[*slow, ANSWERED]))


def test_a_server_that_goes_on_after_a_fatal_line() -> None:
    """A log that grows, or a phase that begins, shows that the line was not the end."""
    busy = [look(f"line {i}\n") for i in range(20)]
    follow(World([look(FATAL), *busy, look(health=200)]))
    silent = [look()] * 30
    follow(World([look(FATAL), look("Starting to load model x\n"), *silent, look(health=200)]))


def test_a_server_that_was_healthy_and_falls_silent() -> None:
    """What killed it is still known."""
    world = World([look(health=200), look(FATAL, health=503), look()], completions=[{"status": 0, "error": "timed out"}])
    with pytest.raises(NodeError, match="cannot go on: the model and its KV cache do not fit"):
        follow(world)


def test_a_warning_is_told_once_and_waited_through() -> None:
    """Too few GPUs may become enough."""
    wait = "Waiting for creating a placement group of specs for {} seconds. specs=[]\n"
    world = World([look(wait.format(30)), look(wait.format(70)), look(health=200)])
    events, _ = follow(world)

    assert [event.state for event in events if event.kind == "warning"] == ["warn"]


def test_a_job_that_leaves_no_log() -> None:
    """What Ray says about it is shown instead."""
    with pytest.raises(NodeError) as failed:
        follow(World([look(status="FAILED", message="Runtime env setup failed: disk quota")]))

    assert "disk quota" in failed.value.evidence


def test_a_server_that_somebody_stops() -> None:
    """`vlaunch stop` elsewhere ends the watching here, and says so."""
    dying = "*** SIGTERM received at time=1 on cpu 1 ***\nvllm.v1.engine.exceptions.EngineDeadError: EngineCore\n"
    with pytest.raises(StoppedError, match="was stopped while") as stopped:
        follow(World([look(), look(dying), look(status="STOPPED")]))

    assert stopped.value.hint == "see who stopped it: `vlaunch audit`"
    assert [event for event in stopped.value.events if event.kind == "warning"] == []  # type: ignore[attr-defined]


def replicas(*answered: bool, **last: Any) -> dict[str, Any]:
    """What the head says of a completion and of each replica's; `last` is of the last one."""
    each = [{"status": 200, "seconds": 0.25, "error": "", "answered": done} for done in answered]
    return {**ANSWERED, "replicas": [*each[:-1], {**each[-1], **last}]}


def test_every_replica_must_answer() -> None:
    """A completion of one replica ends no wait; who is missing is said, and all are asked again."""
    world = World([look(health=200)], completions=[replicas(True, False), replicas(True, True)])
    events, served = follow(world, dp=2)

    assert world.asked == 2
    assert served.replicas == (0.25, 0.25)
    assert summary(served)["replica_seconds"] == [0.25, 0.25]
    assert any("no answer yet from DP1" in event.text for event in events if event.kind == "wait")


def test_a_replica_that_only_refuses() -> None:
    """Three refusals of one replica are enough, although the others answer."""
    refused = replicas(True, False, status=500, error="EngineCore is sad")
    world = World([look(health=200)], completions=[refused])
    with pytest.raises(NodeError, match="gives no completion") as failed:
        follow(world, dp=2)

    assert (world.asked, failed.value.evidence) == (3, "500: DP1: EngineCore is sad")


def test_a_replica_that_stays_silent() -> None:
    """The deadline names it."""
    world = World([look(health=200)], completions=[replicas(False, True, status=0, error="timed out")])
    with pytest.raises(DeadlineError, match="within 20s; no answer yet from DP0"):
        follow(world, dp=2, timeout=20)


@pytest.mark.parametrize(("dp", "engines"), [(1, ()), (2, ("--engines", "2"))])
def test_replicas_are_asked_for(dp: int, engines: tuple[str, ...]) -> None:
    """The head is told how many there are, and has time for two rounds of them."""
    request = Request(model="m", placement=choose(INVENTORY, 1, 2 // dp, dp=dp), backend="mp", host="::", port=8000)
    for watched in (as_job(INVENTORY, request, "serve-1"), as_ranks(INVENTORY, request)):
        asked = watched.complete(60)

        assert asked.argv[-len(engines) :] == engines or not engines
        assert ("--engines" in asked.argv) is bool(engines)
        assert asked.timeout == 60 * dp + 30


def test_replicas_are_told_by_their_containers() -> None:
    """The log of each rank container tells which replicas it holds."""
    looks: list[dict[str, Any] | Answer] = [{"log": log("serve_mp_dp2_node0_ok"), "health": 200, "capacity": CAPACITY}]
    logs = {"n1": log("serve_mp_dp2_node0_ok"), "n2": log("serve_mp_dp2_node1_ok")}
    _, served = follow(World(looks, completions=[replicas(True, True)], logs=logs), mp=True, dp=2)

    assert served.ranks == {"n1": ("DP0",), "n2": ("DP1",)}


@pytest.mark.parametrize("status", [401, 403])
def test_another_api_key(status: int) -> None:
    """A server that demands a key we do not have will not change its mind."""
    world = World([look(health=200)], completions=[{"status": status, "error": "Unauthorized"}])
    with pytest.raises(NodeError, match="another API key"):
        follow(world)

    assert world.asked == 1


def test_an_api_that_only_refuses() -> None:
    """Three refusals are enough; the last one is shown."""
    world = World([look(health=200)], completions=[{"status": 500, "error": "EngineCore is sad"}])
    with pytest.raises(NodeError, match="gives no completion") as failed:
        follow(world)

    assert (world.asked, failed.value.evidence) == (3, "500: EngineCore is sad")


def test_the_deadline_says_where_it_stands() -> None:
    """The wait ends, the server goes on, and both are said."""
    world = World([look("Starting to load model x\n"), look()])
    with pytest.raises(DeadlineError, match="within 20s; it is still loading weights") as late:
        follow(world, timeout=20)

    assert "goes on" in late.value.hint
    assert world.now == pytest.approx(20, abs=1.5)


@pytest.mark.parametrize(
    "trouble", [Answer(node="n1", code=255, err="connection lost"), Answer(node="n1", code=1, out='{"error": "timed out"}')]
)
def test_a_head_that_is_silent_for_a_while(trouble: Answer) -> None:
    """A few looks may fail; many in a row end the watching, and the server is not said to be dead."""
    follow(World([look(), trouble, trouble, look(health=200)]))
    world = World([look(), trouble])
    with pytest.raises(UnwatchedError, match="cannot be watched any more") as lost:
        follow(world)

    assert "may well go on" in lost.value.hint
    assert world.now > 40


def test_ranks_are_watched_by_their_containers() -> None:
    """Rank 0's log tells the phases; every container's own log tells which rank it holds."""
    text = log("serve_mp_pp2_node0_ok")
    looks = [{"log": text[:5000]}, {"log": text[:5040]}, {"log": text, "health": 200, "capacity": CAPACITY}]
    ok = World(looks, logs={"n1": text, "n2": log("serve_mp_pp2_node1_ok")})
    events, served = follow(ok, mp=True)
    done = [event.text for event in events if event.kind == "step"]

    assert served.ranks == {"n1": ("TP0 PP0",), "n2": ("TP0 PP1",)}
    assert len(done) == len(set(done))
    assert "loading weights" in done


def test_a_rank_that_ends_is_fatal() -> None:
    """Rank 0 would wait for ever: the node is named, and its own log tells why."""
    world = World([{"log": "non-default args: x\n"}], states={"n2": "exited"}, logs={"n2": "ValueError: no such thing\n"})
    with pytest.raises(NodeError, match="ValueError: no such thing") as failed:
        follow(world, mp=True)

    assert "the rank on n2 ended with exit code 1" in failed.value.evidence
    assert "n2: ValueError: no such thing" in failed.value.evidence
    assert "vlaunch stop" in failed.value.hint


def test_ranks_that_somebody_removes() -> None:
    """Docker keeps what has ended: with no container left, `vlaunch stop` was at work. A single one is a lost rank."""
    with pytest.raises(StoppedError, match="was stopped while"):
        follow(World([{"log": ""}], states={"n1": "gone", "n2": "gone"}), mp=True)
    with pytest.raises(NodeError, match="did not start: the rank on n2 is gone"):
        follow(World([{"log": ""}], states={"n2": "gone"}), mp=True)
    with pytest.raises(NodeError, match="did not start: the rank on n1 is gone"):  # Docker does not say so
        follow(World([{"log": ""}], states={"n1": "unknown", "n2": "unknown"}), mp=True)


@pytest.mark.parametrize(
    ("bind", "url"),
    [
        ("0.0.0.0", "http://10.0.0.1:8000/v1"),
        ("::", "http://10.0.0.1:8000/v1"),
        ("127.0.0.1", "http://127.0.0.1:8000/v1"),
        ("fd00::1", "http://[fd00::1]:8000/v1"),
    ],
)
def test_endpoint(bind: str, url: str) -> None:
    """Where clients go: the head's address between the nodes, or the one address that was asked for."""
    assert endpoint(INVENTORY, bind, 8000) == url


def test_stopping_to_watch_asks_nothing_more() -> None:
    """Closing the watch sends nothing: the server is not told."""
    world = World([look()])
    request = Request(model="m", placement=choose(INVENTORY, 1, 2), backend="ray", host="0.0.0.0", port=8000)
    transport = FakeTransport(world.answer)
    sleep: Callable[[float], None] = world.sleep
    generator = watch(as_job(INVENTORY, request, "serve-1"), transport, timeout=60, clock=lambda: world.now, sleep=sleep)
    next(generator)
    before = len(transport.commands)
    generator.close()

    assert len(transport.commands) == before
