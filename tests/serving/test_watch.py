"""Waiting for a server: phases from recorded logs, readiness by a completion, and every failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.desired import Desired, Policy
from launcher.agent.health.verdicts import server_verdict
from launcher.core.domain import Answer, Inventory, Node
from launcher.core.errors import (
    DeadlineError,
    ServerError,
    StoppedError,
    UnwatchedError,
    VlaunchError,
)
from launcher.core.events import Event
from launcher.core.transport import Command
from launcher.serving.serve_plan import plan_serve
from launcher.serving.serve_request import ServeRequest
from launcher.serving.watch import ReadyServer, summary_json, watch_start
from launcher.tools.site import Site
from launcher.tools.site.placement import choose_placement, narrow_inventory
from launcher.tools.site.snapshot import ClusterSnapshot
from tests.fakes import FakeTransport
from tests.simulated import query

LOGS = Path(__file__).parents[1] / "fixtures" / "vllm"
NODES = (
    Node(name="n1", host="n1", ip="10.0.0.1", gpus=1, head=True),
    Node(name="n2", host="n2", ip="10.0.0.2", gpus=1),
)
INVENTORY = Inventory(path=Path("inventory.yaml"), cluster="c", image="i", nodes=NODES)
ANSWERED = {
    "model": "m",
    "fingerprint": "vllm-pp2",
    "text": "Hi",
    "came": "",
    "refused": "",
    "task": "chat",
    "seconds": 0.5,
    "replicas": [],
}
CAPACITY = {"kv_cache_size_tokens": "65536", "kv_cache_max_concurrency": "128.0"}


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


@dataclass
class World:
    """A head and a node with an API that return `sequence` in turn, the last one repeatedly; sleeps
    advance the time.
    """

    sequence: list[dict[str, Any]]
    spec: Desired
    now: float = 0.0
    position: int = -1

    def current(self) -> dict[str, Any]:
        return self.sequence[min(max(self.position, 0), len(self.sequence) - 1)]

    def answer(self, command: Command) -> Answer:
        argv, node = command.argv, command.node
        path = query(argv)
        if path == "servers":
            assert (node, self.spec.api_node) == ("n1", "n2")
            self.position += 1
            return self._answer(node, self.current()["head"], self.servers)
        assert path == "watch"
        assert (node, "name=default&" in argv[-1]) == (self.spec.api_node, True)
        if node == "n1":
            self.position += 1
            api, head = self.current()["api"], self.current()["head"]
            if isinstance(head, Answer):
                return self._answer(node, head, self.servers)
            return self._answer(node, api, lambda answer: {**answer, **self.servers({**head})})
        return self._answer(node, self.current()["api"], lambda answer: answer)

    def servers(self, head: dict[str, Any]) -> dict[str, Any]:
        defaults = {
            "version": 2,
            "name": "default",
            "id": self.spec.id,
            "asked": 7.0,
            "model": "m",
            "state": "starting",
        }
        record = head.pop("observed", {})
        server = {
            "name": "default",
            "desired": self.spec.as_json(),
            "observed": None if record is None else {**defaults, **record},
        }
        agent = head.pop("looked", 1.0)
        return {"servers": [{**server, "age": 1.0, **head}], "members": {}, "agent": agent}

    def _answer(
        self, node: str, part: Any, complete: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> Answer:
        return (
            replace(part, node=node)
            if isinstance(part, Answer)
            else Answer(node=node, code=0, out=json.dumps(complete({**part})))
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_answers(
    text: str = "",
    state: str = "starting",
    listening: bool = False,
    anew: bool = False,
    **fields: Any,
) -> dict[str, Any]:
    """Return the answers to one query; `fields` belong to the supervisor's record."""
    api = {"log": text, "offset": len(text.encode()), "anew": anew, "listening": listening}
    record = {
        "state": state,
        "generation": 1,
        "verdict": server_verdict(state, len(fields.get("faults", ()))),
        "reason": fields.get("doing", ""),
        **fields,
    }
    return {"head": {"observed": record}, "api": api}


def failed(
    what: str = "vLLM ended with exit code 1", state: str = "failed", **fault: Any
) -> dict[str, Any]:
    """Return the answers for a server whose supervisor has given up."""
    return make_answers(state=state, faults=[{"at": 1.0, "what": what, **fault}])


