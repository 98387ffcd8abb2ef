"""What an agent answers the launcher, over its Unix socket, against stand-ins for Ray's dashboard
and vLLM's API.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.payload.agent import process, queries
from launcher.payload.agent.observed import Observed
from launcher.payload.agent.server import Server as Http
from tests.payload.agent import wanted
from tests.payload.agent.waits import until
from tests.payload.agent.web import Server, rows

Ask = Callable[..., tuple[int, Any]]


class OverUnix(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("agent", timeout=30)
        self.path = path

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(self.path)


@pytest.fixture
def agent() -> Any:
    """The part of the head's agent that is asked: it has just turned, and hears another node's."""
    return SimpleNamespace(
        lock=threading.RLock(),
        lead=SimpleNamespace(heard=lambda: {"gpu1": 0.0, "gpu2": 5.0}),
        keepers={},
        turned=time.monotonic(),
    )


@pytest.fixture
def ask(folders: Path, agent: Any) -> Iterator[Ask]:
    """Ask the agent for a path, or POST a body; return the status and the JSON."""
    path = str(folders / "a.sock")
    http = Http(queries.site(path, agent))
    http.start()
    until(lambda: http.bound, "it listens")

    def get(path_and_query: str, body: str | None = None) -> tuple[int, Any]:
        connection = OverUnix(path)
        connection.request("GET" if body is None else "POST", path_and_query, body)
        answer = connection.getresponse()
        text = answer.read().decode()
        said = json.loads(text) if text.startswith("{") else text
        connection.close()
        return answer.status, said

    yield get
    http.close()


def folder(folders: Path, name: str, **files: object) -> Path:
    """Write a server's files."""
    (folders / "state" / name).mkdir()
    for file, said in files.items():
        text = said if isinstance(said, str) else json.dumps(said)
        (folders / "state" / name / f"{file}.json").write_text(text)
    return folders / "state" / name


# ---- servers -------------------------------------------------------------------------------------


def test_servers(folders: Path, agent: Any, ask: Ask) -> None:
    """What is wanted stands in files; how a server is, its keeper says, as of the last turn."""
    want = wanted.mp("gpu1").as_json()
    old = Observed(name="chat", id="abcd1234", asked=1.0, state="starting", written=1.0)
    folder(folders, "chat", desired=want, observed=old.as_json())
    folder(folders, "embed", observed=old.as_json())
    live = Observed(name="chat", id="abcd1234", asked=1.0, state="ready", written=1.0)
    agent.keepers["chat"] = SimpleNamespace(status=live)
    agent.turned -= 3
    status, said = ask("/servers")
    chat, embed = said["servers"]

    assert (status, chat["name"], chat["desired"]["id"]) == (200, "chat", want["id"])
    assert (chat["observed"]["state"], embed["observed"]["state"]) == ("ready", "starting")
    assert chat["observed"]["written"] == pytest.approx(time.time() - 3, abs=1)
    assert embed["desired"] is None
    assert 3 <= chat["age"] == said["agent"] < 30
    assert 3 <= said["members"]["gpu1"] == pytest.approx(said["members"]["gpu2"] - 5)


def test_no_server_yet(ask: Ask) -> None:
    """Nothing is known of any."""
    assert ask("/servers")[1]["servers"] == []


def test_an_agent_that_keeps_no_servers(agent: Any, ask: Ask) -> None:
    """Only the head's does."""
    agent.lead = None

    assert ask("/servers") == (200, {})


@pytest.mark.parametrize("said", ["", "{", "[]", "7", "{}", '{"written": null}', '"x"'])
def test_files_that_are_spoiled_spoil_no_answer(folders: Path, ask: Ask, said: str) -> None:
    """The other server's are told all the same."""
    folder(folders, "bad", observed=said, desired=said)
    folder(folders, "chat", observed=Observed(name="chat", id="x", asked=1.0).as_json())
    status, found = ask("/servers")

    assert (status, found["servers"][1]["observed"]["id"]) == (200, "x")


