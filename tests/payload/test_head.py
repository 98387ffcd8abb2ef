"""The program inside the head container, run as it is run there, against stand-ins for Ray's dashboard and vLLM's API."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

HEAD = Path(__file__).parent.parent.parent / "launcher" / "payload" / "head.py"
METRICS = (
    "# HELP vllm:cache_config_info Information\n"
    'vllm:cache_config_info{block_size="128",kv_cache_size_tokens="262144",kv_cache_max_concurrency="512.0"} 1.0\n'
)
CHAT = {
    "choices": [{"message": {"content": "Hi"}}],
    "usage": {"completion_tokens": 1},
    "system_fingerprint": "vllm-0.32.0-pp2-x",
}


@dataclass
class Replicas:
    """Replicas behind one API: they count what they finished, and the one that is named answers, if names are `obeyed`."""

    finished: list[int] = field(default_factory=lambda: [7, 7])
    refusing: dict[int, tuple[int, str]] = field(default_factory=dict)
    obeyed: bool = True
    counting: bool = True

    def answer(self, number: int | None) -> Any:
        """Answer as the replica that was named; the first, when none was, or names mean nothing."""
        chosen = number if number is not None and self.obeyed else 0
        if chosen in self.refusing:
            return self.refusing[chosen]
        self.finished[chosen] += 1
        return CHAT

    def metrics(self) -> str:
        """Print what vLLM prints: a counter for each replica and reason, and the capacity once for each."""
        lines = [
            f'vllm:request_success_total{{engine="{number}",finished_reason="{reason}",model_name="m"}} {count}'
            for number, finished in enumerate(self.finished)
            for reason, count in (("stop", "2.0"), ("length", f"{finished - 2}.0"))
        ]
        labels = 'kv_cache_max_concurrency="64.0",kv_cache_size_tokens="32768",num_gpu_blocks="512"'
        capacity = [f'vllm:cache_config_info{{engine="{number}",{labels}}} 1.0' for number in range(len(self.finished))]
        return "\n".join([*capacity, *(lines if self.counting else [])]) + "\n"


class Server:
    """Answers by path: a value, or a function of the request's body; (status, value) for anything but 200."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, str, str, Any]] = []
        self.replicas: Replicas | None = None
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                asked = json.loads(body) if body else None
                path = self.path.partition("?")[0]
                owner.asked.append((self.command, path, self.headers.get("Authorization") or "", asked))
                found = owner.answers.get(path, (404, "no such path"))
                rank = self.headers.get("X-data-parallel-rank")
                if owner.replicas and self.command == "POST":
                    found = owner.replicas.answer(None if rank is None else int(rank))
                elif owner.replicas and path == "/metrics":
                    found = owner.replicas.metrics()
                found = found(asked) if callable(found) else found
                status, said = found if isinstance(found, tuple) else (200, found)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(said.encode() if isinstance(said, str) else json.dumps(said).encode())

            do_GET = do_POST = _answer

            def log_message(self, *_: object) -> None:
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Server:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        running.answers |= {
            "/health": "",
            "/v1/models": {"data": [{"id": "m"}]},
            "/metrics": METRICS,
            "/v1/chat/completions": CHAT,
            "/api/jobs/": [],
            "/api/jobs/serve-1": {"submission_id": "serve-1", "status": "RUNNING", "metadata": {"a": "b"}},
        }
        yield running