READY: dict[str, Any] = {
    "state": "ready",
    "listening": True,
    "verdict": "answering",
    "first_answer": ANSWERED,
    "held": {"n1": CAPACITY},
}


def refusal(status: int, error: str, times: int = 3, **fields: Any) -> dict[str, Any]:
    """Return the answers for a starting server that rejects the supervisor's first request."""
    first = {"status": status, "error": error, "times": times, **fields}
    return make_answers(listening=True, first_answer=first)


def make_spec(
    dp: int = 1, backend: Any = "ray", nodes: tuple[str, ...] = (), args: tuple[str, ...] = ()
) -> Desired:
    split = choose_placement(
        narrow_inventory(INVENTORY, nodes), 1, len(nodes or NODES) // dp, dp=dp, backend=backend
    )
    request = ServeRequest(
        model="m",
        placement=split,
        backend=backend,
        host="0.0.0.0",
        port=8000,
        nodes=nodes,
        args=args,
    )
    return plan_serve(
        ClusterSnapshot(site=Site(INVENTORY)), request, requested_at=7.0, policy=Policy()
    ).spec


def follow(
    *sequence: dict[str, Any],
    timeout: float = 600,
    attached: bool = False,
    dp: int = 1,
    **options: Any,
) -> tuple[World, list[Event], ReadyServer]:
    """Wait until a server has answered; after an error, `events` are the earlier ones."""
    world = World(list(sequence), make_spec(dp, **options))
    events: list[Event] = []
    generator = watch_start(
        Site(INVENTORY),
        world.spec,
        FakeTransport(world.answer),
        timeout=timeout,
        attached=attached,
        clock=lambda: world.now,
        sleep=world.sleep,
    )
    while True:
        try:
            events.append(next(generator))
        except StopIteration as over:
            return world, events, over.value
        except VlaunchError as error:
            error.events, error.world = events, world  # type: ignore[attr-defined]
            raise


def in_pieces(text: str, count: int) -> list[dict[str, Any]]:
    lines = text.splitlines(keepends=True)
    size = len(lines) // count + 1
    return [make_answers("".join(lines[i : i + size])) for i in range(0, len(lines), size)]


def test_a_start_is_reported_in_phases() -> None:
    """Every phase once, in order, at its end; the last step is a completion."""
    _, events, served = follow(
        make_answers(), *in_pieces(log("serve_ray_pp2_ok"), 40), make_answers(**READY)
    )
    done = [event.text for event in events if event.kind == "step"]

    assert done[0] == "starting vLLM"
    assert done[-1] == "a completion received"
    assert "loading weights" in done
    assert len(done) == len(set(done))
    assert served.first.fingerprint == "vllm-pp2"


def waits(events: list[Event]) -> list[str]:
    return [event.text for event in events if event.kind == "wait"]


@pytest.mark.parametrize(
    ("doing", "message"),
    [
        (
            "GPU 3 of gpu01: 60 GiB held by python (pid 4711)",
            "GPU 3 of gpu01: 60 GiB held by python (pid 4711)",
        ),
        ("waiting for 10.0.0.2 to be in Ray", "waiting for n2 to be in Ray"),
        ("", "pending"),
    ],
)
def test_the_reason_of_a_wait_is_reported(doing: str, message: str) -> None:
    """The supervisor's text, with node names."""
    _, events, _ = follow(
        make_answers(state="waiting", doing=doing), make_answers(), make_answers(**READY)
    )

    assert waits(events)[0] == message
    assert waits(events)[1] == "starting vLLM"
    waiting = [event for event in events if event.kind == "wait"]
    seconds = [event.seconds for event in waiting]
    assert seconds == sorted(seconds)
    assert 0 <= seconds[0] < seconds[-1] < 60


def test_a_server_without_a_supervisor_yet() -> None:
    """The supervisor has not read the spec, or its record is of the previous server."""
    before = make_answers(state="ready", asked=6.0)
    _, events, _ = follow(
        {**make_answers(), "head": {"observed": None}}, before, make_answers(**READY)
    )

    assert set(waits(events)[:2]) == {"the head's agent has not picked it up yet"}


