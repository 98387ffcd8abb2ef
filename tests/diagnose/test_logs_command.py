"""`vlaunch logs`: every container and every server, line by line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.core import shell
from launcher.core.errors import ConnectError
from tests.command_line import Cluster, FakeDocker


@pytest.fixture
def logging_cluster(cluster: Cluster) -> Cluster:
    """Simulate containers with logs."""
    cluster.logs = {
        "gpu01": {"head": "ready\nsecond é\n".encode()},
        "gpu02": {"worker": b"joined\n", "probe": b"probing\n"},
    }
    cluster.server_log = ["chat INFO: started"]
    return cluster


def test_every_line_has_its_source(logging_cluster: Cluster) -> None:
    """Containers by node, and servers' engines by node and name: every node has its own log."""
    ran = logging_cluster.run("logs")

    assert ran.code == 0
    assert sorted(ran.out.splitlines()) == [
        "gpu01/chat: INFO: started",
        "gpu01: ready",
        "gpu01: second é",
        "gpu02/chat: INFO: started",
        "gpu02: joined",
        "gpu02: probing",
    ]


def test_one_server_only(logging_cluster: Cluster) -> None:
    """On all nodes, without the containers' logs."""
    ran = logging_cluster.run("logs", "--server", "chat")

    assert sorted(ran.out.splitlines()) == [
        "gpu01/chat: INFO: started",
        "gpu02/chat: INFO: started",
    ]
    assert {
        command.argv[command.argv.index("servers") + 1] for command in logging_cluster.followed
    } == {"chat"}


def test_a_server_without_a_log_has_a_hint(logging_cluster: Cluster) -> None:
    """Instead of empty output."""
    logging_cluster.server_log = []
    ran = logging_cluster.run("logs", "--server", "chat")

    assert ran.code == 2
    assert "server `chat` has no log" in ran.err
    assert "hint: list the servers: `vlaunch status`" in ran.err


@pytest.mark.parametrize(
    "line", ["Traceback (most recent call last):", "../../x y", "\x1b[2J y", ""]
)
def test_lines_without_a_server_are_ignored(logging_cluster: Cluster, line: str) -> None:
    """Other output of a container does not count as a server's name."""
    logging_cluster.logs, logging_cluster.server_log = {}, [line, "chat y"]

    assert logging_cluster.run("logs", "gpu01").out == "gpu01/chat: y\n"


def test_the_script_for_engines_logs(tmp_path: Path) -> None:
    """Run locally: the end of all logs, or of one; a folder without a log is no server's."""
    for name in ("chat", "embed", "old"):
        (tmp_path / name).mkdir()
    (tmp_path / "chat" / "engine.log").write_text("one\ntwo\n")
    (tmp_path / "embed" / "engine.log").write_text("a | b & c\n")

    def read(*arguments: str) -> list[str]:
        argv, env = (
            ("sh", "-c", shell.program_text("server_logs"), "servers", *arguments),
            {
                **os.environ,
                "VLAUNCH_STATE": str(tmp_path),
                "VLAUNCH_RAY_LOGS": str(tmp_path / "ray"),
            },
        )
        return sorted(
            subprocess.run(
                argv, env=env, capture_output=True, text=True, check=True, timeout=30
            ).stdout.splitlines()
        )

    assert read("", "1", "-q") == ["chat two", "embed a | b & c"]
    assert read("chat", "9", "-q") == ["chat one", "chat two"]
    assert read("none", "9", "-q") == []
    (tmp_path / "chat.2").mkdir()
    (tmp_path / "chat.2" / "engine.log").write_text("three\n")
    assert read("chat", "1", "-q") == ["chat two", "chat.2 three"]
    assert read("chat.2", "1", "-q") == ["chat.2 three"]
    (tmp_path / "chat.2" / "engine.log").unlink()

    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "job-driver-batch-my-job-2.log").write_text("driver\n")
    (tmp_path / "ray" / "worker-a-01-7.out").write_text(
        ":job_id:01\nvlaunch: an engine of batch job my.job\nKeyError: 1\n"
    )
    (tmp_path / "ray" / "worker-b-01-8.out").write_text("of something else\n")

    assert [line for line in read("", "1", "-q") if line.startswith("batch:")] == [
        "batch:my-job driver",
        "batch:my.job:7 KeyError: 1",
    ]
    assert read("chat", "1", "-q") == ["chat two"]


def test_engines_of_a_batch_job_have_their_own_lines(logging_cluster: Cluster) -> None:
    """The limit of lines counts per engine."""
    logging_cluster.logs, logging_cluster.server_log = (
        {},
        ["batch:job driver", "batch:job:7 a", "batch:job:8 b"],
    )

    assert logging_cluster.run("logs", "gpu01", "--tail", "1").out.splitlines() == [
        "gpu01/batch:job: driver",
        "gpu01/batch:job:7: a",
        "gpu01/batch:job:8: b",
    ]


