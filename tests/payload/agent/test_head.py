"""What the head answers, against stand-ins for Ray's dashboard and vLLM's API; some as the program
that is run there.
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.payload import agent
from launcher.payload.agent import head, process, state
from launcher.payload.agent.observed import Observed
from tests.payload.agent import wanted
from tests.payload.agent.web import Server, rows

AGENT = Path(agent.__file__).parent
Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(
    server: Server,
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Say a verb; return the exit code, and the one object that was printed."""

    def say(*words: str, stdin: object = None, port: int | None = None) -> tuple[int, Any]:
        monkeypatch.setattr(
            sys,
            "argv",
            ["head.py", *words, "--dashboard", str(server.port), "--api", str(port or server.port)],
        )
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(stdin)))
        code = head.main()
        (line,) = capsys.readouterr().out.splitlines()
        return code, json.loads(line)

    return say


def folder(folders: Path, name: str, **files: object) -> Path:
    """Write a server's files."""
    (folders / "state" / name).mkdir()
    for file, said in files.items():
        text = said if isinstance(said, str) else json.dumps(said)
        (folders / "state" / name / f"{file}.json").write_text(text)
    return folders / "state" / name


def test_servers(folders: Path, run: Run) -> None:
    """Files only: what is wanted, how it is, and how old that word is; when each node's agent was
    heard, by now.
    """
    now = time.time()
    seen = Observed(name="chat", id="abcd1234", asked=1.0, written=now - 30)
    folder(folders, "chat", desired=wanted.mp("gpu1").as_json(), observed=seen.as_json())
    folder(folders, "embed", observed=seen.as_json())
    state.write(
        str(folders / "state" / "members.json"),
        {"written": now - 10, "members": {"gpu1": 0.0, "gpu2": 5.0}},
    )
    code, said = run("servers")
    chat, embed = said["servers"]

    assert (code, chat["name"], chat["desired"]["model"], chat["observed"]["state"]) == (
        0,
        "chat",
        "m",
        "waiting",
    )
    assert (embed["name"], embed["desired"]) == ("embed", None)
    assert (30 <= chat["age"] < 60, 10 <= said["agent"] < 40) == (True, True)
    assert (10 <= said["members"]["gpu1"] < 40, 15 <= said["members"]["gpu2"] < 45) == (True, True)


def test_no_server_and_no_agent_yet(run: Run) -> None:
    """Nothing is known, and it is said so."""
    assert run("servers") == (0, {"servers": [], "members": {}, "agent": None})


@pytest.mark.parametrize("said", ["", "{", "[]", "7", "{}", '{"written": null}', '"x"'])
def test_files_that_are_spoiled_spoil_no_answer(folders: Path, run: Run, said: str) -> None:
    """The other server's are told all the same."""
    folder(folders, "bad", observed=said, desired=said)
    folder(folders, "chat", observed=Observed(name="chat", id="x", asked=1.0).as_json())
    (folders / "state" / "members.json").write_text(said)
    code, found = run("servers")

    assert code == 0
    assert found["servers"][1]["observed"]["id"] == "x"


def test_server(run: Run) -> None:
    """Health, models, the labels of the capacity metric and the load come in one answer."""
    _, said = run("server")

    assert (said["health"], said["models"]) == (200, ["m"])
    assert said["capacity"]["kv_cache_size_tokens"] == "262144"
    assert said["load"] == {"running": 8, "waiting": 892, "tokens_per_s": None}


def test_metrics_of_several_apis(server: Server, run: Run) -> None:
    """Lines that are shown, and no others; of who does not answer, why; and what `servers` says."""
    server.answers["/metrics"] = (
        '# HELP x\npython_info 1.0\nvllm:num_requests_running{engine="0"} 8.0\n'
        "vllm:num_requests_running_created 1.0\n"
        'vllm:time_to_first_token_seconds_bucket{le="0.1"} 2.0\n'
        "vllm:time_to_first_token_seconds_sum 2.0\n"
    )
    good, closed = f"127.0.0.1:{server.port}", "[::1]:1"
    code, said = run("metrics", "--apis", good, closed)

    assert (code, said["servers"]) == (0, [])
    assert said["apis"][good]["text"].splitlines() == [
        'vllm:num_requests_running{engine="0"} 8.0',
        'vllm:time_to_first_token_seconds_bucket{le="0.1"} 2.0',
    ]
    assert (said["apis"][closed]["status"], said["apis"][closed]["text"]) == (0, "")
    assert said["apis"][closed]["error"]


