"""`vlaunch chat`: what is asked, of which node, and what is printed."""

from __future__ import annotations

import json

import pytest

from launcher.errors import ConnectError
from tests.cli.conftest import Cluster


@pytest.fixture
def serving(cluster: Cluster) -> Cluster:
    """A cluster that serves a model, which answers in two pieces."""
    assert cluster.run("up").code == 0
    job = {"submission_id": "serve-1", "status": "RUNNING", "metadata": {"vlaunch.model": "m"}}
    cluster.world.said["jobs"] = {"jobs": [job], "nodes": cluster.world.ray_table(), "health": 200}
    cluster.server_log = ['{"text": "Hel"}', '{"text": "lo"}']
    cluster.commands.clear()
    return cluster


def test_the_models_words_and_nothing_else(serving: Cluster) -> None:
    """As they come; what the head complained about is kept for errors."""
    ran = serving.run("chat", "hi")

    assert (ran.code, ran.out, ran.err) == (0, "Hello\n", "")


def test_the_messages_are_a_line_of_an_input_that_stays_open(serving: Cluster) -> None:
    """Its end tells the head that nobody waits any more, so that the GPUs do not go on."""
    serving.run("chat", "two\nlines")
    (command,) = serving.followed

    assert command.stdin is not None
    assert command.stdin() == json.dumps([{"role": "user", "content": "two\nlines"}]).encode() + b"\n"
    assert command.stdin().count(b"\n") == 1
    assert command.hold_stdin
    assert "--interactive" in command.argv


def test_only_the_head_is_needed(serving: Cluster) -> None:
    """A worker that is down cannot keep anybody from asking what still answers."""
    serving.missing["gpu02"] = ConnectError("gpu02", "cannot be reached: timed out")

    assert serving.run("chat", "hi").out == "Hello\n"
    assert {command.node for command in serving.commands} == {"gpu01"}