@pytest.fixture
def start(server: Server, tmp_path: Path) -> Any:
    """Start head.py against the server."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "secrets" / "RAY_AUTH_TOKEN").write_text("ray-token\n")
    (tmp_path / "secrets" / "VLLM_API_KEY").write_text("api-key")

    def start(*words: str, port: int | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", HEAD, *words, "--dashboard", str(server.port), "--api", str(port or server.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "VLAUNCH_SECRETS": str(tmp_path / "secrets"),
                "VLAUNCH_RAY_LOGS": str(tmp_path),
                "VLAUNCH_STATE": str(tmp_path / "state"),
                "http_proxy": "http://127.0.0.1:9",
            },
        )

    return start


@pytest.fixture
def run(start: Any) -> Any:
    """Run head.py against the server and return its exit code and the objects it printed."""

    def call(*words: str, stdin: object = None, port: int | None = None) -> tuple[int, list[Any]]:
        with start(*words, port=port) as process:
            said = "" if stdin is None else json.dumps(stdin)
            if words[0] == "chat":  # its input stays open, as `docker exec` holds it
                process.stdin.write(f"{said}\n")
                process.stdin.flush()
                process.wait(timeout=60)
                said = ""
            out, err = process.communicate(said, timeout=60)
        assert err == ""
        return process.returncode, [json.loads(line) for line in out.splitlines()]

    return call


def test_complete(server: Server, run: Any) -> None:
    """A completion comes back with its text, tokens and fingerprint; the key travels in the header, proxies are ignored."""
    code, (said,) = run("complete", "--prompt", "Say hello.")

    assert code == 0
    assert (said["text"], said["tokens"], said["system_fingerprint"]) == ("Hi", 1, "vllm-0.32.0-pp2-x")
    assert server.asked[-1][:3] == ("POST", "/v1/chat/completions", "Bearer api-key")
    assert server.asked[-1][3]["messages"] == [{"role": "user", "content": "Say hello."}]


def test_every_replica_is_asked(server: Server, run: Any) -> None:
    """One completion goes where vLLM sends it, and one more to each replica, whose own counters prove the answer."""
    server.replicas = Replicas()
    _, (said,) = run("complete", "--engines", "2")

    assert [(each["status"], each["answered"], each["error"]) for each in said["replicas"]] == [(200, True, "")] * 2
    assert server.replicas.finished == [9, 8]
    assert {call[2] for call in server.asked} == {"Bearer api-key"}


def test_an_answer_that_no_counter_confirms_is_none_of_that_replica(server: Server, run: Any) -> None:
    """A vLLM that does not read the header lets another replica answer; the one that was asked has not proven anything."""
    server.replicas = Replicas(obeyed=False)
    _, (said,) = run("complete", "--engines", "2")

    assert [each["answered"] for each in said["replicas"]] == [True, False]


def test_without_counters_answers_have_to_do(server: Server, run: Any) -> None:
    """`--disable-log-stats` leaves no counters."""
    server.replicas = Replicas(counting=False)
    _, (said,) = run("complete", "--engines", "2")

    assert [each["answered"] for each in said["replicas"]] == [True, True]


def test_a_replica_that_refuses(server: Server, run: Any) -> None:
    """Its words come along, and the others' answers stand."""
    server.replicas = Replicas(refusing={1: (500, "EngineDeadError")})
    _, (said,) = run("complete", "--engines", "2")

    assert [(each["status"], each["answered"]) for each in said["replicas"]] == [(200, True), (500, False)]
    assert said["replicas"][1]["error"] == "EngineDeadError"


def test_capacity_of_replicas_is_added_up(server: Server, run: Any) -> None:
    """vLLM prints tokens and concurrency of one replica in each line, and the sum of all blocks."""
    server.replicas = Replicas(finished=[7, 7, 7])
    _, (said,) = run("server")

    assert said["capacity"]["kv_cache_size_tokens"] == "98304"
    assert said["capacity"]["kv_cache_max_concurrency"] == "192.0"
    assert said["capacity"]["num_gpu_blocks"] == "512"


def test_complete_without_a_chat_template(server: Server, run: Any) -> None:
    """A base model is asked in the way it can answer."""
    server.answers["/v1/chat/completions"] = (400, '{"error": "default chat template is no longer allowed"}')
    server.answers["/v1/completions"] = {"choices": [{"text": "and then"}], "usage": {"completion_tokens": 2}}
    _, (said,) = run("complete")

    assert (said["path"], said["text"], said["tokens"]) == ("/v1/completions", "and then", 2)


