"""The program for batch jobs' folders on the head, run as on a head."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from launcher.batch import desk
from launcher.tools.shipped import node_files as files
from tests.batch.driver.jobs import job, surveyed
from tests.batch.driver.test_ledger import run

pytestmark = pytest.mark.processes


@cache
def mounted() -> Path:
    """The payload in the layout of containers, written once; returns the program."""
    folder = tempfile.mkdtemp(prefix="vlaunch-payload-")
    atexit.register(shutil.rmtree, folder)
    with tarfile.open(fileobj=io.BytesIO(files.payload_tar())) as archive:
        archive.extractall(folder, filter="data")
    return Path(folder) / "batch.pyz"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Return a job's folder."""
    return tmp_path / "vlaunch" / "lab" / "batch" / "demo"


def query(*argv: str | Path, stdin: bytes = b"") -> dict[str, Any]:
    """Run the program in this process: starting Python for every query would be slow."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["desk.py", *map(str, argv)]),
        patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = desk.main()
    return answered(code, out.getvalue(), err.getvalue())


def run_program(*argv: str | Path, stdin: bytes = b"", **environment: str) -> dict[str, Any]:
    """Run the program as a process, as on a head."""
    done = subprocess.run(
        [sys.executable, mounted(), *map(str, argv)],
        input=stdin,
        capture_output=True,
        timeout=30,
        check=False,
        env={**os.environ, **environment},
    )
    return answered(done.returncode, done.stdout, done.stderr)


def answered(code: int, out: str | bytes, err: str | bytes) -> dict[str, Any]:
    """Return the printed object; the exit code marks an error."""
    assert not err
    answer = json.loads(out)
    assert code == (1 if "error" in answer else 0)
    return answer  # type: ignore[no-any-return]


def prepared(work: Path, **changes: Any) -> dict[str, Any]:
    payload = {
        "version": 1,
        "job": "demo",
        "cluster": "lab",
        "work": str(work),
        "write": {"path": str(work / "output")},
        **changes,
    }
    data = json.dumps(payload).encode()
    return query("put", work, "job.json", "--offset", "0", "--last", sha(data), stdin=data)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_job_is_prepared_and_described(work: Path) -> None:
    """A missing job is absent; an existing one is described completely."""
    assert run_program("look", work) == {"absent": True}
    prepared(work)
    (work / "progress.json").write_text('{"state": "running"}')
    result = run_program("look", work)

    assert (result["name"], result["job"]["write"]["path"]) == ("demo", str(work / "output"))
    assert (result["progress"], result["alive"], result["inputs"]) == (
        {"state": "running"},
        False,
        {},
    )
    assert prepared(work, digest="new") == {"bytes": len((work / "job.json").read_bytes())}
    assert query("look", work)["job"]["digest"] == "new"


def test_a_hundred_jobs_are_listed(work: Path) -> None:
    """In brief, for any number of files; other folders are omitted."""
    for number in range(100):
        folder = work.parent / f"job-{number:03}"
        (folder / "input").mkdir(parents=True)
        (folder / "input" / "0000-a").write_bytes(b"x" * number)
        (folder / "job.json").write_text(
            json.dumps(
                {"job": f"job-{number:03}", "identity": {str(n): "x" * 50 for n in range(50)}}
            )
        )
    (work.parent / "empty").mkdir()
    (work.parent / "A file").touch()
    (work.parent / "link").symlink_to(work.parent / "job-000")
    result = query("list", work.parent)["jobs"]

    assert [row["name"] for row in result] == [f"job-{number:03}" for number in range(100)]
    assert result[7] == {"name": "job-007", "progress": {}, "alive": False}


def test_a_driver_is_alive_while_it_holds_its_lock(work: Path) -> None:
    """For any progress; the check does not take the lock."""
    prepared(work)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert query("look", work)["alive"] is True
        assert "still runs" in query("remove", work)["error"]
    assert query("look", work)["alive"] is False


def test_files_are_received_in_pieces(work: Path) -> None:
    """They get their name once complete; a repeated piece replaces the old one."""
    prepared(work)
    data = os.urandom(100_000)
    assert run_program("put", work, "input/0000-a.jsonl", "--offset", "0", stdin=data[:40_000]) == {
        "bytes": 40_000
    }
    assert query("look", work)["inputs"] == {"input/.0000-a.jsonl.part": 40_000}
    assert query("put", work, "input/0000-a.jsonl", "--offset", "50000", stdin=b"x") == {
        "error": "input/0000-a.jsonl has 40000 bytes, not 50000"
    }
    assert query(
        "put", work, "input/0000-a.jsonl", "--offset", "30000", stdin=data[30_000:60_000]
    ) == {"bytes": 60_000}
    rest = ("put", work, "input/0000-a.jsonl", "--offset", "60000", "--last", sha(data))
    assert query(*rest, stdin=data[60_000:]) == {"bytes": 100_000}

    assert (work / "input" / "0000-a.jsonl").read_bytes() == data
    assert query("look", work)["inputs"] == {"input/0000-a.jsonl": 100_000}


def test_a_file_with_a_wrong_checksum_is_rejected(work: Path) -> None:
    """It must be sent again completely."""
    prepared(work)
    result = query(
        "put", work, "code/deep/m.py", "--offset", "0", "--last", sha(b"good"), stdin=b"bad"
    )
    assert f"code/deep/m.py arrived with sha256 {sha(b'bad')}" in result["error"]
    assert not (work / "code" / "deep" / "m.py").exists()

    assert query("put", work, "code/deep/m.py", "--offset", "0", "--last", sha(b""), stdin=b"") == {
        "bytes": 0
    }


@pytest.mark.parametrize(
    "path",
    [
        "../out",
        "/etc/passwd",
        "input/../../x",
        "input//x",
        "",
        "input/./x",
        "link/x",
        "link/new/x",
        "input/link",
    ],
)
def test_paths_outside_are_rejected(work: Path, tmp_path: Path, path: str) -> None:
    """By dots, from the root, or through links."""
    prepared(work)
    (tmp_path / "target").mkdir()
    (work / "input").mkdir()
    (tmp_path / "file").write_text("mine")
    (work / "link").symlink_to(tmp_path / "target")
    (work / "input" / "link").symlink_to(tmp_path / "file")

    assert "error" in query("put", work, path, "--offset", "0", "--last", sha(b"x"), stdin=b"x")
    assert (list((tmp_path / "target").iterdir()), (tmp_path / "file").read_text()) == ([], "mine")


@pytest.mark.parametrize(
    "folder",
    [
        "elsewhere",
        "vlaunch/lab/batch",
        "vlaunch/lab/batch/../../demo",
        "vlaunch/lab/batch/A b",
        "link",
    ],
)
def test_foreign_folders_are_not_touched(tmp_path: Path, folder: str) -> None:
    """Neither written nor removed."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")

    for verb in ("remove", "put"):
        assert (
            "is not the folder of a batch job"
            in query(verb, tmp_path / folder, "input/a", stdin=b"{}")["error"]
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "link"]


