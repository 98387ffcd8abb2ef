"""Untrusted output of the diagnosis query."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from launcher.core import redaction
from launcher.tools import diagnosis
from launcher.tools.diagnosis import (
    DIAGNOSIS,
    ENGINES,
    INSIDE,
    INSPECT,
    LOGS,
    STACKS,
    STATE,
    Log,
    NodeReport,
    parse_report,
    query_diagnosis,
)

MARK = "@@f00d"
NOW = 1795300000.0  # 2026-11-21 22:26:40 UTC
# Two containers: the first runs, with another /tmp; the second has exited.
DOCKER = r"""#!/bin/sh
echo "$*" >> "$0.said"
case $1 in
ps) [ ! -e "$0.refuses" ] || {
      echo "permission denied while trying to connect to the Docker daemon socket" >&2; exit 1; }
  printf 'aaa\nbbb\n' ;;
inspect)
  case "$*" in
  *Running*) case "$*" in *aaa*) echo true ;; *) echo false ;; esac ;;
  *format*)
    echo '{"name":"/c-gpu01","role":"head",'\
'"state":{"Status":"running","StartedAt":"2026-11-21T20:00:00Z"},"restarts":0}'
    echo '{"name":"/c-gpu01-probe","role":"probe",'\
'"state":{"Status":"exited","ExitCode":137,"OOMKilled":true,'\
'"FinishedAt":"2026-11-21T20:14:02.5Z"},"restarts":2}' ;;
  *) echo '[{"Name":"/c-gpu01"}]' ;;
  esac ;;
logs) cat "$0.log" ;;
exec) shift 6; script=$(printf %s "$1" | sed "s#/tmp/#$0.tmp/#g"); shift
  exec sh -c "$script" "$@" ;;
esac
"""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "motd",
        f"{MARK} ",
        f"{MARK} rc 0",
        f"{MARK} rc 99999",
        f"{MARK} state\nnull\n[]\n" + "[" * 9000,
        f"{MARK} servers\na\n{MARK} rc 0\n{MARK} observed-1\n{'[' * 9000}\n{MARK} rc 0",
        f"{MARK} zone\n+9999999\n{MARK} rc 0",
        f"{MARK} clock\n1e99\n{MARK} rc 0",
        f"{MARK} ../../etc/passwd\nx\n{MARK} rc 0",
        f"{MARK} log-0\nx\n{MARK} log-99\n\x00\n{MARK} log-1",
        (
            f'{MARK} state\n{{"name": 1, "role": {{}}, "state": {{"Status": [], "ExitCode":'
            f' "x"}}}}\n{MARK} rc 0'
        ),
        (
            f'{MARK} state\n{{"name": 1, "role": [], "state": {{"Status": "x", "ExitCode": 1e9}},'
            f' "restarts": 1e400}}\n{MARK} rc 0'
        ),
    ],
)
def test_invalid_answers_are_tolerated(text: str) -> None:
    """The parser does not raise, and accepts only logs as logs."""
    report = parse_report(text, MARK)

    assert {log.title for log in report.logs} <= {"container"}


def test_a_log_cannot_pretend_to_be_another_part() -> None:
    """It cannot guess the mark; truncated output is parsed as far as possible."""
    report = parse_report(
        f"{MARK} ids\na\n{MARK} rc 0\n{MARK} log-1\n@@guess kernel\nOut of memory\n{MARK} rc"
        f" 0\n{MARK} log-2\nhalf",
        MARK,
    )

    assert [(log.part, log.lines) for log in report.logs] == [
        ("log-1", ("@@guess kernel", "Out of memory")),
        ("log-2", ("half",)),
    ]


def test_lines_are_cleaned_before_they_are_cut() -> None:
    """Terminal codes and secrets are removed first, so that no part of a secret remains."""
    redaction.add_secrets("correct-horse-battery")
    try:
        report = parse_report(
            f"{MARK} log-1\n\x1b[31mred\x1b[0m\r\n{'x' * 990}correct-horse-battery\n{MARK} rc 0",
            MARK,
        )
    finally:
        redaction.clear_secrets()

    assert report.logs[0].lines[0] == "red"
    assert report.logs[0].lines[1] == "x" * 990 + "***"


@pytest.mark.parametrize(
    ("text", "zone", "ago"),
    [
        ("2026-11-21T22:26:10.123456789Z", 0, 30),
        ("[2026-11-21 22:26:10,123 W 17 17] gcs_rpc_client.h:151: Failed", 0, 30),
        ("2026-11-21 23:26:10,123\tINFO worker.py:1514 -- Using address", 3600, 30),
        ("2026-11-21T23:26:10,123456+01:00 Out of memory", 0, 30),
        ("2026-11-21T17:26:10-0500 Out of memory", 0, 30),
        ("(APIServer pid=1) INFO 11-21 22:26:10 [core.py:12] ready", 0, 30),
        ("INFO 12-21 22:26:40 [core.py:12] of last year", 0, 335 * 86400),
    ],
)
def test_times_are_parsed(text: str, zone: float, ago: float) -> None:
    """With their own zone, else the container's; a missing year is the last that fits."""
    assert diagnosis.parse_time(text, zone, NOW) == NOW - ago


