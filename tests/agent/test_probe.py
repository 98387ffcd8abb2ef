"""Queries of a server on the agent's own node, over a stand-in for vLLM's API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launcher.agent.answer import FirstAnswer, Refusal
from launcher.agent.probe import ApiProbe
from tests.agent.waits import until
from tests.agent.web import CHAT, Replicas, Server

pytestmark = pytest.mark.usefixtures("folders")
Start = Callable[..., ApiProbe]
COMPLETIONS = "/v1/chat/completions"


@pytest.fixture
def start(server: Server) -> Iterator[Start]:
    """Begin to look at the server."""
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
    """Let completions wait until somebody sets the event."""
    release = threading.Event()
    server.answers[COMPLETIONS] = lambda _: release.wait(20) and CHAT
    yield release
    release.set()


def answers(probe: ApiProbe) -> dict[str, int]:
    """Return how many answers each part has given."""
    return {key: count for key, (count, _) in probe.report().answers.items()}


def failure(probe: ApiProbe) -> list[Any]:
    """Return status and text of a canary that failed; empty while none does."""
    return list(probe.report().failing.get("", ()))[1:]


def refusal(probe: ApiProbe) -> Refusal:
    """Return how requests are refused."""
    first = probe.report().first
    return first if isinstance(first, Refusal) else Refusal(status=0, error="", times=0)


def test_a_server_is_asked_until_it_answers(server: Server, start: Start) -> None:
    """/health alone is no answer; what is said against a completion is told."""
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


def test_a_canary_is_small_and_comes_again(server: Server, start: Start) -> None:
    """One token after the first answer; every answer counts, with how long it took and what vLLM
    counts.
    """
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


def test_a_canary_that_is_late_is_waited_for(
    server: Server, start: Start, hang: threading.Event
) -> None:
    """It stands in the queue like any other request: one is enough, and it tells how long the queue
    is.
    """
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


def test_counters_go_on_while_a_canary_waits(
    server: Server, start: Start, hang: threading.Event
) -> None:
    """They are what tells a busy server from a dead one."""
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
def test_what_is_an_answer(server: Server, start: Start, status: int, odd: bool) -> None:
    """A refusal is one: the API key may have changed. A 5xx is told, and counts for nothing."""
    probe = start()
    until(lambda: probe.answers, "it answers")
    server.answers[COMPLETIONS] = (status, "no")
    count = probe.answers + 1  # one may be on its way
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
def test_a_server_that_rests(
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


def test_a_server_that_is_rescaled_rests(server: Server, start: Start) -> None:
    """vLLM answers 503 on every path while it rescales its expert parallelism."""
    probe = start()
    until(lambda: probe.answers, "the first answer")
    paths = ("/health", "/is_sleeping", "/is_paused", "/metrics", COMPLETIONS)
    server.answers |= dict.fromkeys(paths, SCALING)

    until(lambda: probe.report().rests == "it is being rescaled", "the report of rescaling")
    assert probe.report().health == 503


def test_an_engine_that_says_that_it_is_dead(server: Server, start: Start) -> None:
    """Its API lives on, and says 503."""
    probe = start()
    until(lambda: probe.answers, "it answers")
    server.answers |= {COMPLETIONS: (500, "EngineDeadError"), "/health": (503, "")}

    until(lambda: probe.report().health == 503 and failure(probe), "it is told")
    assert failure(probe) == [500, "EngineDeadError"]


def test_a_server_that_is_gone(server: Server, start: Start) -> None:
    """Nobody listens any more: no status, and why."""
    probe = start()
    until(lambda: probe.answers, "it answers")
    server.http.shutdown()
    server.http.server_close()

    until(lambda: "refused" in str(failure(probe)), "it is told")
    assert failure(probe)[0] == 0
    assert probe.report().health in (0, 200)


def test_each_replica_is_asked_in_its_turn(server: Server, start: Start) -> None:
    """By its number; an answer of one is an answer of the whole. Each has its own counters."""
    server.replicas = Replicas()
    probe = start(2)
    until(lambda: min(answers(probe).get(key, 0) for key in ("0", "1")) >= 2, "both answer")
    report = probe.report()

    assert answers(probe)[""] >= max(answers(probe)["0"], answers(probe)["1"])
    assert set(report.progress) == {"", "0", "1"}
    assert len(set(report.progress.values())) == 3


def test_a_server_begins_with_an_answer_of_each_replica(server: Server, start: Start) -> None:
    """One that does not answer is not ready, though the other one is."""
    server.replicas = Replicas(refusing={1: (400, "no")})
    probe = start(2)
    until(lambda: server.replicas and server.replicas.finished[0] > 10, "it is asked again")
    assert answers(probe) == {}
    server.replicas.refusing.clear()

    until(lambda: set(answers(probe)) == {"", "0", "1"}, "all answer")


def test_a_replica_that_hangs_keeps_no_other_from_being_asked(server: Server, start: Start) -> None:
    """Its own canary is late, and only its own."""
    release, replicas = threading.Event(), Replicas()
    find = server.find
    release.set()

    def slow(
        verb: str, path: str, query: str, requests: object, replica: int | None
    ) -> tuple[int, Any]:
        if replica == 1:
            release.wait(20)
        return find(verb, path, query, requests, replica)

    server.replicas, server.find = replicas, slow  # type: ignore[method-assign]
    probe = start(2)
    until(lambda: set(answers(probe)) == {"", "0", "1"}, "all answer")
    release.clear()
    until(lambda: probe.report().asking.get("1", 0) > 0.2, "one is late")
    count = answers(probe)["0"]
    until(lambda: answers(probe)["0"] > count + 2, "the other one answers")
    release.set()


def test_a_base_model_is_asked_as_it_can_answer(server: Server, start: Start) -> None:
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
def test_a_server_that_counts_nothing(server: Server, start: Start, metrics: Any) -> None:
    """Its answers are all that is known."""
    server.answers["/metrics"] = metrics
    probe = start()
    until(lambda: probe.answers >= 2, "it answers")

    assert probe.report().counters is None


@pytest.mark.parametrize("expected", ["", "[]", "{", '{"data": []}', '{"data": [{}]}', "7", "null"])
def test_answers_that_are_none(server: Server, start: Start, expected: str) -> None:
    """Somebody else has the port: it is asked again, and no thread ends."""
    server.answers["/v1/models"] = expected
    probe = start()
    until(
        lambda: sum(request[1] == "/v1/models" for request in server.requests) >= 2,
        "it is asked again",
    )
    assert answers(probe) == {}
    server.answers["/v1/models"] = {"data": [{"id": "m"}]}

    until(lambda: probe.answers, "it answers")


def test_nobody_asks_any_more(server: Server, start: Start) -> None:
    """An engine that has ended is not asked: another one may have its port."""
    probe = start()
    until(lambda: probe.answers, "it answers")
    probe.stop()
    requests = len(server.requests)
    threading.Event().wait(0.5)  # ten looks' time

    assert len(server.requests) - requests <= 3  # of the look that had begun


EMBEDDINGS = "/v1/embeddings"
EMBEDDED = {"data": [{"embedding": [0.5, 0.25]}]}


@pytest.fixture
def embeds(server: Server) -> Server:
    """A server whose model gives embeddings: it has no route for chats and completions."""
    del server.answers[COMPLETIONS]
    server.answers[EMBEDDINGS] = EMBEDDED
    return server


def test_a_model_is_asked_for_what_it_does(embeds: Server, start: Start) -> None:
    """The task of the first answer is reused; another one is tried once, and is no fault."""
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
    # A canary that is late has it asked, too, whether it rests.
    assert {path for path in posts[2:] if path.startswith("/v1/")} == {EMBEDDINGS}


def test_nothing_is_known_before_the_first_answer(embeds: Server, start: Start) -> None:
    """An embedding without numbers is none."""
    embeds.answers[EMBEDDINGS] = {"data": [{"embedding": []}]}
    probe = start()
    until(lambda: refusal(probe).times, "it has refused")
    assert (probe.report().task, answers(probe)) == ("", {})
    assert refusal(probe).error.startswith("no answer of /v1/embeddings: ")
    embeds.answers[EMBEDDINGS] = EMBEDDED

    until(lambda: probe.report().task == "embedding", "it answers")


@pytest.mark.parametrize("status", [400, 404, 405, 501])
def test_a_task_that_is_gone_is_no_fault(embeds: Server, start: Start, status: int) -> None:
    """The API answers, and says nothing of the engine."""
    probe = start()
    until(lambda: probe.answers, "it answers")
    embeds.answers[EMBEDDINGS] = (status, "no")
    count = probe.answers + 1

    until(lambda: probe.answers > count + 1, "answers count")
    assert probe.report().failing == {}


def test_where_vllm_chooses_the_replica_an_answer_is_every_ones(
    embeds: Server, start: Start
) -> None:
    """It reads the replica's number for completions only: whose answer it was nobody knows, and
    what is unknown is not still.
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
    """vLLM counts them by their numbers in the server, and hands requests to them by their place
    behind this API.
    """
    server.replicas = Replicas([7, 7], first=2)
    probe = start(2, first=2)
    until(lambda: min(answers(probe).get(key, 0) for key in ("", "2", "3")) >= 3, "all answer")

    assert set(probe.report().progress) == {"", "2", "3"}


def test_the_only_replica_behind_one_of_several_apis(server: Server, start: Start) -> None:
    """Its answers are the API's, and no number is sent, which vLLM would refuse."""
    server.replicas = Replicas([7], first=1)
    probe = start(1, first=1)
    until(lambda: min(answers(probe).get(key, 0) for key in ("", "1")) >= 3, "it answers")

    assert set(answers(probe)) == {"", "1"}


def test_where_nothing_fits_health_is_asked(server: Server, start: Start) -> None:
    """With what was said to everything else; when it says that the engine is dead, that is told."""
    del server.answers[COMPLETIONS]
    server.answers["/pooling"] = (400, "No IOProcessor plugin installed")
    probe = start()
    until(lambda: probe.answers >= 2, "it answers")
    report = probe.report()
    assert (report.task, report.failing) == ("health", {})
    assert report.first.refused == "/pooling: 400 No IOProcessor plugin installed"
    server.answers["/health"] = (503, "")

    until(lambda: probe.report().health == 503, "it is dead")