@pytest.mark.parametrize(
    ("path", "answer", "status"),
    [("/v1/models", (401, "Unauthorized"), 401), ("/v1/chat/completions", (500, "EngineDeadError"), 500)],
)
def test_complete_refused(server: Server, run: Any, path: str, answer: tuple[int, str], status: int) -> None:
    """A refusal is an answer: its status and words come back."""
    server.answers[path] = answer
    code, (said,) = run("complete")

    assert (code, said["status"], said["error"]) == (0, status, answer[1])


def test_nobody_listens(run: Any) -> None:
    """A closed port is status 0, with the reason."""
    _, (said,) = run("server", port=1)

    assert said["health"] == 0
    assert "refused" in said["health_said"]


def test_server(run: Any) -> None:
    """Health, models and the labels of the capacity metric come in one answer."""
    _, (said,) = run("server")

    assert (said["health"], said["models"]) == (200, ["m"])
    assert said["capacity"]["kv_cache_size_tokens"] == "262144"


def test_submit(server: Server, run: Any) -> None:
    """The command is quoted, named in its environment, and sent with Ray's token; no value of a secret is in it."""
    server.answers["/api/jobs/"] = {"submission_id": "serve-1"}
    asked = {"argv": ["vllm", "serve", "a b", "$(x)"], "submission_id": "serve-1", "metadata": {"vlaunch.model": "a b"}}
    code, said = run("submit", stdin=asked)

    assert (code, said) == (0, [{"submission_id": "serve-1"}])
    verb, path, token, body = server.asked[-1]
    assert (verb, path, token) == ("POST", "/api/jobs/", "Bearer ray-token")
    assert body["entrypoint"] == "exec env VLAUNCH_JOB=serve-1 vllm serve 'a b' '$(x)'"
    assert body["metadata"] == {"vlaunch.model": "a b"}


WANTED = {"id": "0123abcd", "model": "m", "metadata": {"vlaunch.model": "m"}, "policy": {"restarts": 3}, "supervise": True}


def server_asked(name: str = "serve-0123abcd-1", **more: Any) -> dict[str, Any]:
    return {"wanted": WANTED, "submission_id": name, "metadata": WANTED["metadata"], **more}


def test_submit_a_server(server: Server, run: Any, tmp_path: Path) -> None:
    """Its supervisor is what Ray starts; what is wanted is a file, which outlives the head's container."""
    (tmp_path / "state" / "server.json").write_text(json.dumps({"id": "0123abcd", "restarts": [1.0], "state": "gave-up"}))
    server.answers["/api/jobs/"] = {"submission_id": "serve-0123abcd-1"}
    code, _ = run("submit", stdin=server_asked())
    wanted = json.loads((tmp_path / "state" / "wanted.json").read_text())
    said = json.loads((tmp_path / "state" / "server.json").read_text())

    assert code == 0
    expected = f"exec env VLAUNCH_JOB=serve-0123abcd-1 python3 {HEAD.parent}/supervisor.py run --job serve-0123abcd-1"
    assert server.asked[-1][3]["entrypoint"] == expected
    assert wanted == {**WANTED, "job": "serve-0123abcd-1"}
    assert (said["state"], said["restarts"], said["restarts_left"]) == ("starting", [], 3)


def test_submit_a_server_that_nobody_supervises(server: Server, run: Any, tmp_path: Path) -> None:
    """vLLM itself is the job, and nothing is remembered of the last server."""
    for name in ("wanted.json", "server.json"):
        (tmp_path / "state" / name).write_text("{}")
    server.answers["/api/jobs/"] = {"submission_id": "serve-1"}
    run("submit", stdin=server_asked(wanted=None, argv=["vllm", "serve", "m"]))

    assert server.asked[-1][3]["entrypoint"] == "exec env VLAUNCH_JOB=serve-0123abcd-1 vllm serve m"
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["lock"]


