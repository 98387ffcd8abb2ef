"""Queries to an agent over its Unix socket, with simulated APIs of Ray's dashboard and vLLM."""

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
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.agent.front.haproxy import Rotation
from launcher.agent.link import queries
from launcher.agent.link.server import HttpServer as Http
from launcher.agent.observed import Observed
from launcher.agent.processes import process
from tests.agent import specs
from tests.agent.waits import until
from tests.agent.web import Server, rows

QueryAgent = Callable[..., tuple[int, Any]]


class OverUnix(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("agent", timeout=30)
        self.path = path

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self.path)


@pytest.fixture
def agent() -> Any:
    """The state of the head's agent that queries read, with another node's agent connected."""
    return SimpleNamespace(
        lock=threading.RLock(),
        lead=SimpleNamespace(
            report_ages=lambda: {"gpu1": 0.0, "gpu2": 5.0},
            programs=lambda: {"gpu1": "aa", "gpu2": "bb"},
        ),
        supervisors={},
        turned=time.monotonic(),
    )


@pytest.fixture
def query_agent(folders: Path, agent: Any) -> Iterator[QueryAgent]:
    """A function that queries the agent and returns the status and the document."""
    path = str(folders / "a.sock")
    http = Http(queries.site(path, agent))
    http.start()
    until(lambda: http.bound, "it listens")

    def get(path_and_query: str, body: str | None = None) -> tuple[int, Any]:
        connection = OverUnix(path)
        connection.request("GET" if body is None else "POST", path_and_query, body)
        response = connection.getresponse()
        text = response.read().decode()
        document = json.loads(text) if text.startswith("{") else text
        connection.close()
        return response.status, document

    yield get
    http.close()


def folder(folders: Path, name: str, **files: object) -> Path:
    """Write a server's files."""
    (folders / "state" / name).mkdir()
    for file, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folders / "state" / name / f"{file}.json").write_text(text)
    return folders / "state" / name


# ---- servers -------------------------------------------------------------------------------------


def test_servers(folders: Path, agent: Any, query_agent: QueryAgent) -> None:
    """Specs come from files, and records from the supervisors, as of the last turn."""
    spec = specs.mp("gpu1").as_json()
    old = Observed(name="chat", id="abcd1234", asked=1.0, state="starting", written=1.0)
    folder(folders, "chat", desired=spec, observed=old.as_json())
    folder(folders, "embed", observed=old.as_json())
    live = Observed(name="chat", id="abcd1234", asked=1.0, state="ready", written=1.0)
    agent.supervisors["chat"] = SimpleNamespace(status=live, unreadable=False)
    agent.turned -= 3
    before = time.time()
    status, document = query_agent("/servers")
    chat, embed = document["servers"]

    assert (status, chat["name"], chat["desired"]["id"]) == (200, "chat", spec["id"])
    assert (chat["observed"]["state"], embed["observed"]["state"]) == ("ready", "starting")
    assert before - 30 < chat["observed"]["written"] <= time.time() - 3
    assert embed["desired"] is None
    assert 3 <= chat["age"] == document["agent"] < 30
    assert document["programs"] == {"gpu1": "aa", "gpu2": "bb"}
    assert 3 <= document["members"]["gpu1"] == pytest.approx(document["members"]["gpu2"] - 5)


def test_no_server_yet(query_agent: QueryAgent) -> None:
    """The list is empty."""
    assert query_agent("/servers")[1]["servers"] == []


def test_agents_of_other_nodes_have_no_servers(agent: Any, query_agent: QueryAgent) -> None:
    """Only the head's agent supervises servers."""
    agent.lead = None

    assert query_agent("/servers") == (200, {})


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "{}", '{"written": null}', '"x"'])
def test_damaged_files_do_not_affect_other_servers(
    folders: Path, agent: Any, query_agent: QueryAgent, content: str
) -> None:
    """Their servers are listed without a record, but not as stopped."""
    folder(folders, "bad", observed=content, desired=content)
    folder(folders, "chat", observed=Observed(name="chat", id="x", asked=1.0).as_json())
    agent.supervisors["bad"] = SimpleNamespace(status=None, unreadable=True)
    status, document = query_agent("/servers")

    assert document["servers"][0]["desired"] is not None
    assert (status, document["servers"][1]["observed"]["id"]) == (200, "x")