def test_a_recovering_server_is_awaited() -> None:
    """Neither the dead engine's log nor its API's answer ends the wait."""
    died: dict[str, Any] = {"faults": [{"at": 1.0, "what": "rank 1 on 10.0.0.2 ended"}]}
    _, events, served = follow(
        make_answers(log("serve_ray_pp2_ok")),
        make_answers(log("fail_rank_killed"), "stopping", listening=True, **died),
        *[
            make_answers(
                state="pausing",
                doing="starting again in 5 s, after rank 1 on 10.0.0.2 ended",
                **died,
            )
        ]
        * 12,
        make_answers(log("serve_ray_pp2_ok"), anew=True, **died),
        make_answers(**READY, **died),
    )

    assert served.first.fingerprint == "vllm-pp2"
    assert "restarting: starting again in 5 s, after rank 1 on n2 ended" in waits(events)
    assert any(text.startswith("restarting: getting the first answer") for text in waits(events))
    assert not [event for event in events if event.kind == "warning"]


def test_a_supervisor_that_gave_up() -> None:
    """The engine's own first error comes first, then the supervisor's evidence."""
    over = failed(
        "restart limit of 3 reached in an hour",
        "gave-up",
        cause="ValueError: no such thing",
        evidence="one\ntwo",
    )
    with pytest.raises(ServerError, match="ValueError: no such thing") as raised:
        follow(over)

    assert (
        raised.value.evidence
        == "raised on n1\nthe supervisor gave up: restart limit of 3 reached in an hour\none\ntwo"
    )
    assert "vlaunch stop" not in raised.value.hint


def test_a_long_cause_is_complete_in_the_evidence() -> None:
    """The first line has only its beginning."""
    cause = "ValueError: " + "no such thing, " * 20
    with pytest.raises(ServerError) as raised:
        follow(failed("restart limit of 3 reached in an hour", "gave-up", cause=cause))

    assert cause.strip() in raised.value.evidence
    assert raised.value.message.endswith("…")


def test_the_result() -> None:
    """Endpoint, ranks by node, capacity and times as observed."""
    _, _, served = follow(make_answers(**READY, ranks={"n1": ["PP0"], "n2": ["PP1"]}))

    assert summary_json(served) == {
        "endpoint": "http://10.0.0.1:8000/v1",
        "endpoints": ["http://10.0.0.1:8000/v1"],
        "model": "m",
        "ranks": {"n1": ["PP0"], "n2": ["PP1"]},
        "kv_cache_tokens": 65536,
        "max_concurrency": 128.0,
        "system_fingerprint": "vllm-pp2",
        "seconds": 0.0,
        "first_answer_seconds": 0.5,
    }


def test_ranks_without_names() -> None:
    """The planned placement is shown instead."""
    assert follow(make_answers(**READY))[2].ranks == {"n1": ("1 rank",), "n2": ("1 rank",)}


def test_an_api_on_another_node_than_the_head() -> None:
    """The head has its state; the API's node has log and address."""
    _, events, served = follow(
        *in_pieces(log("serve_mp_pp2_node0_ok"), 9),
        make_answers(**READY),
        backend="mp",
        nodes=("n2",),
        dp=1,
    )

    assert served.endpoints == ("http://10.0.0.2:8000/v1",)
    assert "loading weights" in [event.text for event in events if event.kind == "step"]


def test_listening_is_not_ready() -> None:
    """Only the supervisor's verdict ends the wait; meanwhile the server's error is shown."""
    late = refusal(0, "replica 1 did not answer: timed out", times=9)
    _, events, _ = follow(make_answers(listening=True), late, make_answers(**READY))

    assert "starting vLLM (replica 1 did not answer: timed out)" in waits(events)


@pytest.mark.parametrize("state", ["quiet", "suspect", "resting", "unknown"])
def test_a_server_that_no_longer_answers(state: str) -> None:
    """The wait continues, and its verdict is shown; a busy server counts as ready."""
    fields = {**READY, "verdict": state, "reason": "no step has ended for 99 s"}
    with pytest.raises(DeadlineError, match=f"{state}: no step has ended for 99 s"):
        follow(make_answers(**fields), timeout=20, attached=True)

    follow(make_answers(**{**READY, "verdict": "busy"}), timeout=20, attached=True)


def test_a_stale_record_of_the_agent() -> None:
    """It does not tell whether the server is dead."""
    stale = make_answers(**READY)
    with pytest.raises(UnwatchedError, match="the head's agent has not reported for 99 s"):
        follow({**stale, "head": {**stale["head"], "looked": 99.0}})