def test_written_rows_are_reported(tmp_path: Path, work: Path) -> None:
    """From this job's ledger; an object store is known to be empty only before the input was
    counted.
    """
    work.parent.mkdir(parents=True)
    (tmp_path / "in.jsonl").write_bytes(b'{"n": 1}\n' * 12)
    spec = job(tmp_path, tmp_path / "in.jsonl", work=str(work), out=str(work / "output"))
    messages = []
    prepared(work)
    messages.append(query("look", work)["written"])
    manifest = surveyed(spec)
    messages.append(query("look", work)["written"])
    run(spec, manifest)
    messages.append(query("look", work)["written"])
    assert messages == [False, False, True]

    prepared(work, job="other")
    assert query("look", work)["written"] is False
    prepared(work, write={"path": "s3://b/o"})
    assert query("look", work)["written"] is True
    (work / "manifest.json").unlink()
    assert query("look", work)["written"] is False


def listed(work: Path) -> dict[str, dict[str, Any]]:
    """Return the files of the written list, by path."""
    count = query("outputs", work)["files"]
    files = json.loads((work / "outputs.json").read_text())["files"]
    assert len(files) == count
    return {file["path"]: file for file in files}


def test_outputs_are_committed_files(tmp_path: Path, work: Path) -> None:
    """With sizes and digests from the ledger, once; files without an entry, or of another size, do
    not count.
    """
    work.parent.mkdir(parents=True)
    (tmp_path / "in.jsonl").write_bytes(b'{"n": 1}\n' * 12)
    spec = job(
        tmp_path,
        tmp_path / "in.jsonl",
        work=str(work),
        out=str(work / "output"),
        write={"rows_per_file": 5},
    )
    prepared(work)
    run(spec, surveyed(spec))
    out = work / "output"
    (out / "summary.json").write_text("{}")
    (out / "rows" / "part-000099.jsonl").touch()
    files = listed(work)

    assert sorted(files) == [
        "errors/part-000003.jsonl",
        "rows/part-000001.jsonl",
        "rows/part-000002.jsonl",
        "summary.json",
    ]
    for path, item in files.items():
        data = (out / path).read_bytes()
        assert (len(data), sha(data)) == (item["bytes"], item["sha256"])
    paths = [out / "ledger" / f"part-{number:06d}.json" for number in (1, 2, 3)]
    paths[2].write_bytes(b"".join(path.read_bytes() for path in paths))
    paths[0].unlink()
    assert listed(work) == files
    (out / "rows" / "part-000001.jsonl").write_text("cut")
    assert len(listed(work)) == 3


