"""Probes of a server on the agent's own node, over a fake vLLM API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launcher.agent.health.answer import FirstAnswer, Refusal
from launcher.agent.health.probe import ApiProbe
from tests.agent.waits import until
from tests.agent.web import CHAT, Replicas, Server

pytestmark = pytest.mark.usefixtures("folders")
Start = Callable[..., ApiProbe]
COMPLETIONS = "/v1/chat/completions"


@pytest.fixture
def start(server: Server) -> Iterator[Start]:
    """Start probing."""
    created: list[ApiProbe] = []

    def begin(replicas: int = 1, every: float = 0.05, first: int = 0) -> ApiProbe:
        behind = range(first, first + replicas) if first or replicas > 1 else range(0)
        created.append(ApiProbe("127.0.0.1", server.port, behind, every))
        return created[-1]

    yield begin
    for item in created:
        item.stop()


@pytest.fixture
def hang(server: Server) -> Iterator[threading.Event]:
    """Block completions until a test sets the event."""
    release = threading.Event()
    server.answers[COMPLETIONS] = lambda _: release.wait(60) and CHAT
    yield release
    release.set()


def answers(probe: ApiProbe) -> dict[str, int]:
    """Return the count of answers per replica."""
    return {key: count for key, (count, _) in probe.report().answers.items()}


def failure(probe: ApiProbe) -> list[Any]:
    """Return status and text of a failed canary; empty without one."""
    return list(probe.report().failing.get("", ()))[1:]


def refusal(probe: ApiProbe) -> Refusal:
    """Return the status and text of refused requests."""
    first = probe.report().first
    return first if isinstance(first, Refusal) else Refusal(status=0, error="", times=0)


def test_a_server_is_probed_until_it_answers(server: Server, start: Start) -> None:
    """`/health` is no answer; a refused completion is reported."""
    server.answers["/health"] = (503, "starting")
    probe = start()
    until(lambda: probe.report().health == 503, "it is asked")
    server.answers["/health"] = ""
    server.answers[COMPLETIONS] = (500, "not yet")
    until(lambda: refusal(probe).times > 1, "it has refused twice")
    refused = refusal(probe)
    assert (refused.status, refused.error, refused.task) == (500, "not yet", "chat")
    assert answers(probe) == {}
    server.answers[COMPLETIONS] = CHAT
    until(lambda: answers(probe).get("", 0) > 0, "it answers")

    report = probe.report()
    assert isinstance(report.first, FirstAnswer)
    assert (report.first.model, report.first.text, report.first.task) == ("m", "Hi", "chat")
    assert report.first.replicas == ()


def test_canaries_are_small_and_repeated(server: Server, start: Start) -> None:
    """One token after the first answer; all answers count, with duration and vLLM's counters."""
    probe = start()
    until(lambda: probe.answers >= 3, "three answers")
    until(lambda: probe.report().counters, "the counters were read")
    report = probe.report()

    assert {call[3]["max_tokens"] for call in server.requests if call[3]} == {8, 1}
    assert (report.health, report.rests, report.failing) == (200, "", {})
    assert 0 < report.seconds < 60
    assert (
        report.counters.running,
        report.counters.waiting,
        report.counters.tokens,
    ) == (8, 892, 7.0)
    assert list(report.progress) == [""]


def test_a_late_canary_is_awaited(server: Server, start: Start, hang: threading.Event) -> None:
    """It queues like any other request: one suffices, and shows the length of the queue."""
    hang.set()
    probe = start()
    until(lambda: probe.answers, "it answers")
    hang.clear()
    until(lambda: probe.report().asking.get("", 0) > 0.5, "it is late")
    requests = sum(request[1] == COMPLETIONS for request in server.requests)
    count = probe.answers
    until(lambda: probe.report().asking.get("", 0) > 0.8, "it is later")
    assert (sum(request[1] == COMPLETIONS for request in server.requests), probe.answers) == (
        requests,
        count,
    )
    hang.set()
    until(lambda: probe.answers > count, "it is back")

    assert probe.report().failing == {}


def test_counters_are_read_while_a_canary_waits(
    server: Server, start: Start, hang: threading.Event
) -> None:
    """They distinguish a busy server from a dead one."""
    hang.set()
    probe = start()
    until(lambda: probe.answers, "it answers")
    hang.clear()
    until(lambda: probe.report().asking, "it is late")
    digest = probe.report().progress[""]
    server.answers["/metrics"] = 'vllm:generation_tokens_total{engine="0"} 8.0\n'

    until(lambda: probe.report().progress[""] != digest, "they move")


@pytest.mark.parametrize(
    ("status", "odd"), [(500, True), (503, True), (400, False), (401, False), (429, False)]
)
def test_valid_answers(server: Server, start: Start, status: int, odd: bool) -> None:
    """A refusal counts: the API key may have changed. A 5xx is reported, but does not count."""
    probe = start()
    until(lambda: probe.answers, "it answers")
    server.answers[COMPLETIONS] = (status, "no")
    count = probe.answers + 1  # one may be in flight
    until(
        lambda: failure(probe) == [status, "no"] if odd else probe.answers > count + 1,
        "it has answered",
    )
    server.answers[COMPLETIONS] = CHAT
    until(lambda: not failure(probe), "all is well again")


