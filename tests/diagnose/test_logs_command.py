"""`vlaunch logs`: every container and every server, line by line."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.core import shell
from launcher.core.errors import ConnectError
from tests.command_line import Cluster, FakeDocker


@pytest.fixture
def talking(cluster: Cluster) -> Cluster:
    """Simulate containers with logs."""
    cluster.logs = {
        "gpu01": {"head": "ready\nsecond é\n".encode()},
        "gpu02": {"worker": b"joined\n", "probe": b"probing\n"},
    }
    cluster.server_log = ["chat INFO: started"]
    return cluster


def test_every_line_says_where_it_comes_from(talking: Cluster) -> None:
    """Containers by node, and servers' engines by node and name: each node has a log of its own."""
    ran = talking.run("logs")

    assert ran.code == 0
    assert sorted(ran.out.splitlines()) == [
        "gpu01/chat: INFO: started",
        "gpu01: ready",
        "gpu01: second é",
        "gpu02/chat: INFO: started",
        "gpu02: joined",
        "gpu02: probing",
    ]


def test_one_server_only(talking: Cluster) -> None:
    """Of all nodes, and no container's log beside it."""
    ran = talking.run("logs", "--server", "chat")

    assert sorted(ran.out.splitlines()) == [
        "gpu01/chat: INFO: started",
        "gpu02/chat: INFO: started",
    ]
    assert {command.argv[command.argv.index("servers") + 1] for command in talking.followed} == {
        "chat"
    }


def test_a_server_that_has_no_log_says_what_to_do(talking: Cluster) -> None:
    """Rather than nothing."""
    talking.server_log = []
    ran = talking.run("logs", "--server", "chat")

    assert ran.code == 2
    assert "found no log of server `chat`" in ran.err
    assert "hint: list the servers: `vlaunch status`" in ran.err


@pytest.mark.parametrize(
    "line", ["Traceback (most recent call last):", "../../x y", "\x1b[2J y", ""]
)
def test_a_line_without_a_server_s_name_is_none_of_ours(talking: Cluster, line: str) -> None:
    """Other output of a container does not count as a server's name."""
    talking.logs, talking.server_log = {}, [line, "chat y"]

    assert talking.run("logs", "gpu01").out == "gpu01/chat: y\n"


def test_the_logs_of_engines_are_read_on_this_machine(tmp_path: Path) -> None:
    """The script itself: the end of each log, or of one; a folder without a log is no server's."""
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


def test_each_engine_of_a_batch_job_has_its_own_lines(talking: Cluster) -> None:
    """The limit of lines counts per engine."""
    talking.logs, talking.server_log = {}, ["batch:job driver", "batch:job:7 a", "batch:job:8 b"]

    assert talking.run("logs", "gpu01", "--tail", "1").out.splitlines() == [
        "gpu01/batch:job: driver",
        "gpu01/batch:job:7: a",
        "gpu01/batch:job:8: b",
    ]


def test_a_character_that_comes_in_two_pieces_is_whole(talking: Cluster) -> None:
    """Networks cut where they like."""
    talking.logs = {"gpu01": {"head": "abcdefé and on\n".encode()}}

    assert "gpu01: abcdefé and on" in talking.run("logs", "gpu01").out


def test_a_last_line_without_its_end_is_shown(talking: Cluster) -> None:
    """A container that was killed has no time for a newline."""
    talking.logs = {"gpu01": {"head": b"first\nlast words"}}

    assert "gpu01: last words" in talking.run("logs", "gpu01").out


def test_named_nodes_only(talking: Cluster) -> None:
    """Of containers and of servers."""
    assert set(talking.run("logs", "gpu02").out.splitlines()) == {
        "gpu02: joined",
        "gpu02: probing",
        "gpu02/chat: INFO: started",
    }


def test_silence_says_what_to_do(cluster: Cluster) -> None:
    """Rather than nothing."""
    ran = cluster.run("logs")

    assert ran.code == 2
    assert "the containers of cluster c have no log output" in ran.err
    assert "hint: run `vlaunch up`" in ran.err


def test_fewer_lines_than_none_are_a_wrong_request(talking: Cluster) -> None:
    """And not a silent cluster."""
    ran = talking.run("logs", "--tail", "-1")

    assert ran.code == 2
    assert "--tail" in ran.err


def test_what_a_container_prints_cannot_draw_on_the_terminal(talking: Cluster) -> None:
    """vLLM colours its log."""
    talking.logs = {"gpu01": {"head": b"\x1b[36m(Worker)\x1b[0;0m up\n"}}
    talking.server_log = ["chat \x1b[2J\x07x"]

    assert sorted(talking.run("logs", "gpu01").out.splitlines()) == [
        "gpu01/chat: x",
        "gpu01: (Worker) up",
    ]


def test_every_container_of_a_node_is_followed(talking: Cluster) -> None:
    """None of them ends, so none can wait for another."""
    talking.server_log = []
    ran = talking.run("logs", "-f", "gpu02")

    assert (ran.code, set(ran.out.splitlines())) == (0, {"gpu02: joined", "gpu02: probing"})


@pytest.mark.parametrize(("flags", "seconds"), [([], "60.0"), (["-f"], "0")])
def test_what_reads_servers_logs_ends_with_us(
    talking: Cluster, flags: list[str], seconds: str
) -> None:
    """Ending `docker exec` does not end the `tail` in the container; the end of its input does.

    Followed: no deadline.
    """
    talking.logs = {}
    talking.run("logs", *flags)
    command, other = talking.followed

    assert command.argv[:4] == ("docker", "exec", "--interactive", "vlaunch-c-gpu01")
    assert (other.node, other.argv[3]) == ("gpu02", "vlaunch-c-gpu02")
    assert command.argv[command.argv.index("bounded") + 1] == seconds
    assert command.hold_stdin
    assert (command.timeout == float("inf")) is bool(flags)


@pytest.mark.parametrize(("call", "first"), [("containers", []), ("logs", ["gpu01: ready"])])
def test_an_api_that_does_not_answer_is_named_once(
    talking: Cluster, monkeypatch: pytest.MonkeyPatch, call: str, first: list[str]
) -> None:
    """The error line has its node's name, at the start and in the middle of a log."""
    talking.server_log = []

    def fail(*_: object, **__: object) -> Iterator[bytes]:
        if first:
            yield b"ready\n"
        raise ConnectionError("broken")

    monkeypatch.setattr(FakeDocker, call, fail)
    ran = talking.run("logs", "gpu01")

    assert ran.out.splitlines() == [*first, "gpu01: [Docker's API did not answer]"]


def test_a_node_that_is_down_does_not_hide_the_others(talking: Cluster) -> None:
    """Only the nodes that were named are connected to."""
    talking.missing["gpu01"] = ConnectError("gpu01", "cannot be reached: timed out")

    assert talking.run("logs", "gpu02").code == 0
    assert talking.run("logs").code == 1