def test_a_job_is_removed_with_its_output(tmp_path: Path, work: Path) -> None:
    """Other files in its output folder stay; another job's folder is unchanged."""
    work.parent.mkdir(parents=True)
    out = tmp_path / "out"
    (tmp_path / "in.jsonl").write_bytes(b'{"n": 1}\n' * 12)
    spec = job(tmp_path, tmp_path / "in.jsonl", work=str(work))
    run(spec, surveyed(spec))
    (out / "rows" / "notes.txt").touch()
    prepared(work, write={"path": str(out)}, job="other")
    assert query("remove", work) == {"removed": [str(work)]}
    mark = (out / "ledger" / "job.json").read_text()
    (out / "ledger" / "job.json").write_text(json.dumps({"job": "demo"}))  # of no cluster
    prepared(work, write={"path": str(out)})
    assert query("remove", work) == {"removed": [str(work)]}
    (out / "ledger" / "job.json").write_text(mark)
    prepared(work, write={"path": str(out)})

    assert query("remove", work) == {"removed": [str(out), str(work)]}
    assert query("remove", work) == {"removed": []}
    assert [str(path.relative_to(out)) for path in out.rglob("*")] == ["rows", "rows/notes.txt"]
    assert not work.exists()


@pytest.fixture
def dashboard() -> Iterator[int]:
    """Fake of Ray's job API with a single job."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            expected = self.path == "/api/jobs/batch-demo-1"
            self.send_response(200 if expected else 404)
            self.end_headers()
            self.wfile.write(
                json.dumps(
                    {"submission_id": "batch-demo-1", "status": "RUNNING", "message": "ok"}
                ).encode()
            )

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_running_job_is_followed(work: Path, tmp_path: Path, dashboard: int) -> None:
    """Complete new lines of its log, Ray's status, and its own progress."""
    prepared(work)
    (work / "progress.json").write_text(json.dumps({"state": "running", "updated": time.time()}))
    (tmp_path / "job-driver-batch-demo-1.log").write_bytes(b"old\nnew \xff line\nhalf")
    argv = ("follow", work, "--job", "batch-demo-1", "--offset", "4", "--dashboard", str(dashboard))
    result = run_program(*argv, VLAUNCH_RAY_LOGS=str(tmp_path))

    assert (result["job"]["status"], result["log"], result["offset"]) == (
        "RUNNING",
        "new � line\n",
        15,
    )
    assert result["progress"]["state"] == "running"
    gone = run_program(
        "follow",
        work,
        "--job",
        "gone",
        "--dashboard",
        str(dashboard),
        VLAUNCH_RAY_LOGS=str(tmp_path),
    )
    assert (gone["job"]["status"], gone["log"]) == ("ABSENT", "")