@pytest.mark.parametrize(
    ("path", "field", "text"),
    [
        ("/is_sleeping", "is_sleeping", "it sleeps"),
        ("/is_paused", "is_paused", "it is paused"),
    ],
)
def test_a_paused_server(
    server: Server, start: Start, hang: threading.Event, path: str, field: str, text: str
) -> None:
    """A sleeping or paused server is reported as such once a canary is late."""
    hang.set()
    probe = start()
    until(lambda: probe.answers, "it answers")
    server.answers[path] = {field: True}
    hang.clear()
    until(lambda: probe.report().rests == text, "it is told")
    server.answers[path] = {field: False}
    until(lambda: probe.report().rests == "", "it is told again")


SCALING = (503, '{"error":"The model is currently scaling. Please try again later."}')


def test_a_rescaling_server_is_paused(server: Server, start: Start) -> None:
    """vLLM answers 503 on all paths while it rescales its expert parallelism."""
    probe = start()
    until(lambda: probe.answers, "the first answer")
    paths = ("/health", "/is_sleeping", "/is_paused", "/metrics", COMPLETIONS)
    server.answers |= dict.fromkeys(paths, SCALING)

    until(lambda: probe.report().rests == "it is being rescaled", "the report of rescaling")
    assert probe.report().health == 503


def test_an_engine_that_reports_its_death(server: Server, start: Start) -> None:
    """Its API runs on, and answers 503."""
    probe = start()
    until(lambda: probe.answers, "it answers")
    server.answers |= {COMPLETIONS: (500, "EngineDeadError"), "/health": (503, "")}

    until(lambda: probe.report().health == 503 and failure(probe), "it is told")
    assert failure(probe) == [500, "EngineDeadError"]


def test_an_exited_server(server: Server, start: Start) -> None:
    """The port is closed: no status, with the reason."""
    probe = start()
    until(lambda: probe.answers, "it answers")
    server.http.shutdown()
    server.http.server_close()

    until(lambda: "refused" in str(failure(probe)), "it is told")
    assert failure(probe)[0] == 0
    assert probe.report().health in (0, 200)


def test_replicas_are_probed_in_turn(server: Server, start: Start) -> None:
    """By number; one answer is an answer of the server. All have their own counters."""
    server.replicas = Replicas()
    probe = start(2)
    until(lambda: min(answers(probe).get(key, 0) for key in ("0", "1")) >= 2, "both answer")
    report = probe.report()

    assert answers(probe)[""] >= max(answers(probe)["0"], answers(probe)["1"])
    assert set(report.progress) == {"", "0", "1"}
    assert len(set(report.progress.values())) == 3


def test_the_first_answer_needs_all_replicas(server: Server, start: Start) -> None:
    """A server with a silent replica is not ready."""
    server.replicas = Replicas(refusing={1: (400, "no")})
    probe = start(2)
    until(lambda: server.replicas and server.replicas.finished[0] > 10, "it is asked again")
    assert answers(probe) == {}
    server.replicas.refusing.clear()

    until(lambda: set(answers(probe)) == {"", "0", "1"}, "all answer")


def test_a_hanging_replica_does_not_block_others(server: Server, start: Start) -> None:
    """Only its own canary is late."""
    release, replicas = threading.Event(), Replicas()
    find = server.find
    release.set()

    def slow(
        verb: str, path: str, query: str, requests: object, replica: int | None
    ) -> tuple[int, Any]:
        if replica == 1:
            release.wait(60)
        return find(verb, path, query, requests, replica)

    server.replicas, server.find = replicas, slow  # type: ignore[method-assign]
    probe = start(2)
    until(lambda: set(answers(probe)) == {"", "0", "1"}, "all answer")
    release.clear()
    until(lambda: probe.report().asking.get("1", 0) > 0.2, "one is late")
    count = answers(probe)["0"]
    until(lambda: answers(probe)["0"] > count + 2, "the other one answers")
    release.set()


def test_a_base_model(server: Server, start: Start) -> None:
    """The first working request is reused."""
    server.answers[COMPLETIONS] = (400, "no chat template")
    server.answers["/v1/completions"] = {
        "choices": [{"text": "x"}],
        "usage": {"completion_tokens": 1},
    }
    probe = start()
    until(lambda: probe.answers >= 3, "three answers")

    assert sum(request[1] == COMPLETIONS for request in server.requests) == 1


@pytest.mark.parametrize("metrics", ["", (404, "no"), "\x00", "vllm:generation_tokens_total x\n"])
def test_a_server_without_counters(server: Server, start: Start, metrics: Any) -> None:
    """Its answers are the only evidence."""
    server.answers["/metrics"] = metrics
    probe = start()
    until(lambda: probe.answers >= 2, "it answers")

    assert probe.report().counters is None