def test_a_main_loop_that_hangs(agent: Any, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how its servers are, and it is said so."""
    monkeypatch.setattr(queries, "_TURN", 0.1)
    with agent.lock:
        status, said = ask("/servers")

    assert status == 502
    assert said["error"].startswith("the agent's main loop hangs since ")


# ---- Ray -----------------------------------------------------------------------------------------


def tables(server: Server) -> None:
    """Let Ray have its tables."""
    for what in ("nodes", "actors", "placement_groups"):
        server.answers[f"/api/v0/{what}"] = rows({"what": what})


def test_jobs(server: Server, folders: Path, ask: Ask) -> None:
    """Jobs without a submission id are Ray's own drivers and left out; the rest of what is known
    comes along.
    """
    server.answers["/api/jobs/"] = [
        {
            "submission_id": "batch-1",
            "status": "RUNNING",
            "metadata": {},
            "driver_info": {"pid": 1},
        },
        {"submission_id": None, "status": "RUNNING"},
    ]
    tables(server)
    folder(folders, "chat")
    at = f"127.0.0.1:{server.port}"
    status, said = ask(f"/jobs?dashboard={server.port}&peers=127.0.0.1:1,{at}")

    assert (status, said["unreachable"]) == (200, ["127.0.0.1:1"])
    assert [job["submission_id"] for job in said["jobs"]] == ["batch-1"]
    assert "driver_info" not in said["jobs"][0]
    assert said["groups"] == rows({"what": "placement_groups"})
    assert [each["name"] for each in said["servers"]] == ["chat"]
    assert {"members", "agent"} <= set(said)


def test_jobs_without_ray(server: Server, ask: Ask) -> None:
    """Nobody is asked who is not there."""
    status, said = ask("/jobs?peers=127.0.0.1:1")

    assert (status, said["unreachable"], said["servers"]) == (200, ["127.0.0.1:1"], [])
    assert not {"jobs", "nodes", "actors", "groups"} & set(said)
    assert server.asked == []


def test_nodes(server: Server, ask: Ask) -> None:
    """With the text of `ray status`; addresses that the head cannot open are named."""
    server.answers["/api/v0/nodes"] = {"data": 1}
    server.answers["/api/cluster_status"] = {
        "data": {"clusterStatus": "======== Autoscaler status"}
    }
    _, said = ask(f"/nodes?dashboard={server.port}&peers=127.0.0.1:{server.port},127.0.0.1:1")

    assert said == {
        "nodes": {"data": 1},
        "status": "======== Autoscaler status",
        "unreachable": ["127.0.0.1:1"],
    }


@pytest.mark.parametrize("answer", [(404, "no such page"), {"data": {}}, []])
def test_a_ray_whose_dashboard_gives_no_status(answer: Any, server: Server, ask: Ask) -> None:
    """The node table is what counts; the text is empty."""
    server.answers["/api/v0/nodes"] = {"data": 1}
    server.answers["/api/cluster_status"] = answer
    status, said = ask(f"/nodes?dashboard={server.port}")

    assert (status, said["status"]) == (200, "")


def test_a_dashboard_that_is_not_up_is_an_error(server: Server, ask: Ask) -> None:
    """The servers are known all the same."""
    server.answers["/api/jobs/"] = (503, "starting")

    status, said = ask(f"/jobs?dashboard={server.port}")

    assert (status, said["error"], said["servers"]) == (200, "starting", [])


@pytest.mark.parametrize("path", ["/nodes?dashboard=x", "/watch", "/counts?apis=x&timeout=1"])
def test_a_query_that_makes_no_sense_is_an_error(path: str, ask: Ask) -> None:
    """Of another version of the launcher, say."""
    status, said = ask(path)

    assert (status, list(said)) == (502, ["error"])


# ---- vLLM ----------------------------------------------------------------------------------------


def test_counts_of_several_apis(server: Server, ask: Ask) -> None:
    """Lines that are shown, and no others; of who does not answer, why; and what `servers` says."""
    server.answers["/metrics"] = (
        '# HELP x\npython_info 1.0\nvllm:num_requests_running{engine="0"} 8.0\n'
        "vllm:num_requests_running_created 1.0\n"
        'vllm:time_to_first_token_seconds_bucket{le="0.1"} 2.0\n'
        "vllm:time_to_first_token_seconds_sum 2.0\n"
    )
    good, closed = f"127.0.0.1:{server.port}", "[::1]:1"
    status, said = ask(f"/counts?timeout=5&apis={good},%5B::1%5D:1")

    assert (status, said["servers"]) == (200, [])
    assert said["apis"][good]["text"].splitlines() == [
        'vllm:num_requests_running{engine="0"} 8.0',
        'vllm:time_to_first_token_seconds_bucket{le="0.1"} 2.0',
    ]
    assert (said["apis"][closed]["status"], said["apis"][closed]["text"]) == (0, "")
    assert said["apis"][closed]["error"]


# ---- logs ----------------------------------------------------------------------------------------


def watch(server: Server, offset: int = 0, name: str = "chat", patience: float = 0.0) -> Any:
    """Watch a server without HTTP."""
    query = {"name": name, "offset": f"{offset}", "api": f"127.0.0.1:{server.port}"}
    agent: Any = SimpleNamespace(lead=None)
    return queries.watch(agent, {**query, "patience": f"{patience}"})


def test_watch_gives_whole_lines_from_an_offset(folders: Path, server: Server) -> None:
    """Half a line waits for its other half; what was read is not read again; progress bars count as
    lines.
    """
    log = folder(folders, "chat") / "engine.log"
    log.write_bytes("eins\nzwölf\nhal".encode())
    first = watch(server)
    log.write_bytes("eins\nzwölf\nhalb\r50%\r".encode())
    second = watch(server, first["offset"])

    assert (first["log"], first["anew"], first["listening"]) == ("eins\nzwölf\n", False, True)
    assert (second["log"], second["offset"]) == ("halb\r50%\r", len(log.read_bytes()))


def test_watch_over_http(folders: Path, server: Server, ask: Ask) -> None:
    """On the head, with its servers."""
    (folder(folders, "chat") / "engine.log").write_text("eins\n")
    _, said = ask(f"/watch?name=chat&offset=0&patience=1.5&api=127.0.0.1:{server.port}")

    assert (said["log"], [each["name"] for each in said["servers"]]) == ("eins\n", ["chat"])


def test_watch_gives_the_present_engine_only(folders: Path, server: Server) -> None:
    """What is above was another's; whoever watches forgets what it read before."""
    log = folder(folders, "chat") / "engine.log"
    begins = f"{process.BEGINS} (generation 2)\n"
    log.write_text(f"old\n{begins}new\n")
    said = watch(server)
    log.write_text(f"old\n{begins}new\nmore\n")
    then = watch(server, said["offset"])

    assert (said["log"], said["anew"]) == ("new\n", True)
    assert (then["log"], then["anew"]) == ("more\n", False)


def test_watch_waits_while_an_engine_starts(
    folders: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once its API listens, nor when its log tells of an end; what was printed meanwhile is
    told.
    """
    log = folder(folders, "chat") / "engine.log"
    log.write_text("first\n")
    printed = iter([f"second\n{process.ENDS}ended with exit code 1\n"])
    waits = list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        log.write_text(log.read_text() + next(printed))

    monkeypatch.setattr(queries.time, "sleep", sleep)
    listens = watch(server, patience=30)
    monkeypatch.setattr(queries, "_reachable", lambda _: False)
    ended = watch(server, patience=30)

    assert (listens["log"], len(waits)) == ("first\n", 1)
    assert (listens["listening"], ended["listening"]) == (True, False)
    assert ended["log"] == log.read_text()
    assert ended["offset"] == len(log.read_bytes())


def test_watch_begins_again_where_the_log_was_put_aside(folders: Path, server: Server) -> None:
    """It is shorter than what was read of the one before."""
    (folder(folders, "chat") / "engine.log").write_text("new\n")

    assert watch(server, 99)["log"] == "new\n"
    assert watch(server, 99, name="none")["log"] == ""


def test_watch_reads_no_other_file(server: Server) -> None:
    """A name is a server's."""
    with pytest.raises(ValueError, match="no server can be named"):
        watch(server, name="../../etc")


# ---- batch jobs ----------------------------------------------------------------------------------


def test_submit(server: Server, ask: Ask) -> None:
    """The command is quoted, named in its environment, and sent with Ray's token; no value of a
    secret is in it.
    """
    server.answers["/api/jobs/"] = {"submission_id": "batch-1"}
    request = {
        "argv": ["python3", "a b", "$(x)"],
        "submission_id": "batch-1",
        "metadata": {"vlaunch.batch": "a b"},
    }
    answer = ask(f"/submit?dashboard={server.port}", json.dumps(request))

    assert answer == (200, {"submission_id": "batch-1"})
    verb, path, token, body = server.asked[-1]
    assert (verb, path, token) == ("POST", "/api/jobs/", "Bearer ray-token")
    assert body["entrypoint"] == "exec env VLAUNCH_JOB=batch-1 python3 'a b' '$(x)'"
    assert body["metadata"] == {"vlaunch.batch": "a b"}


@pytest.mark.parametrize(
    ("objection", "answer"),
    [
        (
            (500, "Job with submission_id batch-1 already exists."),
            (200, {"submission_id": "batch-1", "existing": True}),
        ),
        (
            (401, "Unauthorized: InvalidAuthToken"),
            (502, {"error": "401: Unauthorized: InvalidAuthToken"}),
        ),
    ],
)
def test_what_ray_says_against_a_job(server: Server, ask: Ask, objection: Any, answer: Any) -> None:
    """Two people at the same time submit one job; anything else is an error, with its words."""
    server.answers["/api/jobs/"] = objection
    request = json.dumps({"argv": ["x"], "submission_id": "batch-1", "metadata": {}})

    assert ask(f"/submit?dashboard={server.port}", request) == answer


def test_stop_a_job_that_is_over(server: Server, ask: Ask) -> None:
    """Stopping what has ended is no error."""
    server.answers["/api/jobs/batch-over"] = {"status": "SUCCEEDED"}
    status, answer = ask(f"/stop?dashboard={server.port}&job=batch-over&grace=0", "")

    assert (status, answer["killed"]) == (200, 0)


@pytest.mark.parametrize("path", ["/submit?dashboard=1", "/stop?dashboard=1&job=a&grace=0"])
def test_a_get_changes_nothing(path: str, ask: Ask) -> None:
    """Not even by mistake."""
    assert ask(path)[0] == 405


@pytest.mark.processes
def test_stop_kills_what_does_not_listen(server: Server, ask: Ask) -> None:
    """A process of the job that ignores the polite signal is killed; others are left alone."""
    # tests that run at the same time see each other's processes
    job = f"batch-{os.getpid()}"
    state = {"submission_id": job, "status": "RUNNING"}
    server.answers[f"/api/jobs/{job}"] = lambda _: state

    def stopped(_: object) -> bool:
        state["status"] = "STOPPED"
        return True

    server.answers[f"/api/jobs/{job}/stop"] = stopped
    sleep = [
        sys.executable,
        "-c",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
    ]
    mine = subprocess.Popen(sleep, env={**os.environ, "VLAUNCH_JOB": job})
    other = subprocess.Popen(sleep, env={**os.environ, "VLAUNCH_JOB": f"{job}0"})
    try:
        # The stand-in must be reaped meanwhile, or it would stay a zombie of this test.
        reaper = threading.Thread(target=mine.wait)
        reaper.start()
        status, answer = ask(f"/stop?dashboard={server.port}&job={job}&grace=0.2", "")
        reaper.join(10)

        assert (status, answer["killed"], answer["job"]["status"]) == (200, 1, "STOPPED")
        assert mine.returncode == -9
        assert other.poll() is None
    finally:
        mine.kill()
        other.kill()
        other.wait()