def test_follow_waits_for_a_change(work: Path, tmp_path: Path, dashboard: int) -> None:
    """Of the state or the log; not of an earlier run's files, and not beyond the requested time."""
    prepared(work)
    log = tmp_path / "job-driver-batch-demo-1.log"

    def say(state: str, submission: str = "batch-demo-1") -> None:
        payload = {"state": state, "submission": submission}
        (work / "new.json").write_text(json.dumps(payload))
        (work / "new.json").replace(work / "progress.json")

    def follow(expected: str, patience: float) -> tuple[float, Any]:
        argv = ("--job", "batch-demo-1", "--dashboard", str(dashboard), "--known", expected)
        began = time.monotonic()
        environment = {"VLAUNCH_RAY_LOGS": str(tmp_path)}
        result = run_program("follow", work, *argv, "--patience", str(patience), **environment)
        return time.monotonic() - began, result

    say("done", "batch-demo-0")
    assert follow("", 1.0)[0] >= 1.0
    say("running")
    assert follow("running", 1.0)[0] >= 1.0
    news: dict[str, Callable[[], object]] = {
        "running": lambda: say("finishing"),
        "finishing": lambda: log.write_text("a line\n"),
    }
    for expected, new in news.items():
        timer = threading.Timer(0.5, new)
        timer.start()
        took, result = follow(expected, 120.0)
        timer.join()
        assert took < 120
    assert (result["progress"]["state"], result["log"]) == ("finishing", "a line\n")


def test_a_finished_driver_is_followed_to_its_exit(
    work: Path, tmp_path: Path, dashboard: int
) -> None:
    """Ray notices the exit a moment later, without a further query."""
    prepared(work)
    payload = {"state": "done", "submission": "batch-demo-1"}
    (work / "progress.json").write_text(json.dumps(payload))
    argv = ("--job", "batch-demo-1", "--dashboard", str(dashboard), "--known", "running")
    began = time.monotonic()
    environment = {"VLAUNCH_RAY_LOGS": str(tmp_path)}
    result = run_program("follow", work, *argv, "--patience", "1", **environment)

    assert result["job"]["status"] == "RUNNING"
    assert time.monotonic() - began >= 1.0


def test_without_ray_a_job_cannot_be_followed(work: Path) -> None:
    """The error names the unresponsive API."""
    assert "refused" in run_program("follow", work, "--job", "j", "--dashboard", "1")["error"]


def test_a_check_of_the_lock_does_not_block_removal(work: Path) -> None:
    """A check holds it for an instant."""
    prepared(work)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        end = threading.Timer(0.5, fcntl.flock, (lock, fcntl.LOCK_UN))
        end.start()
        assert str(work) in query("remove", work)["removed"]
        end.join()


def test_invalid_json_files_count_as_absent(work: Path) -> None:
    """Neither a pipe, which would block, nor endless brackets."""
    prepared(work)
    (work / "job.json").unlink()
    os.mkfifo(work / "job.json")
    (work / "progress.json").write_text("[" * 200_000)
    message = query("look", work)
    assert (message["progress"], message["job"]) == ({}, {})