def test_nobody_listens(run: Run) -> None:
    """A closed port is status 0."""
    _, said = run("server", port=1)

    assert said["health"] == 0


def test_complete(run: Run) -> None:
    """A completion comes back with its text."""
    code, said = run("complete", "--prompt", "Say hello.")

    assert (code, said["text"]) == (0, "Hi")


def test_watch_gives_whole_lines_from_an_offset(folders: Path, run: Run) -> None:
    """Half a line waits for its other half; what was read is not read again; progress bars count as
    lines.
    """
    log = folder(folders, "chat") / "engine.log"
    log.write_bytes("eins\nzwölf\nhal".encode())
    _, first = run("watch", "--name", "chat")
    log.write_bytes("eins\nzwölf\nhalb\r50%\r".encode())
    _, second = run("watch", "--name", "chat", "--offset", str(first["offset"]))

    assert (first["log"], first["anew"], first["health"], first["models"]) == (
        "eins\nzwölf\n",
        False,
        200,
        ["m"],
    )
    assert (second["log"], second["offset"]) == ("halb\r50%\r", len(log.read_bytes()))


def test_watch_gives_the_present_engine_only(folders: Path, run: Run) -> None:
    """What is above was another's; whoever watches forgets what it read before."""
    log = folder(folders, "chat") / "engine.log"
    begins = f"{process.BEGINS} (generation 2)\n"
    log.write_text(f"old\n{begins}new\n")
    _, said = run("watch", "--name", "chat")
    log.write_text(f"old\n{begins}new\nmore\n")
    _, then = run("watch", "--name", "chat", "--offset", str(said["offset"]))

    assert (said["log"], said["anew"]) == ("new\n", True)
    assert (then["log"], then["anew"]) == ("more\n", False)


def test_watch_waits_while_an_engine_starts(
    folders: Path, run: Run, monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.setattr(head.time, "sleep", sleep)
    _, listens = run("watch", "--name", "chat", "--patience", "30")
    monkeypatch.setattr(head, "reachable", lambda _: False)
    _, ended = run("watch", "--name", "chat", "--patience", "30")

    assert (listens["log"], len(waits)) == ("first\n", 1)
    assert ended["log"] == log.read_text()
    assert ended["offset"] == len(log.read_bytes())


def test_watch_begins_again_where_the_log_was_put_aside(folders: Path, run: Run) -> None:
    """It is shorter than what was read of the one before."""
    (folder(folders, "chat") / "engine.log").write_text("new\n")

    assert run("watch", "--name", "chat", "--offset", "99")[1]["log"] == "new\n"
    assert run("watch", "--name", "none", "--offset", "99")[1]["log"] == ""


def test_submit(server: Server, run: Run) -> None:
    """The command is quoted, named in its environment, and sent with Ray's token; no value of a
    secret is in it.
    """
    server.answers["/api/jobs/"] = {"submission_id": "batch-1"}
    asked = {
        "argv": ["python3", "a b", "$(x)"],
        "submission_id": "batch-1",
        "metadata": {"vlaunch.batch": "a b"},
    }

    assert run("submit", stdin=asked) == (0, {"submission_id": "batch-1"})
    verb, path, token, body = server.asked[-1]
    assert (verb, path, token) == ("POST", "/api/jobs/", "Bearer ray-token")
    assert body["entrypoint"] == "exec env VLAUNCH_JOB=batch-1 python3 'a b' '$(x)'"
    assert body["metadata"] == {"vlaunch.batch": "a b"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            (500, "Job with submission_id batch-1 already exists."),
            (0, {"submission_id": "batch-1", "existing": True}),
        ),
        (
            (401, "Unauthorized: InvalidAuthToken"),
            (1, {"error": "401: Unauthorized: InvalidAuthToken"}),
        ),
    ],
)
def test_what_ray_says_against_a_job(server: Server, run: Run, answer: Any, said: Any) -> None:
    """Two people at the same time submit one job; anything else is an error, with its words."""
    server.answers["/api/jobs/"] = answer

    assert run("submit", stdin={"argv": ["x"], "submission_id": "batch-1", "metadata": {}}) == said


