"""`vlaunch exec`: one command on every node."""

from __future__ import annotations

import json

import pytest

from launcher.core.domain import Answer
from launcher.core.errors import ConnectError
from launcher.core.transport import Command
from tests.command_line import Cluster

LOST = "Error response from daemon: No such container: {}\n"


@pytest.fixture
def containers(cluster: Cluster) -> dict[str, Answer]:
    """Answers of the existing containers; Docker knows no others."""
    answers: dict[str, Answer] = {}

    def answer(command: Command) -> Answer:
        name = command.argv[3]
        return answers.get(name, Answer(node=command.node, code=1, err=LOST.format(name)))

    cluster.world.answer = answer  # type: ignore[method-assign]
    return answers


@pytest.fixture
def node_answers(cluster: Cluster) -> dict[str, Answer]:
    """Set nodes' answers; a node without one succeeds without output."""
    answers: dict[str, Answer] = {}

    def answer(command: Command) -> Answer:
        return answers.get(command.node, Answer(node=command.node, code=0))

    cluster.world.answer = answer  # type: ignore[method-assign]
    return answers


def test_equal_answers_are_shown_once(cluster: Cluster, node_answers: dict[str, Answer]) -> None:
    """With the folded nodes on every line."""
    for name in ("gpu01", "gpu02"):
        node_answers[name] = Answer(node=name, code=0, out="one\ntwo\n")
    ran = cluster.run("exec", "--", "echo", "x")

    assert (ran.code, ran.out, ran.err) == (0, "gpu[01-02]: one\ngpu[01-02]: two\n", "")


def test_different_answers_and_the_exit_code(
    cluster: Cluster, node_answers: dict[str, Answer]
) -> None:
    """In the inventory's order, errors on standard error; the exit code is the largest."""
    node_answers["gpu02"] = Answer(node="gpu02", code=3, out="out\n", err="bad\n")
    node_answers["gpu01"] = Answer(node="gpu01", code=1)
    ran = cluster.run("exec", "false")

    assert (ran.code, ran.out, ran.err) == (
        3,
        "gpu02: out\n",
        "gpu01: exit code 1\ngpu02: bad\ngpu02: exit code 3\n",
    )


def test_answers_as_json(cluster: Cluster, node_answers: dict[str, Answer]) -> None:
    """One object, in the inventory's order; an option after COMMAND is the command's."""
    node_answers["gpu01"] = Answer(node="gpu01", code=3, out="a\nb\n", err="bad\n")
    ran = cluster.run("exec", "--json", "tool", "--json")
    first, second = json.loads(ran.out)["nodes"]

    assert (ran.code, ran.err) == (3, "")
    assert first == {"node": "gpu01", "exit_code": 3, "stdout": "a\nb\n", "stderr": "bad\n"}
    assert (second["node"], second["exit_code"]) == ("gpu02", 0)
    assert cluster.commands[0].argv[-2:] == ("tool", "--json")


def test_commands_run_in_the_container_with_a_deadline(
    cluster: Cluster, node_answers: dict[str, Answer]
) -> None:
    """On both ends, with unchanged arguments."""
    cluster.run("exec", "--timeout", "5", "--", "sh", "-c", "echo $A 'b c'")
    argv = cluster.commands[0].argv

    assert argv[:4] == ("docker", "exec", "--interactive", "vlaunch-c-gpu01")
    assert argv[-3:] == ("sh", "-c", "echo $A 'b c'")
    assert argv[argv.index("bounded") + 1] == "5.0"
    assert 5 < cluster.commands[0].timeout <= 20


def test_commands_on_the_node_run_unchanged(
    cluster: Cluster, node_answers: dict[str, Answer]
) -> None:
    """Without Docker."""
    cluster.run("exec", "--host", "--", "nvidia-smi", "-L")

    assert [command.argv for command in cluster.commands] == [("nvidia-smi", "-L")] * 2