def test_attaching_reports_no_phases_of_the_past() -> None:
    """The old log of a running server is read, but not reported."""
    _, events, _ = follow(make_answers(log("serve_ray_pp2_ok"), **READY, anew=True), attached=True)

    assert [event.text for event in events if event.kind == "step"] == ["a completion received"]


@pytest.mark.parametrize(
    ("name", "cause", "line"),
    [
        (
            "fail_cpu_platform_refuses_ray",
            "no Ray platform plugin",
            "current platform cpu does not support ray",
        ),
        ("fail_gloo_loopback", "wrong network interface", "connectFullMesh failed"),
        (
            "fail_cpu_shm_across_hosts",
            "did not start: RuntimeError: open shm",
            "open shm in SHMManager failed",
        ),
        ("fail_validation", "not dense models", "not supported/useful for dense models"),
    ],
)
def test_a_failed_start(name: str, cause: str, line: str) -> None:
    """The engine's exit ends the wait at once, with cause, evidence, and a hint."""
    with pytest.raises(ServerError) as raised:
        follow(*in_pieces(log(name), 5), failed())

    assert raised.value.message.startswith("the server did not start: ")
    assert cause in raised.value.message
    assert line in f"{raised.value.message}\n{raised.value.evidence}"
    assert raised.value.hint
    assert raised.value.world.now < 10  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "message", "evidence"),
    [
        ("serve_ray_memory", "host memory", "10.61.0.11, RayWorkerProc pid=711: ValueError: Avail"),
        ("serve_mp_memory", "host memory", "n1, VllmWorker-0 pid=1943: ValueError: Available"),
        ("serve_ray_compiler", "no compiler", "10.61.0.12, Worker_PP1 pid=284: torch._inductor"),
        ("serve_mp_compiler", "no compiler", "n1, Worker_PP0 pid=2302: torch._inductor.exc.Ind"),
        ("serve_ray_argument", "rejected an argument", "vllm: error: unrecognized arguments: --no"),
        ("serve_mp_context", "context is longer", "n1: Value error, User-specified max_model_len"),
    ],
)
def test_a_wrong_argument_is_reported_once_and_first(
    name: str, message: str, evidence: str
) -> None:
    """With node and process, and without its consequences."""
    text = (LOGS.parent / "causes" / f"{name}.log").read_text()
    with pytest.raises(ServerError) as raised:
        follow(*in_pieces(text, 5), failed())

    assert message in raised.value.message
    assert raised.value.evidence.startswith(evidence)
    assert len(raised.value.evidence.splitlines()) == 2
    assert raised.value.evidence.endswith("vLLM ended with exit code 1")


def test_an_unknown_failure_has_its_exception() -> None:
    """Of the effect, only the fix is used."""
    text = log("fail_validation").replace("not supported/useful for dense models", "of a new kind")
    with pytest.raises(ServerError) as raised:
        follow(*in_pieces(text, 5), failed())

    assert "Offline data parallel mode is of a new kind" in raised.value.message
    assert raised.value.hint.startswith("correct the argument")


def test_a_fatal_line_is_reported_at_once() -> None:
    """With its query; a server that does not exit fails after a few seconds."""
    with pytest.raises(ServerError, match="cannot continue: the weights and the buffers") as raised:
        follow(
            make_answers("RuntimeError: No available memory for the cache blocks\n"), make_answers()
        )
    first = next(event for event in raised.value.events if event.kind == "warning")  # type: ignore[attr-defined]

    assert first.state == "failed"
    assert "`vlaunch stop default`" in raised.value.hint
    assert 5 < raised.value.world.now < 15  # type: ignore[attr-defined]


FATAL = "ERROR RuntimeError: No available memory for the cache blocks\n"


@pytest.mark.parametrize("attached", [False, True])
def test_a_completion_outweighs_a_fatal_line(attached: bool) -> None:
    """A server that answers is ready, even when its log is read again from byte 0."""
    _, events, _ = follow(make_answers(FATAL, **READY), attached=attached)

    assert [event.state for event in events if event.kind == "warning"] == ["warn"]


def test_a_fatal_line_does_not_count_while_the_server_listens() -> None:
    """Its first completions may take long."""
    follow(make_answers(FATAL), *[make_answers(listening=True)] * 30, make_answers(**READY))


