"""`vlaunch logs`: every container and the server, line by line."""

from __future__ import annotations

import pytest

from launcher.errors import ConnectError
from tests.cli.conftest import Cluster


@pytest.fixture
def talking(cluster: Cluster) -> Cluster:
    """Containers that have said something."""
    cluster.logs = {"gpu01": {"head": "ready\nsecond é\n".encode()}, "gpu02": {"worker": b"joined\n", "rank": b"rank 1 up\n"}}
    cluster.server_log = ["INFO: started"]
    return cluster


def test_every_line_says_where_it_comes_from(talking: Cluster) -> None:
    """Containers by node, ranks apart, and the server's own log."""
    ran = talking.run("logs")

    assert ran.code == 0
    assert sorted(ran.out.splitlines()) == [
        "gpu01: ready",
        "gpu01: second é",
        "gpu02/rank: rank 1 up",
        "gpu02: joined",
        "server: INFO: started",
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
    """Without the head the server's log is left out as well."""
    assert set(talking.run("logs", "gpu02").out.splitlines()) == {"gpu02: joined", "gpu02/rank: rank 1 up"}


def test_silence_says_what_to_do(cluster: Cluster) -> None:
    """Rather than nothing."""
    ran = cluster.run("logs")

    assert ran.code == 2
    assert "no container of cluster c has said anything" in ran.err
    assert "hint: run `vlaunch up`" in ran.err


def test_fewer_lines_than_none_are_a_wrong_request(talking: Cluster) -> None:
    """And not a silent cluster."""
    ran = talking.run("logs", "--tail", "-1")

    assert ran.code == 2
    assert "--tail" in ran.err


def test_what_a_container_prints_cannot_draw_on_the_terminal(talking: Cluster) -> None:
    """vLLM colours its log."""
    talking.logs = {"gpu01": {"head": b"\x1b[36m(Worker)\x1b[0;0m up\n"}}
    talking.server_log = ["\x1b[2J\x07x"]

    assert sorted(talking.run("logs", "gpu01").out.splitlines()) == ["gpu01: (Worker) up", "server: x"]


def test_every_container_of_a_node_is_followed(talking: Cluster) -> None:
    """None of them ends, so none can wait for another."""
    ran = talking.run("logs", "-f", "gpu02")

    assert (ran.code, set(ran.out.splitlines())) == (0, {"gpu02: joined", "gpu02/rank: rank 1 up"})


@pytest.mark.parametrize(("flags", "seconds"), [([], "60.0"), (["-f"], "0")])
def test_what_reads_the_servers_log_ends_with_us(talking: Cluster, flags: list[str], seconds: str) -> None:
    """Ending `docker exec` does not end the `tail` in the container; the end of its input does. Followed: no deadline."""
    talking.logs = {}
    talking.run("logs", *flags)
    (command,) = talking.followed

    assert command.argv[:4] == ("docker", "exec", "--interactive", "vlaunch-c-gpu01")
    assert command.argv[command.argv.index("bounded") + 1] == seconds
    assert command.hold_stdin
    assert (command.timeout == float("inf")) is bool(flags)


def test_a_node_that_is_down_does_not_hide_the_others(talking: Cluster) -> None:
    """Only the nodes that were named are connected to."""
    talking.missing["gpu01"] = ConnectError("gpu01", "cannot be reached: timed out")

    assert talking.run("logs", "gpu02").code == 0
    assert talking.run("logs").code == 1