def test_submit_to_a_container_of_an_older_launcher(run: Any, tmp_path: Path) -> None:
    """Without the folder a head that restarts would forget the server: what to do is said."""
    (tmp_path / "state").rmdir()
    code, (said,) = run("submit", stdin=server_asked())

    assert code == 1
    assert "run `vlaunch up`" in said["error"]


def test_a_server_that_ray_refuses_is_not_wanted(server: Server, run: Any, tmp_path: Path) -> None:
    """It would come up by itself when the head restarts."""
    server.answers["/api/jobs/"] = (401, "Unauthorized")
    code, _ = run("submit", stdin=server_asked())

    assert code == 1
    assert not (tmp_path / "state" / "wanted.json").exists()


@pytest.mark.parametrize(("job", "left"), [("serve-0123abcd-7", False), ("serve-0123-1", True), ("batch-x", True)])
def test_what_is_stopped_is_not_wanted(server: Server, run: Any, tmp_path: Path, job: str, left: bool) -> None:
    """Whatever its number; what stops another job leaves it."""
    (tmp_path / "state" / "wanted.json").write_text(json.dumps(WANTED))
    server.answers[f"/api/jobs/{job}"] = {"status": "STOPPED"}
    run("stop", "--job", job, "--grace", "0")

    assert (tmp_path / "state" / "wanted.json").exists() == left