def test_lines_as_json(logging_cluster: Cluster) -> None:
    """One object per line; a container's own log has no name."""
    logging_cluster.logs, logging_cluster.server_log = {"gpu01": {"head": b"up\n"}}, ["chat one"]
    lines = [
        json.loads(line) for line in logging_cluster.run("logs", "gpu01", "--json").out.splitlines()
    ]

    assert sorted(lines, key=lambda line: str(line["text"])) == [
        {"node": "gpu01", "log": "chat", "text": "one"},
        {"node": "gpu01", "log": None, "text": "up"},
    ]


def test_a_split_character_is_joined(logging_cluster: Cluster) -> None:
    """The network may split data anywhere."""
    logging_cluster.logs = {"gpu01": {"head": "abcdefé and on\n".encode()}}

    assert "gpu01: abcdefé and on" in logging_cluster.run("logs", "gpu01").out


def test_an_incomplete_last_line_is_shown(logging_cluster: Cluster) -> None:
    """A killed container had no time for a newline."""
    logging_cluster.logs = {"gpu01": {"head": b"first\nlast words"}}

    assert "gpu01: last words" in logging_cluster.run("logs", "gpu01").out


def test_named_nodes_only(logging_cluster: Cluster) -> None:
    """Of containers and of servers."""
    assert set(logging_cluster.run("logs", "gpu02").out.splitlines()) == {
        "gpu02: joined",
        "gpu02: probing",
        "gpu02/chat: INFO: started",
    }


def test_no_logs_have_a_hint(cluster: Cluster) -> None:
    """Instead of empty output."""
    ran = cluster.run("logs")

    assert ran.code == 2
    assert "the containers of cluster c have no log output" in ran.err
    assert "hint: run `vlaunch up`" in ran.err


def test_a_negative_number_of_lines_is_invalid(logging_cluster: Cluster) -> None:
    """Instead of empty output."""
    ran = logging_cluster.run("logs", "--tail", "-1")

    assert ran.code == 2
    assert "--tail" in ran.err


def test_lines_of_containers_are_sanitized(logging_cluster: Cluster) -> None:
    """vLLM colours its log."""
    logging_cluster.logs = {"gpu01": {"head": b"\x1b[36m(Worker)\x1b[0;0m up\n"}}
    logging_cluster.server_log = ["chat \x1b[2J\x07x"]

    assert sorted(logging_cluster.run("logs", "gpu01").out.splitlines()) == [
        "gpu01/chat: x",
        "gpu01: (Worker) up",
    ]


def test_every_container_of_a_node_is_followed(logging_cluster: Cluster) -> None:
    """Concurrently, as followed logs do not end."""
    logging_cluster.server_log = []
    ran = logging_cluster.run("logs", "-f", "gpu02")

    assert (ran.code, set(ran.out.splitlines())) == (0, {"gpu02: joined", "gpu02: probing"})


@pytest.mark.parametrize(("flags", "seconds"), [([], "60.0"), (["-f"], "0")])
def test_programs_on_nodes_stop_with_the_launcher(
    logging_cluster: Cluster, flags: list[str], seconds: str
) -> None:
    """Killing `docker exec` does not kill `tail` in the container; the end of its input does.
    Followed logs have no deadline.
    """
    logging_cluster.logs = {}
    logging_cluster.run("logs", *flags)
    command, other = logging_cluster.followed

    assert command.argv[:4] == ("docker", "exec", "--interactive", "vlaunch-c-gpu01")
    assert (other.node, other.argv[3]) == ("gpu02", "vlaunch-c-gpu02")
    assert command.argv[command.argv.index("bounded") + 1] == seconds
    assert command.hold_stdin
    assert (command.timeout == float("inf")) is bool(flags)


@pytest.mark.parametrize(("call", "first"), [("containers", []), ("logs", ["gpu01: ready"])])
def test_an_unresponsive_docker_is_named_once(
    logging_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, call: str, first: list[str]
) -> None:
    """The error line has its node's name, at the start and in the middle of a log."""
    logging_cluster.server_log = []

    def fail(*_: object, **__: object) -> Iterator[bytes]:
        if first:
            yield b"ready\n"
        raise ConnectionError("broken")

    monkeypatch.setattr(FakeDocker, call, fail)
    ran = logging_cluster.run("logs", "gpu01")

    assert ran.out.splitlines() == [*first, "gpu01: [Docker's API did not answer]"]


def test_an_unreachable_node_does_not_hide_the_others(logging_cluster: Cluster) -> None:
    """Only selected nodes are contacted."""
    logging_cluster.missing["gpu01"] = ConnectError("gpu01", "cannot be reached: timed out")

    assert logging_cluster.run("logs", "gpu02").code == 0
    assert logging_cluster.run("logs").code == 1