@pytest.mark.parametrize(
    "text",
    [
        "Traceback",
        "9999-12-31T23:59:59-23:59",
        "INFO 13-45 22:26:10 x",
        "2026-99-21 22:26:10",
        "0001-01-01T00:00:00Z",
        "INFO 02-29 22:26:10 x",
    ],
)
def test_invalid_times_are_none(text: str) -> None:
    """Including Docker's value for "never", a day missing in this year, and the far future."""
    assert diagnosis.parse_time(text, 0, NOW) is None


def test_a_line_without_a_time_has_that_of_the_line_above() -> None:
    """As in tracebacks; Docker's stamp takes precedence over the line's own time."""
    log = Log(
        part="x",
        title="x",
        lines=("a", "INFO 11-21 22:26:10 b", "  File", "c"),
        stamps={3: "2026-11-21T22:26:20Z"},
    )

    times = diagnosis.line_times(log, range(4), NOW)

    assert list(times.values()) == [None, NOW - 30, NOW - 30, NOW - 20]
    assert diagnosis.line_times(log, [2], NOW) == {2: NOW - 30}
    assert diagnosis.parse_time(diagnosis.format_time(NOW), 0, NOW) == NOW


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    """A fake docker command."""
    path = tmp_path / "docker"
    path.write_text(DOCKER)
    path.chmod(0o755)
    (tmp_path / "docker.log").write_text(
        "2026-11-21T20:14:00.1Z first\n2026-11-21T20:14:01.1Z second\n"
    )
    return path


def query_output(
    docker: Path, parts: tuple[str, ...], *, size: int = 10_000, since: float | None = None
) -> str:
    """Query this machine, and return the output."""
    argv = query_diagnosis(
        (str(docker),),
        mark=MARK,
        cluster="c",
        state_dir=str(docker.parent / "state"),
        parts=parts,
        lines=50,
        size=size,
        since=since,
    )
    ran = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)

    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def query_report(
    docker: Path, parts: tuple[str, ...] = DIAGNOSIS, *, since: float | None = None
) -> NodeReport:
    """Query this machine, and parse the output."""
    return parse_report(query_output(docker, parts, since=since), MARK)


def test_containers_and_their_logs_are_reported(docker: Path) -> None:
    """All containers with states, all lines with times."""
    report = query_report(docker)

    assert report.clock is not None
    assert [
        (state.name, state.role, state.status, state.exit_code, state.oom, state.restarts)
        for state in report.states
    ] == [
        ("c-gpu01", "head", "running", 0, False, 0),
        ("c-gpu01-probe", "probe", "exited", 137, True, 2),
    ]
    logs = [state for state in report.logs if state.part.startswith("log-")]
    assert [(state.title, state.lines) for state in logs] == [
        ("container", ("first", "second")),
        ("probe container", ("first", "second")),
    ]
    assert logs[0].stamps == {0: "2026-11-21T20:14:00Z", 1: "2026-11-21T20:14:01Z"}
    assert report.gaps.get("containers") is None


def test_running_containers_are_queried(docker: Path) -> None:
    """Ray's newest jobs, workers, Ray itself and NCCL's warnings, in running containers only."""
    logs = docker.parent / "docker.tmp" / "ray" / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs.parents[1] / "session_latest").symlink_to("session_2026")
    (logs / "job-driver-serve-1.log").write_text("driver\n")
    (logs / "worker-1.err").write_text("worker\n")
    (logs / "worker-2.out").write_text("")
    (logs / "raylet.out").write_text("raylet\n")
    (logs.parents[2] / "vlaunch-nccl.x.log").write_text("chatter\nNCCL WARN no\n")
    report = query_report(docker, (STATE, INSIDE))

    assert [(log.title, log.lines) for log in report.logs] == [
        ("job driver", ("driver",)),
        ("Ray worker", ("worker",)),
        ("Ray", ("raylet",)),
        ("NCCL", ("NCCL WARN no",)),
    ]
    calls = (docker.parent / "docker.said").read_text().splitlines()
    assert [line.split()[1] for line in calls if line.startswith("exec ")] == ["aaa"]