def test_a_main_loop_that_hangs(
    agent: Any, query_agent: QueryAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query fails, because the records may be stale."""
    monkeypatch.setattr(queries, "_TURN", 0.1)
    with agent.lock:
        status, document = query_agent("/servers")

    assert status == 502
    assert document["error"].startswith("the agent's main loop has hung for ")


# ---- Ray -----------------------------------------------------------------------------------------


class DrainingLead:
    """A lead with one front, whose server has requests until it was asked three times."""

    def __init__(self, requests: int = 2) -> None:
        self.requests, self.asked = requests, 0

    def fronts(self) -> Any:
        """Return the front's servers."""
        self.asked += 1
        requests = self.requests if self.asked < 4 else 0
        return {"gpu9": {"chat": Rotation(state="drain", requests=requests)}}

    def gone_reason(self, node: str) -> str:
        """Return no reason: all nodes are connected."""
        return ""


def drained(agent: Any, query_agent: QueryAgent, drain: float, nodes: str) -> Any:
    """Return the answer to a drain of nodes' servers, one of which has that limit."""
    spec = replace(specs.mp("gpu1", "gpu2"), policy=specs.Policy(drain=drain))
    other = specs.mp("gpu3", "gpu4")
    agent.lead, agent.paused = DrainingLead(), {}
    agent.supervisors = {
        name: SimpleNamespace(server=SimpleNamespace(spec=spec))
        for name, spec in (("chat", spec), ("embed", other))
    }
    return query_agent(f"/drain?nodes={nodes}", "")


def test_a_drain_waits_for_requests_on_the_nodes(agent: Any, query_agent: QueryAgent) -> None:
    """Other servers stay in rotation, as do those that no front has."""
    assert drained(agent, query_agent, 60.0, "gpu2,gpu4") == (200, {"requests": 0})
    assert list(agent.paused) == ["chat"]
    assert agent.paused["chat"] > time.monotonic() + 60
    assert drained(agent, query_agent, 60.0, "gpu5") == (200, {"requests": 0})
    assert agent.paused == {}


def test_a_drain_ends_at_its_limit(agent: Any, query_agent: QueryAgent) -> None:
    """The answer counts the requests that would be cut."""
    assert drained(agent, query_agent, 0.4, "gpu2") == (200, {"requests": 2})


def tables(server: Server) -> None:
    """Add Ray's tables to the dashboard."""
    server.tables["/api/v0/nodes"] = [{"node_id": "a", "state": "ALIVE"}]
    server.tables["/api/v0/actors"] = [{"name": "x", "state": "DEAD"}]
    server.tables["/api/v0/placement_groups"] = [{"state": "CREATED"}]


def test_jobs(server: Server, folders: Path, query_agent: QueryAgent) -> None:
    """Jobs without a submission id are Ray's own drivers and left out; servers are included."""
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
    address = f"127.0.0.1:{server.port}"
    status, document = query_agent(f"/jobs?dashboard={server.port}&peers=127.0.0.1:1,{address}")

    assert (status, document["unreachable"]) == (200, ["127.0.0.1:1"])
    assert [job["submission_id"] for job in document["jobs"]] == ["batch-1"]
    assert "driver_info" not in document["jobs"][0]
    assert (document["actors"], document["groups"]) == ([], [{"state": "CREATED"}])
    assert [entry["name"] for entry in document["servers"]] == ["chat"]
    assert {"members", "agent"} <= set(document)


def test_nodes(server: Server, query_agent: QueryAgent) -> None:
    """The answer has the text of `ray status`, and the addresses that the head cannot reach."""
    server.answers["/api/v0/nodes"] = rows({"node_id": "a"})
    server.answers["/api/cluster_status"] = {
        "data": {"clusterStatus": "======== Autoscaler status"}
    }
    _, document = query_agent(
        f"/nodes?dashboard={server.port}&peers=127.0.0.1:{server.port},127.0.0.1:1"
    )

    assert document == {
        "nodes": [{"node_id": "a"}],
        "status": "======== Autoscaler status",
        "unreachable": ["127.0.0.1:1"],
    }


@pytest.mark.parametrize("answer", [(404, "no such page"), {"data": {}}, []])
def test_a_dashboard_without_a_status(answer: Any, server: Server, query_agent: QueryAgent) -> None:
    """The text is empty; the table of nodes is sufficient."""
    server.answers["/api/v0/nodes"] = rows({"node_id": "a"})
    server.answers["/api/cluster_status"] = answer
    status, document = query_agent(f"/nodes?dashboard={server.port}")

    assert (status, document["status"]) == (200, "")


def test_a_dashboard_that_is_not_ready_is_an_error(server: Server, query_agent: QueryAgent) -> None:
    """The servers are included nevertheless."""
    server.answers["/api/jobs/"] = (503, "starting")

    status, document = query_agent(f"/jobs?dashboard={server.port}")

    assert (status, document["error"], document["servers"]) == (200, "starting", [])


@pytest.mark.parametrize("path", ["/nodes?dashboard=x", "/watch", "/counts?apis=x&timeout=1"])
def test_an_invalid_query_is_an_error(path: str, query_agent: QueryAgent) -> None:
    """The launcher may be of another version."""
    status, document = query_agent(path)

    assert (status, list(document)) == (502, ["error"])


# ---- vLLM ----------------------------------------------------------------------------------------


def test_counts_of_several_apis(server: Server, query_agent: QueryAgent) -> None:
    """Only the metrics that are shown are included; an API that does not answer has an error."""
    server.answers["/metrics"] = (
        '# HELP x\npython_info 1.0\nvllm:num_requests_running{engine="0"} 8.0\n'
        "vllm:num_requests_running_created 1.0\n"
        'vllm:time_to_first_token_seconds_bucket{le="0.1"} 2.0\n'
        "vllm:time_to_first_token_seconds_sum 2.0\n"
    )
    good, closed = f"127.0.0.1:{server.port}", "[::1]:1"
    status, document = query_agent(f"/counts?timeout=5&apis={good},%5B::1%5D:1")

    assert (status, document["servers"]) == (200, [])
    assert document["apis"][good]["text"].splitlines() == [
        'vllm:num_requests_running{engine="0"} 8.0',
        'vllm:time_to_first_token_seconds_bucket{le="0.1"} 2.0',
    ]
    assert (document["apis"][closed]["status"], document["apis"][closed]["text"]) == (0, "")
    assert document["apis"][closed]["error"]


# ---- logs ----------------------------------------------------------------------------------------


def watch(server: Server, offset: int = 0, name: str = "chat", patience: float = 0.0) -> Any:
    """Wait for a server without HTTP."""
    query = {"name": name, "offset": f"{offset}", "api": f"127.0.0.1:{server.port}"}
    agent: Any = SimpleNamespace(lead=None)
    return queries.watch(agent, {**query, "patience": f"{patience}"})


def test_watch_gives_whole_lines_from_an_offset(folders: Path, server: Server) -> None:
    """Incomplete lines are left for the next query; progress bars count as lines."""
    log = folder(folders, "chat") / "engine.log"
    log.write_bytes("eins\nzwölf\nhal".encode())
    first = watch(server)
    log.write_bytes("eins\nzwölf\nhalb\r50%\r".encode())
    second = watch(server, first["offset"])

    assert (first["log"], first["anew"], first["listening"]) == ("eins\nzwölf\n", False, True)
    assert (second["log"], second["offset"]) == ("halb\r50%\r", len(log.read_bytes()))


def test_watch_over_http(folders: Path, server: Server, query_agent: QueryAgent) -> None:
    """The head's answer includes its servers."""
    (folder(folders, "chat") / "engine.log").write_text("eins\n")
    _, document = query_agent(f"/watch?name=chat&offset=0&patience=1.5&api=127.0.0.1:{server.port}")

    assert (document["log"], [entry["name"] for entry in document["servers"]]) == (
        "eins\n",
        ["chat"],
    )


def test_watch_returns_the_log_of_the_current_engine(folders: Path, server: Server) -> None:
    """Output of earlier engines is skipped, and `anew` tells the reader to discard its own."""
    log = folder(folders, "chat") / "engine.log"
    begins = f"{process.BEGINS} (generation 2)\n"
    log.write_text(f"old\n{begins}new\n")
    first = watch(server)
    log.write_text(f"old\n{begins}new\nmore\n")
    second = watch(server, first["offset"])

    assert (first["log"], first["anew"]) == ("new\n", True)
    assert (second["log"], second["anew"]) == ("more\n", False)


def test_watch_waits_while_an_engine_starts(
    folders: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns at once when the API listens or the engine has exited, with the new output."""
    log = folder(folders, "chat") / "engine.log"
    log.write_text("first\n")
    output = iter([f"second\n{process.ENDS}ended with exit code 1\n"])
    waits = list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        log.write_text(log.read_text() + next(output))

    monkeypatch.setattr(queries.time, "sleep", sleep)
    listens = watch(server, patience=30)
    monkeypatch.setattr(queries, "_is_reachable", lambda _: False)
    ended = watch(server, patience=30)

    assert (listens["log"], len(waits)) == ("first\n", 1)
    assert (listens["listening"], ended["listening"]) == (True, False)
    assert ended["log"] == log.read_text()
    assert ended["offset"] == len(log.read_bytes())


def test_watch_restarts_after_the_log_was_rotated(folders: Path, server: Server) -> None:
    """The new log is shorter than the offset."""
    (folder(folders, "chat") / "engine.log").write_text("new\n")

    assert watch(server, 99)["log"] == "new\n"
    assert watch(server, 99, name="none")["log"] == ""


def test_watch_reads_no_other_file(server: Server) -> None:
    """A server's name cannot contain a path."""
    with pytest.raises(ValueError, match="no server can be named"):
        watch(server, name="../../etc")


# ---- batch jobs ----------------------------------------------------------------------------------


def test_submit(server: Server, query_agent: QueryAgent) -> None:
    """The command is quoted, has the job's id in its environment, and is sent with Ray's token."""
    server.answers["/api/jobs/"] = {"submission_id": "batch-1"}
    request = {
        "argv": ["python3", "a b", "$(x)"],
        "submission_id": "batch-1",
        "metadata": {"vlaunch.batch": "a b"},
    }
    answer = query_agent(f"/submit?dashboard={server.port}", json.dumps(request))

    assert answer == (200, {"submission_id": "batch-1"})
    verb, path, token, body = server.requests[-1]
    assert (verb, path, token) == ("POST", "/api/jobs/", "Bearer ray-token")
    assert body["entrypoint"] == "exec env VLAUNCH_JOB=batch-1 python3 'a b' '$(x)'"
    assert body["metadata"] == {"vlaunch.batch": "a b"}


@pytest.mark.parametrize(
    ("refusal", "answer"),
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
def test_ray_refuses_a_job(
    server: Server, query_agent: QueryAgent, refusal: Any, answer: Any
) -> None:
    """A job that two operators submit exists already; other refusals are errors."""
    server.answers["/api/jobs/"] = refusal
    request = json.dumps({"argv": ["x"], "submission_id": "batch-1", "metadata": {}})

    assert query_agent(f"/submit?dashboard={server.port}", request) == answer


def test_stop_a_finished_job(server: Server, query_agent: QueryAgent) -> None:
    """It is not an error."""
    server.answers["/api/jobs/batch-over"] = {"status": "SUCCEEDED"}
    status, answer = query_agent(f"/stop?dashboard={server.port}&job=batch-over&grace=0", "")

    assert (status, answer["killed"]) == (200, 0)


@pytest.mark.parametrize("path", ["/submit?dashboard=1", "/stop?dashboard=1&job=a&grace=0"])
def test_a_get_changes_nothing(path: str, query_agent: QueryAgent) -> None:
    """Changes require POST."""
    assert query_agent(path)[0] == 405


@pytest.mark.processes
def test_stop_kills_processes_that_ignore_sigterm(server: Server, query_agent: QueryAgent) -> None:
    """Processes of other jobs are left alone."""
    # Tests that run at the same time see each other's processes.
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
    own = subprocess.Popen(sleep, env={**os.environ, "VLAUNCH_JOB": job})
    other = subprocess.Popen(sleep, env={**os.environ, "VLAUNCH_JOB": f"{job}0"})
    try:
        # Reap the process, or it would stay a zombie of this test.
        reaper = threading.Thread(target=own.wait)
        reaper.start()
        status, answer = query_agent(f"/stop?dashboard={server.port}&job={job}&grace=0.2", "")
        reaper.join(60)

        assert (status, answer["killed"], answer["job"]["status"]) == (200, 1, "STOPPED")
        assert own.returncode == -9
        assert other.poll() is None
    finally:
        own.kill()
        other.kill()
        other.wait()
