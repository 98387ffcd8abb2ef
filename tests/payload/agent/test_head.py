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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.payload import agent
from launcher.payload.agent import head
from tests.payload.agent.web import Server

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
def test_the_program_in_the_container(server: Server, start: Any) -> None:
    """It finds the agent beside it, and the secrets by its environment, and needs nothing else."""
    server.answers["/api/jobs/"] = {"submission_id": "b"}
    asked = {"argv": ["x"], "submission_id": "b", "metadata": {}}
    with start("submit") as process:
        out, err = process.communicate(json.dumps(asked), timeout=60)

    assert (err, process.returncode, json.loads(out)) == ("", 0, {"submission_id": "b"})
    assert server.asked[-1][2] == "Bearer ray-token"


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