def test_the_supervisors_files_are_included(docker: Path) -> None:
    """From the launcher's folder, by server; files of earlier versions of vlaunch are ignored."""
    folder = docker.parent / "state" / "c" / "server"
    for name in ("chat", "embed", "Odd"):
        (folder / name).mkdir(parents=True)
    (folder / "server.json").write_text("{}")
    (folder / "chat" / "observed.json").write_text('{"state": "ready"}')
    (folder / "chat" / "desired.json").write_text("{half")
    (folder / "embed" / "history.json").write_text("[1]")
    report = query_report(docker)

    assert report.supervisor_files == {
        "chat": {"observed": {"state": "ready"}},
        "embed": {"history": [1]},
    }


def test_the_logs_of_engines_are_included(docker: Path) -> None:
    """Rotated ones before current ones, within the limit, even without a running container."""
    folder = docker.parent / "state" / "c" / "server" / "chat"
    folder.mkdir(parents=True)
    (folder / "engine.log.1").write_text("".join(f"{at}\n" for at in range(100)))
    (folder / "engine.log").write_text("last\n")
    (log,) = query_report(docker, (ENGINES,)).logs

    assert (log.title, len(log.lines), log.lines[-2:]) == ("server chat", 50, ("99", "last"))


def test_stacks_of_the_watchdog_come_along(docker: Path) -> None:
    """The newest files of a server, each with its name; other files in the folder do not."""
    folder = docker.parent / "state" / "c" / "server" / "chat"
    folder.mkdir(parents=True)
    for at in range(8):
        path = folder / f"VLLM_STACK_DUMP_for_worker_{at}_7.log"
        path.write_text(f'Thread 0x1 (most recent call first):\n  File "w.py", line {at} in run\n')
        os.utime(path, (1e9 + at, 1e9 + at))
    (folder / "other").write_text("no dump\n")
    (folder.parent / "embed").mkdir()
    (log,) = query_report(docker, (STACKS,)).logs

    assert log.title == "stacks of server chat"
    assert [line for line in log.lines if "==>" in line] == [
        f"==> VLLM_STACK_DUMP_for_worker_{at}_7.log" for at in range(2, 8)
    ]
    assert log.lines[-1] == '  File "w.py", line 7 in run'


def test_a_log_has_its_limit_in_lines_and_in_bytes(docker: Path) -> None:
    """A gigabyte on one line takes no more than a short one."""
    (docker.parent / "docker.log").write_text(
        "".join(f"2026-11-21T20:14:00Z {at}\n" for at in range(1000))
    )
    lines = query_report(docker, (LOGS,)).logs[0].lines
    (docker.parent / "docker.log").write_text("x" * 5_000_000)

    assert (len(lines), lines[-1]) == (50, "999")
    assert len(query_output(docker, (LOGS,), size=2000)) < 2 * 2000 + 2000


def test_only_requested_parts_are_reported(docker: Path) -> None:
    """Docker itself applies the limit of time."""
    report = query_report(docker, (STATE, INSPECT))
    query_report(docker, (LOGS,), since=1800)

    assert (report.logs, json.loads(report.inspect)) == ((), [{"Name": "/c-gpu01"}])
    assert "--since=1800s" in (docker.parent / "docker.said").read_text()


def test_a_failing_docker_has_a_reason(docker: Path) -> None:
    """The message is the evidence."""
    (docker.parent / "docker.refuses").touch()
    report = query_report(docker)

    assert report.gaps["containers"].startswith("permission denied while trying to connect")
    assert report.states == ()


def test_a_truncated_first_line_is_dropped(docker: Path) -> None:
    """A truncated secret would not be recognized; complete lines stay."""
    lines = [f"2026-11-21T20:14:00.1Z {number:04} {'x' * 60}" for number in range(49)]
    (docker.parent / "docker.log").write_text("\n".join(lines) + "\n")
    whole = [log.lines for log in query_report(docker).logs if log.part == "log-1"]
    cut = [log.lines for log in parse_report(query_output(docker, ("logs",), size=2000), MARK).logs]

    assert len(whole[0]) == 49
    assert 0 < len(cut[0]) < 30
    assert all(re.fullmatch(r"\d{4} x{60}", line) for line in cut[0])


def test_a_truncated_first_line_of_a_worker_is_dropped(docker: Path) -> None:
    """As for containers; short logs are complete."""
    logs = docker.parent / "docker.tmp" / "ray" / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("one\ntwo\n")
    (logs / "worker-2.out").write_text("".join(f"{'x' * 990}\n" for _ in range(99)))
    worker_lines = {
        log.part: log.lines for log in query_report(docker).logs if log.part.startswith("worker")
    }

    assert ("one", "two") in worker_lines.values()
    assert {len(line) for lines in worker_lines.values() for line in lines} == {3, 990}