def test_stop_a_job_that_is_over(server: Server, run: Run) -> None:
    """Stopping what has ended is no error."""
    server.answers["/api/jobs/batch-over"] = {"status": "SUCCEEDED"}
    code, said = run("stop", "--job", "batch-over", "--grace", "0")

    assert (code, said["killed"]) == (0, 0)


def tables(server: Server) -> None:
    for what in ("nodes", "actors", "placement_groups"):
        server.answers[f"/api/v0/{what}"] = rows({"what": what})


def test_jobs(server: Server, folders: Path, run: Run) -> None:
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
    code, said = run("jobs", "--peers", "127.0.0.1:1", f"127.0.0.1:{server.port}")

    assert (code, said["unreachable"], said["listening"]) == (0, ["127.0.0.1:1"], True)
    assert [job["submission_id"] for job in said["jobs"]] == ["batch-1"]
    assert "driver_info" not in said["jobs"][0]
    assert said["groups"] == rows({"what": "placement_groups"})
    assert [each["name"] for each in said["servers"]] == ["chat"]
    assert {"members", "agent"} <= set(said)


def test_jobs_without_ray(server: Server, run: Run) -> None:
    """Nobody is asked who is not there."""
    code, said = run("jobs", "--no-ray", "--peers", "127.0.0.1:1")

    assert (code, said["unreachable"], said["servers"]) == (0, ["127.0.0.1:1"], [])
    assert not {
        "jobs",
        "nodes",
        "actors",
        "groups",
        "health",
        "models",
        "capacity",
        "supervised",
    } & set(said)
    assert server.asked == []


def test_nodes(server: Server, run: Run) -> None:
    """With the text of `ray status`; addresses that the head cannot open are named, and agents that
    are here.
    """
    server.answers["/api/v0/nodes"] = {"data": 1}
    server.answers["/api/cluster_status"] = {
        "data": {"clusterStatus": "======== Autoscaler status"}
    }
    _, said = run("nodes", "--peers", f"127.0.0.1:{server.port}", "127.0.0.1:1")

    assert (said["nodes"], said["status"], said["unreachable"]) == (
        {"data": 1},
        "======== Autoscaler status",
        ["127.0.0.1:1"],
    )
    assert said["members"] == {}


@pytest.mark.parametrize("answer", [(404, "no such page"), {"data": {}}, []])
def test_a_ray_whose_dashboard_gives_no_status(answer: Any, server: Server, run: Run) -> None:
    """The node table is what counts; the text is empty."""
    server.answers["/api/v0/nodes"] = {"data": 1}
    server.answers["/api/cluster_status"] = answer
    code, said = run("nodes")

    assert (code, said["status"]) == (0, "")


def test_a_dashboard_that_is_not_up_is_an_error(run: Run, server: Server) -> None:
    """One object with the reason, and exit code 1: never a traceback."""
    server.answers["/api/jobs/"] = (503, "starting")

    assert run("jobs") == (1, {"error": "starting"})


# ---- as it is run there --------------------------------------------------------------------------