@pytest.mark.parametrize("expected", ["", "[]", "{", '{"data": []}', '{"data": [{}]}', "7", "null"])
def test_invalid_answers(server: Server, start: Start, expected: str) -> None:
    """Another program has the port: it is probed again, and no thread exits."""
    server.answers["/v1/models"] = expected
    probe = start()
    until(
        lambda: sum(request[1] == "/v1/models" for request in server.requests) >= 2,
        "it is asked again",
    )
    assert answers(probe) == {}
    server.answers["/v1/models"] = {"data": [{"id": "m"}]}

    until(lambda: probe.answers, "it answers")


def test_an_exited_engine_is_not_probed(server: Server, start: Start) -> None:
    """Another engine may have its port."""
    probe = start()
    until(lambda: probe.answers, "it answers")
    probe.stop()
    requests = len(server.requests)
    threading.Event().wait(0.5)  # the time of ten probes

    assert len(server.requests) - requests <= 3  # of the probe in progress


EMBEDDINGS = "/v1/embeddings"
EMBEDDED = {"data": [{"embedding": [0.5, 0.25]}]}


@pytest.fixture
def embeds(server: Server) -> Server:
    """A server of an embedding model, without routes for chats and completions."""
    del server.answers[COMPLETIONS]
    server.answers[EMBEDDINGS] = EMBEDDED
    return server


def test_a_model_is_probed_for_its_task(embeds: Server, start: Start) -> None:
    """The task of the first answer is reused; another one is tried once, without a fault."""
    probe = start()
    until(lambda: probe.answers >= 3, "three answers")
    report = probe.report()

    assert (report.task, report.failing, report.first.refused) == ("embedding", {}, "")
    assert (report.first.came, report.first.text) == (
        "an embedding of 2 numbers",
        "",
    )
    posts = [path for verb, path, *_ in embeds.requests if verb == "POST"]
    assert posts[:3] == [COMPLETIONS, "/v1/completions", EMBEDDINGS]
    # A late canary also makes the probe query the pause state.
    assert {path for path in posts[2:] if path.startswith("/v1/")} == {EMBEDDINGS}


def test_no_task_before_the_first_answer(embeds: Server, start: Start) -> None:
    """An embedding without numbers is no answer."""
    embeds.answers[EMBEDDINGS] = {"data": [{"embedding": []}]}
    probe = start()
    until(lambda: refusal(probe).times, "it has refused")
    assert (probe.report().task, answers(probe)) == ("", {})
    assert refusal(probe).error.startswith("no answer of /v1/embeddings: ")
    embeds.answers[EMBEDDINGS] = EMBEDDED

    until(lambda: probe.report().task == "embedding", "it answers")


@pytest.mark.parametrize("status", [400, 404, 405, 501])
def test_a_removed_task_is_no_fault(embeds: Server, start: Start, status: int) -> None:
    """The API answers, and reports no error of the engine."""
    probe = start()
    until(lambda: probe.answers, "it answers")
    embeds.answers[EMBEDDINGS] = (status, "no")
    count = probe.answers + 1

    until(lambda: probe.answers > count + 1, "answers count")
    assert probe.report().failing == {}


def test_unrouted_answers_count_for_all_replicas(embeds: Server, start: Start) -> None:
    """vLLM routes only completions by number: an unknown replica answered, and none counts as
    still.
    """
    named: list[tuple[str, int | None]] = []
    find = embeds.find

    def note(verb: str, path: str, query: str, requests: object, replica: int | None) -> Any:
        named.append((path, replica))
        return find(verb, path, query, requests, replica)

    embeds.find = note  # type: ignore[method-assign]
    probe = start(2)
    until(lambda: min(answers(probe).get(key, 0) for key in ("", "0", "1")) >= 4, "all answer")

    assert set(probe.report().asking) <= {""}
    assert [replica for path, replica in named if path == EMBEDDINGS][-2:] == [None, None]


def test_replicas_behind_one_of_several_apis(server: Server, start: Start) -> None:
    """vLLM counts them by number in the server, and routes to them by position behind this API."""
    server.replicas = Replicas([7, 7], first=2)
    probe = start(2, first=2)
    until(lambda: min(answers(probe).get(key, 0) for key in ("", "2", "3")) >= 3, "all answer")

    assert set(probe.report().progress) == {"", "2", "3"}


def test_a_single_replica_behind_an_api(server: Server, start: Start) -> None:
    """Its answers are the API's, and no number is sent, which vLLM would reject."""
    server.replicas = Replicas([7], first=1)
    probe = start(1, first=1)
    until(lambda: min(answers(probe).get(key, 0) for key in ("", "1")) >= 3, "it answers")

    assert set(answers(probe)) == {"", "1"}


def test_health_is_the_last_resort(server: Server, start: Start) -> None:
    """With the refusals of all requests; a dead engine is reported."""
    del server.answers[COMPLETIONS]
    server.answers["/pooling"] = (400, "No IOProcessor plugin installed")
    probe = start()
    until(lambda: probe.answers >= 2, "it answers")
    report = probe.report()
    assert (report.task, report.failing) == ("health", {})
    assert report.first.refused == "/pooling: 400 No IOProcessor plugin installed"
    server.answers["/health"] = (503, "")

    until(lambda: probe.report().health == 503, "it is dead")