def test_a_server_that_is_handed_over_meanwhile_is_stopped(server: Server, start: Any, tmp_path: Path) -> None:
    """A head that comes back submits it under its next number, and holds the lock while it does."""
    wanted = tmp_path / "state" / "wanted.json"
    wanted.write_text(json.dumps({**WANTED, "job": "serve-0123abcd-1"}))
    server.answers["/api/jobs/serve-0123abcd-2"] = {"status": "STOPPED"}
    with (tmp_path / "state" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stopping = start("stop", "--job", "serve-0123abcd-1", "--grace", "0")
        deadline = time.monotonic() + 20
        while wanted.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        wanted.write_text(json.dumps({**WANTED, "job": "serve-0123abcd-2"}))
    stopping.communicate(timeout=60)

    assert ("POST", "/api/jobs/serve-0123abcd-2/stop") in [asked[:2] for asked in server.asked]
    assert not wanted.exists()


def test_a_server_that_has_been_handed_over_is_stopped(server: Server, run: Any, tmp_path: Path) -> None:
    """The launcher has seen its last number, and it has its next one."""
    (tmp_path / "state" / "wanted.json").write_text(json.dumps({**WANTED, "job": "serve-0123abcd-2"}))
    server.answers["/api/jobs/serve-0123abcd-2"] = {"status": "STOPPED"}
    code, _ = run("stop", "--job", "serve-0123abcd-1", "--grace", "0")

    assert code == 0
    assert ("POST", "/api/jobs/serve-0123abcd-2/stop") in [asked[:2] for asked in server.asked]


def test_what_the_supervisor_wrote_comes_along(run: Any, tmp_path: Path) -> None:
    """With its age; a record of another server than the one that is wanted says nothing."""
    record = {"id": "0123abcd", "state": "recovering", "written": 0}
    (tmp_path / "state" / "server.json").write_text(json.dumps(record))
    (tmp_path / "state" / "wanted.json").write_text(json.dumps(WANTED))
    _, (said,) = run("server")
    (tmp_path / "state" / "wanted.json").write_text('{"id": "other"}')
    _, (other,) = run("server")

    assert (said["supervised"]["state"], said["supervised"]["wanted"]) == ("recovering", True)
    assert said["supervised"]["metadata"] == {"vlaunch.model": "m"}
    assert said["supervised"]["age"] > 1e9
    assert other["supervised"] == {}


def test_watch_follows_a_server_to_its_next_job(server: Server, run: Any, tmp_path: Path) -> None:
    """Ray forgot the job when its head restarted; until the server has another one, it is pending."""
    wanted = tmp_path / "state" / "wanted.json"
    wanted.write_text(json.dumps({**WANTED, "job": "serve-0123abcd-1"}))
    _, (before,) = run("watch", "--job", "serve-0123abcd-1")
    wanted.write_text(json.dumps({**WANTED, "job": "serve-0123abcd-2"}))
    _, (meanwhile,) = run("watch", "--job", "serve-0123abcd-1")
    (tmp_path / "job-driver-serve-0123abcd-2.log").write_text("eins\n")
    server.answers["/api/jobs/serve-0123abcd-2"] = {"submission_id": "serve-0123abcd-2", "status": "RUNNING"}
    _, (after,) = run("watch", "--job", "serve-0123abcd-1")

    assert [(each["job"]["status"], each["log"]) for each in (before, meanwhile)] == [("PENDING", "")] * 2
    assert (after["job"]["submission_id"], after["log"]) == ("serve-0123abcd-2", "eins\n")


def test_watch_follows_a_server_whose_supervisor_died(server: Server, run: Any, tmp_path: Path) -> None:
    """It had answered, so it comes back: it has not failed. The new log is read from its start."""
    wanted = tmp_path / "state" / "wanted.json"
    (tmp_path / "job-driver-serve-0123abcd-1.log").write_text("many lines\n" * 9)
    server.answers["/api/jobs/serve-0123abcd-1"] = {"submission_id": "serve-0123abcd-1", "status": "FAILED"}
    seen = []
    for number, state in ((1, "ready"), (1, "recovering"), (2, "recovering"), (2, "ready")):
        wanted.write_text(json.dumps({**WANTED, "job": f"serve-0123abcd-{number}"}))
        (tmp_path / "state" / "server.json").write_text(json.dumps({"id": "0123abcd", "state": state}))
        seen.append(run("watch", "--job", "serve-0123abcd-1", "--offset", "99")[1][0])
        (tmp_path / "job-driver-serve-0123abcd-2.log").write_text("eins\n")
        server.answers["/api/jobs/serve-0123abcd-2"] = {"submission_id": "serve-0123abcd-2", "status": "RUNNING"}

    assert [each["job"]["status"] for each in seen] == ["PENDING", "PENDING", "RUNNING", "RUNNING"]
    assert (seen[-1]["job"]["submission_id"], seen[-1]["log"], seen[-1]["offset"]) == ("serve-0123abcd-2", "eins\n", 5)


@pytest.mark.parametrize("why", ["never answered", "gave up", "another server", "no record"])
def test_watch_says_that_a_server_failed(server: Server, run: Any, tmp_path: Path, why: str) -> None:
    """Nobody brings it back."""
    wanted = {
        **WANTED,
        "job": "serve-0123abcd-1",
        **({"id": "other", "job": "serve-other-1"} if why == "another server" else {}),
    }
    if why != "gave up":  # then it is not wanted any more
        (tmp_path / "state" / "wanted.json").write_text(json.dumps(wanted))
    if why != "no record":
        state = {"never answered": "starting", "gave up": "gave-up"}.get(why, "ready")
        (tmp_path / "state" / "server.json").write_text(json.dumps({"id": wanted["id"], "state": state}))
    server.answers["/api/jobs/serve-0123abcd-1"] = {"submission_id": "serve-0123abcd-1", "status": "FAILED"}
    _, (said,) = run("watch", "--job", "serve-0123abcd-1")

    assert said["job"]["status"] == "FAILED"


def test_submit_twice(server: Server, run: Any) -> None:
    """Two people at the same time submit one job."""
    server.answers["/api/jobs/"] = (500, "Job with submission_id serve-1 already exists.")
    code, (said,) = run("submit", stdin={"argv": ["x"], "submission_id": "serve-1", "metadata": {}})

    assert (code, said) == (0, {"submission_id": "serve-1", "existing": True})


def test_submit_refused(server: Server, run: Any) -> None:
    """What Ray says against a job is an error, with its words."""
    server.answers["/api/jobs/"] = (401, "Unauthorized: InvalidAuthToken")
    code, (said,) = run("submit", stdin={"argv": ["x"], "submission_id": "serve-1", "metadata": {}})

    assert (code, said["error"]) == (1, "401: Unauthorized: InvalidAuthToken")


def test_watch_gives_whole_lines_from_an_offset(tmp_path: Path, run: Any) -> None:
    """Half a line waits for its other half; what was read is not read again; progress bars count as lines."""
    log = tmp_path / "job-driver-serve-1.log"
    log.write_bytes("eins\nzwölf\nhal".encode())
    _, (first,) = run("watch", "--job", "serve-1")
    log.write_bytes("eins\nzwölf\nhalb\r50%\r".encode())
    _, (second,) = run("watch", "--job", "serve-1", "--offset", str(first["offset"]))

    assert (first["log"], first["job"]["status"], first["health"]) == ("eins\nzwölf\n", "RUNNING", 200)
    assert second["log"] == "halb\r50%\r"


def test_watch_gives_the_last_line_of_a_job_that_is_over(server: Server, tmp_path: Path, run: Any) -> None:
    """A last line without an end is shown when nothing more will come."""
    (tmp_path / "job-driver-serve-1.log").write_text("killed")
    server.answers["/api/jobs/serve-1"] = {"status": "FAILED", "message": "exit", "driver_exit_code": 137}
    _, (said,) = run("watch", "--job", "serve-1")

    assert (said["log"], said["job"]["driver_exit_code"]) == ("killed", 137)


def test_watch_a_job_that_is_not_there(run: Any) -> None:
    """Ray forgets jobs when its head restarts."""
    _, (said,) = run("watch", "--job", "serve-9")

    assert said["job"]["status"] == "ABSENT"


def test_stop_kills_what_does_not_listen(server: Server, run: Any) -> None:
    """A process of the job that ignores the polite signal is killed; others are left alone."""
    job = f"serve-{os.getpid()}"  # nobody else's: tests that run at the same time see each other's processes
    state = {"submission_id": job, "status": "RUNNING"}
    server.answers[f"/api/jobs/{job}"] = lambda _: state

    def stopped(_: object) -> bool:
        state["status"] = "STOPPED"
        return True

    server.answers[f"/api/jobs/{job}/stop"] = stopped
    sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"]
    mine = subprocess.Popen(sleep, env={**os.environ, "VLAUNCH_JOB": job})
    other = subprocess.Popen(sleep, env={**os.environ, "VLAUNCH_JOB": f"{job}0"})
    try:
        # The stand-in must be reaped while head.py looks, or it would stay a zombie of this test.
        reaper = threading.Thread(target=mine.wait)
        reaper.start()
        code, (said,) = run("stop", "--job", job, "--grace", "0.2")
        reaper.join(10)

        assert (code, said["killed"], said["left"], said["job"]["status"]) == (0, 1, [], "STOPPED")
        assert mine.returncode == -9
        assert other.poll() is None
    finally:
        mine.kill()
        other.kill()
        other.wait()


def test_stop_a_job_that_is_over(server: Server, run: Any) -> None:
    """Stopping what has ended is no error."""
    server.answers["/api/jobs/serve-over"] = {"status": "SUCCEEDED"}
    code, (said,) = run("stop", "--job", "serve-over", "--grace", "0")

    assert (code, said["killed"]) == (0, 0)


def test_chat_streams(server: Server, run: Any) -> None:
    """Each piece is a line as it comes; the end and comments are left out."""
    pieces = [{"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"delta": {"content": "Hi"}}]}, {"choices": []}]
    stream = "".join(f"data: {json.dumps(each)}\n\n" for each in pieces) + ": ping\n\ndata: [DONE]\n\n"
    server.answers["/v1/chat/completions"] = stream
    code, said = run("chat", stdin=[{"role": "user", "content": "hello"}])

    assert code == 0
    assert "".join(each["text"] for each in said) == "Hi"
    assert server.asked[-1][3]["stream"] is True


def test_chat_with_a_base_model(server: Server, run: Any) -> None:
    """Without a chat template the last message is continued."""
    server.answers["/v1/chat/completions"] = (400, "no chat template")
    server.answers["/v1/completions"] = 'data: {"choices": [{"text": "and"}]}\n\ndata: [DONE]\n\n'
    _, said = run("chat", stdin=[{"role": "user", "content": "once"}])

    assert [each["text"] for each in said] == ["and"]
    assert server.asked[-1][3]["prompt"] == "once"


def test_chat_ends_when_nobody_listens(server: Server, start: Any) -> None:
    """The end of its input is how a launcher that was cancelled looks; the connection to vLLM ends with it."""
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


@pytest.mark.parametrize(("port", "status"), [(1, 0), (None, 400)])
def test_chat_refused(server: Server, run: Any, port: int | None, status: int) -> None:
    """An error is one object with its status; 0 when nobody listens."""
    server.answers["/v1/chat/completions"] = (400, "too long")
    _, (said,) = run("chat", stdin=[{"role": "user", "content": "hello"}], port=port)

    assert said["status"] == status


def test_jobs(server: Server, run: Any) -> None:
    """Jobs without a submission id are Ray's own drivers and left out; the rest of what is known comes along."""
    server.answers["/api/jobs/"] = [
        {"submission_id": "serve-1", "status": "RUNNING", "metadata": {}, "driver_info": {"pid": 1}},
        {"submission_id": None, "status": "RUNNING"},
    ]
    for what in ("nodes", "actors", "placement_groups"):
        server.answers[f"/api/v0/{what}"] = {"data": {"result": {"result": [what]}}}
    code, (said,) = run("jobs", "--peers", "127.0.0.1:1", f"127.0.0.1:{server.port}")

    assert code == 0
    assert said["unreachable"] == ["127.0.0.1:1"]
    assert [job["submission_id"] for job in said["jobs"]] == ["serve-1"]
    assert "driver_info" not in said["jobs"][0]
    assert said["groups"]["data"]["result"]["result"] == ["placement_groups"]
    assert said["listening"] is True


def test_nodes(server: Server, run: Any) -> None:
    """With the text of `ray status`; addresses that the head cannot open are named."""
    server.answers["/api/v0/nodes"] = {"data": 1}
    server.answers["/api/cluster_status"] = {"data": {"clusterStatus": "======== Autoscaler status"}}
    _, (said,) = run("nodes", "--peers", f"127.0.0.1:{server.port}", "127.0.0.1:1")

    assert said == {"nodes": {"data": 1}, "status": "======== Autoscaler status", "unreachable": ["127.0.0.1:1"]}


@pytest.mark.parametrize("answer", [(404, "no such page"), {"data": {}}, []])
def test_a_ray_whose_dashboard_gives_no_status(answer: Any, server: Server, run: Any) -> None:
    """The node table is what counts; the text is empty."""
    server.answers["/api/v0/nodes"] = {"data": 1}
    server.answers["/api/cluster_status"] = answer

    assert run("nodes") == (0, [{"nodes": {"data": 1}, "status": "", "unreachable": []}])


def test_a_dashboard_that_is_not_up_is_an_error(run: Any, server: Server) -> None:
    """One object with the reason, and exit code 1: never a traceback."""
    server.answers["/api/jobs/"] = (503, "starting")
    code, (said,) = run("jobs")

    assert (code, said) == (1, {"error": "starting"})


def test_it_needs_nothing_but_the_standard_library() -> None:
    """It must run in any image's Python, old ones too, and start fast."""
    files = list(HEAD.parent.glob("*.py"))
    own = {file.stem for file in files} | {"torch"}  # the ranks of the network probe import it late, in images that have it
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}

        assert imported - set(sys.stdlib_module_names) - own == set(), file.name