@pytest.mark.parametrize(
    ("flags", "nodes"),
    [
        (["--head"], ["gpu01"]),
        (["-n", "gpu02"], ["gpu02"]),
        (["-n", "gpu02", "-n", "gpu01"], ["gpu01", "gpu02"]),
    ],
)
def test_nodes_can_be_chosen(
    flags: list[str], nodes: list[str], cluster: Cluster, node_answers: dict[str, Answer]
) -> None:
    """In the inventory's order."""
    cluster.run("exec", *flags, "--", "true")

    assert [command.node for command in cluster.commands] == nodes


def test_an_unknown_node_is_an_invalid_request(
    cluster: Cluster, node_answers: dict[str, Answer]
) -> None:
    """With the near miss."""
    ran = cluster.run("exec", "-n", "gpu3", "--", "true")

    assert (ran.code, cluster.commands) == (2, [])
    assert (
        "error: no node `gpu3` in inventory.yaml\n  nodes: gpu[01-02]\n\nhint: did you mean `gpu0"
        in ran.err
    )


def test_flags_after_the_command_belong_to_it(
    cluster: Cluster, node_answers: dict[str, Answer]
) -> None:
    """Ours come before it."""
    cluster.run("exec", "--host", "ls", "--all", "--head")

    assert cluster.commands[0].argv == ("ls", "--all", "--head")
    assert len(cluster.commands) == 2


def test_output_is_sanitized(cluster: Cluster, node_answers: dict[str, Answer]) -> None:
    """Colours and titles are removed."""
    node_answers["gpu01"] = Answer(
        node="gpu01", code=0, out="\x1b[31mred\x1b]0;x\x07\n", err="\x1b[2J\x9bz\n"
    )
    ran = cluster.run("exec", "--head", "true")

    assert (ran.out, ran.err) == ("gpu01: red\n", "gpu01: z\n")


def test_nothing_to_run_is_a_usage_error(cluster: Cluster) -> None:
    """Exit code 2."""
    assert cluster.run("exec").code == 2


def test_unselected_nodes_may_be_down(cluster: Cluster, node_answers: dict[str, Answer]) -> None:
    """`exec --head -- ray status` inspects a cluster with a dead worker."""
    cluster.missing["gpu02"] = ConnectError("gpu02", "cannot be reached: timed out")

    assert cluster.run("exec", "--head", "--", "ray", "status").code == 0
    assert cluster.run("exec", "--", "true").code == 1


def test_a_missing_container_has_a_hint(cluster: Cluster, containers: dict[str, Answer]) -> None:
    """In our own words, not Docker's."""
    ran = cluster.run("exec", "--", "true")

    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        "error: gpu[01-02]: no container of cluster c\n\n"
        "hint: run `vlaunch up`, or add `--host` to run it on the node itself\n"
    )


def test_answers_of_other_nodes_are_printed(
    cluster: Cluster, containers: dict[str, Answer]
) -> None:
    """In spite of a node without a container."""
    containers["vlaunch-c-gpu01"] = Answer(node="gpu01", code=0, out="here\n")
    ran = cluster.run("exec", "--", "hostname")

    assert (ran.code, ran.out) == (1, "gpu01: here\n")
    assert ran.err.startswith("error: gpu02: no container of cluster c\n")


@pytest.mark.parametrize(
    "answer",
    [
        Answer(
            node="gpu01", code=1, err="Error response from daemon: Container 4f2a is not running\n"
        ),
        Answer(node="gpu01", code=1, err=LOST.format("another")),
        Answer(node="gpu01", code=1, out="began\n", err=LOST.format("vlaunch-c-gpu01")),
        Answer(node="gpu01", code=0, err=LOST.format("vlaunch-c-gpu01")),
    ],
)
def test_dockers_errors_are_distinguished_from_the_commands(
    cluster: Cluster, containers: dict[str, Answer], answer: Answer
) -> None:
    """Only Docker's own error about this node's container means that the command did not run."""
    containers["vlaunch-c-gpu01"] = answer
    ran = cluster.run("exec", "--head", "--", "true")

    assert (ran.code, len(cluster.commands)) == (answer.code, 1)
    assert answer.err in ran.err.replace("gpu01: ", "")
