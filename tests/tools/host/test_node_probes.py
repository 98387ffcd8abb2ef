"""Probes of nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.core.domain import Answer, Inventory
from launcher.core.errors import ConnectError, NodeError
from launcher.tools.host import node_probes
from tests.fakes import FakeTransport
from tests.simulated import FIXTURES, World

Load = Callable[..., Inventory]


def test_one_command_per_node_reports_everything(load: Load) -> None:
    """A single round trip."""
    inventory = load()
    transport = FakeTransport(World(inventory).answer)
    facts = node_probes.probe_nodes(inventory, transport, [inventory.image, inventory.image])

    assert [command.node for command in transport.commands] == ["gpu01", "gpu02"]
    assert {name: node_facts.hostname for name, node_facts in facts.items()} == {
        "gpu01": "gpu01",
        "gpu02": "gpu02",
    }
    assert set(facts["gpu01"].images) == {inventory.image}


def test_nodes_are_probed_with_their_own_settings(load: Load) -> None:
    """Docker command and directories."""
    inventory = load(
        "docker: [sudo, -n, docker]",
        "nodes: [{host: a, ip: 10.0.0.1, gpus: 1, state_dir: /s}, {host: b, ip: 10.0.0.2, gpus: 1,"
        " docker: [podman]}]",
    )
    first, second = node_probes.probe_commands(inventory, ["x:1"])

    assert first.argv[4:] == (
        "c",
        "/s",
        inventory.node("a").hf_home,
        "nvidia",
        "",
        "1",
        "x:1",
        "sudo",
        "-n",
        "docker",
    )
    assert second.argv[-1] == "podman"


def test_only_named_nodes_are_probed(load: Load) -> None:
    """`down` and `status` continue without unreachable ones."""
    inventory = load()

    assert [
        command.node for command in node_probes.probe_commands(inventory, [], inventory.workers)
    ] == ["gpu02"]


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (Answer(node="a", code=255, err="Connection reset"), ConnectError, "a: connection lost"),
        (
            Answer(node="a", code=124, timed_out=True, seconds=60.2),
            NodeError,
            "a: did not report its state within 60s",
        ),
        (
            Answer(node="a", code=0, out="This account is currently not available."),
            NodeError,
            "a: the node's answer to the probe is incomplete",
        ),
        (
            Answer(node="a", code=127, err="sh: not found"),
            NodeError,
            "a: the node's answer to the probe is incomplete",
        ),
    ],
)
def test_a_failed_node_is_named_with_its_output(
    answer: Answer, kind: type[NodeError], message: str
) -> None:
    """With an error type that has the right exit code and message."""
    facts, failed = node_probes.parse_answers([answer])

    assert facts == {}
    assert isinstance(failed["a"], kind)
    assert (failed["a"].message, failed["a"].node) == (message, "a")
    assert answer.tail in failed["a"].evidence or not answer.tail


@pytest.mark.parametrize(
    ("code", "timed_out", "out"),
    [
        (124, True, "\n@@vlaunch home\n/root\n@@vlaunch rc 0\n\n@@vlaunch token\nray-token-1234\n"),
        (
            255,
            False,
            "\n@@vlaunch home\n/root\n@@vlaunch rc 0\n\n@@vlaunch token\nray-token-1234\n",
        ),
        (0, False, "@@vlaunch token\nray-token-1234"),
    ],
)
def test_a_truncated_answer_shows_no_token(code: int, timed_out: bool, out: str) -> None:
    """It has not been registered for redaction yet."""
    _, failed = node_probes.parse_answers(
        [Answer(node="a", code=code, out=out, seconds=120, timed_out=timed_out)]
    )

    assert "ray-token" not in failed["a"].evidence
    assert ("/root" in failed["a"].evidence) is (code != 0)


def test_a_survey_carries_the_clock_of_the_moment_it_is_sent(load: Load) -> None:
    """Not of its planning, and only in a survey."""
    times = iter((1000.25, 1003.5))
    plain = node_probes.probe_commands(load(), [], clock=lambda: 1.0)
    first, second = node_probes.probe_commands(load(), [], survey=True, clock=lambda: next(times))

    assert [command.stdin for command in plain] == [None, None]
    assert first.stdin is not None
    assert second.stdin is not None
    assert (second.stdin(), first.stdin()) == (b"1000.250000\n", b"1003.500000\n")
    assert (plain[0].argv[8], first.argv[8]) == ("", "10.0.0.11 10.0.0.12")
    assert first.argv[9:] == plain[0].argv[9:]
    assert first.argv[2] != plain[0].argv[2]


def test_a_survey_comes_with_the_facts(load: Load) -> None:
    """In the same round trip."""
    text = (FIXTURES / "host" / "survey-h100-infiniband.txt").read_text()
    transport = FakeTransport(lambda command: Answer(node=command.node, code=0, out=text))
    facts = node_probes.probe_nodes(load(), transport, [], survey=True, clock=lambda: 0.0)
    survey = facts["gpu01"].survey

    assert len(transport.commands) == 2
    assert survey is not None
    assert len(survey.rdma) == 10