def test_a_server_that_continues_after_a_fatal_line() -> None:
    """A growing log, or a new phase, shows that the line was not the end."""
    busy = [make_answers(f"line {i}\n") for i in range(20)]
    follow(make_answers(FATAL), *busy, make_answers(**READY))
    silent = [make_answers()] * 30
    follow(
        make_answers(FATAL),
        make_answers("Starting to load model x\n"),
        *silent,
        make_answers(**READY),
    )


def test_a_fatal_line_counts_when_the_server_stops_listening() -> None:
    """The error names the line."""
    with pytest.raises(ServerError, match="cannot continue: the weights and the buffers"):
        follow(make_answers(listening=True), make_answers(FATAL), make_answers())


def test_a_warning_does_not_end_the_wait() -> None:
    """It is reported once: too few GPUs may become enough."""
    wait = "Waiting for creating a placement group of specs for {} seconds. specs=[]\n"
    _, events, _ = follow(
        make_answers(wait.format(30)), make_answers(wait.format(70)), make_answers(**READY)
    )

    assert [event.state for event in events if event.kind == "warning"] == ["warn"]


def test_an_engine_that_leaves_no_log() -> None:
    """The supervisor's evidence is shown instead; it may contain any bytes."""
    with pytest.raises(ServerError) as raised:
        follow(
            failed(cause="OSError: disk \x1b[2Jquota", evidence="\x1b[31mRuntime env setup failed")
        )

    assert "OSError: disk " in raised.value.message
    assert "Runtime env setup failed" in raised.value.evidence
    assert "\x1b" not in raised.value.message + raised.value.evidence


@pytest.mark.parametrize(
    ("head", "message"),
    [({"desired": None}, "an operator removed it"), ({"name": "other"}, "an operator removed it")],
)
def test_a_server_that_an_operator_stops(head: dict[str, Any], message: str) -> None:
    """`vlaunch stop` elsewhere ends the wait, and the error names it."""
    dying = (
        "*** SIGTERM received at time=1 on cpu 1 ***\nvllm.v1.engine.exceptions.EngineDeadError:"
        " EngineCore\n"
    )
    with pytest.raises(StoppedError, match="was stopped while") as stopped:
        follow(make_answers(), make_answers(dying), {**make_answers(), "head": head})

    assert (stopped.value.evidence, stopped.value.hint) == (
        message,
        "see who stopped it: `vlaunch audit`",
    )
    assert [event for event in stopped.value.events if event.kind == "warning"] == []  # type: ignore[attr-defined]


def test_a_server_that_an_operator_replaces() -> None:
    """Another server of its name, or a new start, is not the awaited one."""
    other = {**make_spec().as_json(), "asked": 8.0, "model": "n"}
    with pytest.raises(StoppedError) as stopped:
        follow(make_answers(), {**make_answers(), "head": {"desired": other}})

    assert stopped.value.evidence == "n has replaced it"


def test_several_endpoints() -> None:
    """Addresses and times per endpoint; capacities are summed."""
    apart: dict[str, Any] = {"dp": 2, "backend": "mp", "args": ("--data-parallel-hybrid-lb",)}
    first = {**ANSWERED, "seconds": 0.75, "replicas": [0.5, 0.75]}
    both = {"n1": CAPACITY, "n2": CAPACITY}
    _, _, served = follow(make_answers(**{**READY, "first_answer": first, "held": both}), **apart)

    assert served.endpoints == ("http://10.0.0.1:8000/v1", "http://10.0.0.2:8000/v1")
    assert (served.first.replicas, served.first.seconds) == ((0.5, 0.75), 0.75)
    assert summary_json(served)["replica_seconds"] == [0.5, 0.75]
    assert (served.capacity.tokens, served.capacity.concurrency) == (131072, 256.0)


@pytest.mark.parametrize("status", [401, 403])
def test_another_api_key(status: int) -> None:
    """A server with an unknown key will not change its mind."""
    with pytest.raises(ServerError, match="different API key"):
        follow(refusal(status, "Unauthorized", times=1))


def test_an_api_that_rejects_all_requests() -> None:
    """Three refusals are enough; the last one is shown."""
    follow(refusal(500, "EngineCore is sad", times=2), make_answers(**READY))
    with pytest.raises(ServerError, match="returned no completion") as raised:
        follow(refusal(500, "EngineCore is sad"))

    assert raised.value.evidence == "500: EngineCore is sad"