@pytest.fixture
def start(server: Server, folders: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start head.py where it is mounted: beside a folder with the agent, in whatever Python the
    image has.
    """
    (folders / "lib").mkdir()
    (folders / "lib" / "vlaunch_agent").symlink_to(AGENT)
    (folders / "head.py").write_text((AGENT.parent / "head.py").read_text())

    def begin(*words: str, port: int | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                folders / "head.py",
                *words,
                "--dashboard",
                str(server.port),
                "--api",
                str(port or server.port),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "VLAUNCH_SECRETS": str(folders / "secrets"),
                "VLAUNCH_STATE": str(folders / "state"),
                "http_proxy": "http://127.0.0.1:9",
            },
        )

    return begin


def chat(process: subprocess.Popen[str]) -> list[Any]:
    """Say hello; the input stays open, as `docker exec` holds it."""
    assert process.stdin is not None
    process.stdin.write('[{"role": "user", "content": "hello"}]\n')
    process.stdin.flush()
    process.wait(timeout=60)
    out, err = process.communicate(timeout=60)
    assert err == ""
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.processes
def test_the_program_in_the_container(start: Any) -> None:
    """It finds the agent beside it, the secrets and the files by its environment, and needs nothing
    else.
    """
    with start("server") as process:
        out, err = process.communicate("", timeout=60)

    assert (err, process.returncode, json.loads(out)["models"]) == ("", 0, ["m"])


@pytest.mark.processes
def test_stop_kills_what_does_not_listen(server: Server, start: Any) -> None:
    """A process of the job that ignores the polite signal is killed; others are left alone."""
    # nobody else's: tests that run at the same time see each other's processes
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
        # The stand-in must be reaped while head.py looks, or it would stay a zombie of this test.
        reaper = threading.Thread(target=mine.wait)
        reaper.start()
        with start("stop", "--job", job, "--grace", "0.2") as process:
            said = json.loads(process.communicate("", timeout=60)[0])
        reaper.join(10)

        assert (process.returncode, said["killed"], said["left"], said["job"]["status"]) == (
            0,
            1,
            [],
            "STOPPED",
        )
        assert mine.returncode == -9
        assert other.poll() is None
    finally:
        mine.kill()
        other.kill()
        other.wait()


@pytest.mark.processes
def test_chat_streams(server: Server, start: Any) -> None:
    """Each piece is a line as it comes; the end and comments are left out."""
    pieces = [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "Hi"}}]},
        {"choices": []},
    ]
    stream = (
        "".join(f"data: {json.dumps(each)}\n\n" for each in pieces) + ": ping\n\ndata: [DONE]\n\n"
    )
    server.answers["/v1/chat/completions"] = stream
    with start("chat") as process:
        said = chat(process)

    assert (process.returncode, "".join(each["text"] for each in said)) == (0, "Hi")
    assert server.asked[-1][3]["stream"] is True


@pytest.mark.processes
def test_chat_with_a_base_model(server: Server, start: Any) -> None:
    """Without a chat template the last message is continued."""
    server.answers["/v1/chat/completions"] = (400, "no chat template")
    server.answers["/v1/completions"] = 'data: {"choices": [{"text": "and"}]}\n\ndata: [DONE]\n\n'
    with start("chat") as process:
        said = chat(process)

    assert [each["text"] for each in said] == ["and"]
    assert server.asked[-1][3]["prompt"] == "hello"


@pytest.mark.processes
def test_chat_with_a_model_that_embeds(server: Server, start: Any) -> None:
    """It says what the model does, and under which name, for whoever tells how to ask it."""
    del server.answers["/v1/chat/completions"]
    server.answers["/v1/embeddings"] = {"data": [{"embedding": [0.5]}]}
    with start("chat") as process:
        (said,) = chat(process)

    assert (said["status"], said["task"], said["model"]) == (404, "embedding", "m")


@pytest.mark.processes
@pytest.mark.parametrize(("port", "status"), [(1, 0), (None, 400)])
def test_chat_refused(server: Server, start: Any, port: int | None, status: int) -> None:
    """An error is one object with its status; 0 when nobody listens."""
    server.answers["/v1/chat/completions"] = (400, "too long")
    with start("chat", port=port) as process:
        (said,) = chat(process)

    assert said["status"] == status


@pytest.mark.processes
def test_chat_ends_when_nobody_listens(server: Server, start: Any) -> None:
    """The end of its input is how a launcher that was cancelled looks; the connection to vLLM ends
    with it.
    """
    asked, release = threading.Event(), threading.Event()

    def never(_: object) -> str:
        asked.set()
        release.wait(30)
        return ""

    server.answers["/v1/chat/completions"] = never
    with start("chat") as process:
        try:
            process.stdin.write(json.dumps([{"role": "user", "content": "hello"}]) + "\n")
            process.stdin.flush()
            assert asked.wait(20)
            assert process.poll() is None
            process.stdin.close()
            assert process.wait(timeout=10) == 1
        finally:
            release.set()
            process.kill()


@pytest.mark.parametrize("folder", [AGENT.parent, AGENT], ids=["payload", "agent"])
def test_it_needs_nothing_but_the_standard_library(folder: Path) -> None:
    """It must run in any image's Python, old ones too, and start fast; the agent alone serves HTTP
    with what vLLM's images have.
    """
    files = sorted(folder.glob("*.py"))
    # The ranks of the network probe import torch late, in images that have it.
    own = {file.stem for file in files} | {"torch", "vlaunch_agent", "aiohttp"}
    for file in files:
        imported: set[str] = set()
        for each in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(each, ast.Import):
                imported |= {name.name.partition(".")[0] for name in each.names}
            elif isinstance(each, ast.ImportFrom) and not each.level:
                imported.add((each.module or "").partition(".")[0])

        assert imported - set(sys.stdlib_module_names) - own == set(), file.name