def test_refusals_of_a_dead_engine_do_not_count() -> None:
    """The supervisor starts another one."""
    died = {"state": "stopping", "faults": [{"at": 1.0, "what": "rank 1 on 10.0.0.2 ended"}]}
    first = {"status": 500, "error": "EngineDeadError", "times": 9}
    follow(make_answers(**died, first_answer=first), make_answers(**READY))


@pytest.mark.parametrize(
    ("stands", "message"),
    [
        (make_answers("Starting to load model x\n"), "loading weights"),
        (
            make_answers(state="waiting", doing="GPU 3 of n2: 60 GiB held by python"),
            "GPU 3 of n2: 60 GiB held by python",
        ),
    ],
)
def test_the_deadline(stands: dict[str, Any], message: str) -> None:
    """The wait ends with the current state, and the server keeps running."""
    with pytest.raises(DeadlineError, match=f"within 20s; currently: {message}") as late:
        follow(stands, {**stands, "api": make_answers()["api"]}, timeout=20)

    assert "it keeps starting" in late.value.hint
    assert late.value.world.now == pytest.approx(20, abs=1.5)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "trouble",
    [
        Answer(node="", code=255, err="connection lost"),
        Answer(node="", code=1, out='{"error": "timed out"}'),
    ],
)
def test_a_head_that_is_silent_for_a_while(trouble: Answer) -> None:
    """Some queries may fail; many in a row end the wait, with the server in an unknown state."""
    mute = {**make_answers(), "head": trouble}
    follow(make_answers(), mute, mute, make_answers(**READY))
    with pytest.raises(UnwatchedError, match="lost contact with server `default`") as lost:
        follow(make_answers(), mute)

    assert "may still be running" in lost.value.hint
    assert lost.value.world.now > 40  # type: ignore[attr-defined]


def test_a_restarting_container_is_awaited() -> None:
    """While the supervisor answers, the server counts as running."""
    mute = {**make_answers(), "api": Answer(node="", code=1, err="container is restarting")}
    world, _, _ = follow(
        make_answers(), *[mute] * 60, make_answers(**READY), backend="mp", nodes=("n2",)
    )

    assert world.now > 50


def test_stopping_to_watch_queries_nothing() -> None:
    """Closing the generator sends no command."""
    world = World([make_answers()], make_spec())
    transport = FakeTransport(world.answer)
    generator = watch_start(
        Site(INVENTORY),
        world.spec,
        transport,
        timeout=60,
        clock=lambda: world.now,
        sleep=world.sleep,
    )
    next(generator)
    before = len(transport.commands)
    generator.close()

    assert len(transport.commands) == before


EMBEDDED = {
    **ANSWERED,
    "text": "",
    "fingerprint": "",
    "task": "embedding",
    "came": "an embedding of 128 numbers",
}


def test_an_embedding_model_is_ready_with_an_embedding() -> None:
    """It is named, without tokens and a fingerprint."""
    _, events, served = follow(make_answers(**{**READY, "first_answer": EMBEDDED}))

    assert [event.text for event in events if event.state == "ok"][-1] == (
        "an embedding of 128 numbers received"
    )
    assert (served.first.task, served.first.came) == ("embedding", "an embedding of 128 numbers")
    assert summary_json(served)["answer"] == "an embedding of 128 numbers"


def test_a_server_with_health_alone() -> None:
    """A warning has the rejected request: perhaps none of its endpoints works."""
    alone = {
        "task": "health",
        "came": "an answer of `/health` alone",
        "refused": "/pooling: 400 no",
    }
    _, events, served = follow(make_answers(**{**READY, "first_answer": {**EMBEDDED, **alone}}))

    assert served.first.task == "health"
    (warning,) = [event.text for event in events if event.kind == "warning"]
    assert warning.endswith("so only `/health` is checked (/pooling: 400 no)")


def test_a_server_that_returns_no_embedding() -> None:
    """The error names the kind of answer."""
    with pytest.raises(ServerError, match="returned no embedding") as raised:
        follow(refusal(200, "no answer of /v1/embeddings: {}", task="embedding"))

    assert raised.value.evidence.startswith("200: no answer of")
