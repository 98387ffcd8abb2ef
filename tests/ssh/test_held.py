"""A command that lives beside the others, over a real sshd and on this machine; and what is sent in
front of a command.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from launcher.core.domain import Answer, Node
from launcher.core.transport import Command
from launcher.ssh.fleet import Fleet, Line
from launcher.ssh.held import BackgroundCommand
from tests.ssh import processes, sshd


@pytest.fixture(params=["ssh", "local"])
def fleet(request: pytest.FixtureRequest, server: sshd.Sshd) -> Iterator[Fleet]:
    """One node, reached in both ways."""
    local = Node(
        name="gpu01", host="localhost", ip="127.0.0.1", gpus=0, head=True, connection="local"
    )
    with Fleet(sshd.inventory(server.node() if request.param == "ssh" else local)) as made:
        yield made


def hold(fleet: Fleet, *argv: str) -> BackgroundCommand:
    return fleet.hold(
        Command(
            node="gpu01", argv=argv, timeout=math.inf, stdin=lambda: b"a line\n", hold_stdin=True
        )
    )


def test_it_lives_until_it_is_ended(fleet: Fleet) -> None:
    """Others run meanwhile; it has its input, which stays open."""
    seconds = processes.unique_seconds()
    held = hold(fleet, "sh", "-c", f"read -r x; echo $x; sleep {seconds}")

    assert held.next(60) == Line(node="gpu01", text="a line")
    (answer,) = fleet.run([Command(node="gpu01", argv=("echo", "beside"))])
    assert (answer.out, held.over, held.next(0)) == ("beside\n", None, None)
    held.end()
    assert isinstance(held.next(60), Answer)
    assert held.over is not None and held.over.code == 255
    assert processes.disappears(seconds)


def test_it_ends_with_the_fleet(fleet: Fleet) -> None:
    """Whoever forgets it leaves nothing behind."""
    seconds = processes.unique_seconds()
    hold(fleet, "sleep", seconds)
    assert processes.appears(seconds)
    fleet.close()

    assert processes.disappears(seconds)


def test_its_end_is_known_at_once(fleet: Fleet) -> None:
    """By itself, with what it said."""
    held = hold(fleet, "sh", "-c", "echo out; echo err >&2; exit 7")
    said = [held.next(60) for _ in range(3)]

    assert {(each.text, each.error) for each in said[:2]} == {("out", False), ("err", True)}
    assert said[2].code == 7 and held.over is said[2]


def test_a_broken_connection_ends_it(server: sshd.Sshd) -> None:
    """The lock of a cluster is known to be lost when nothing else has failed yet."""
    with Fleet(sshd.inventory(server.node())) as fleet:
        held = hold(fleet, "sh", "-c", "echo there; cat >/dev/null")
        assert held.next(60) == Line(node="gpu01", text="there")
        fleet.transport("gpu01").close()

        assert isinstance(held.next(60), Answer)
        assert held.over is not None and held.over.code == 255


def test_a_flood_that_nobody_reads_takes_no_memory(fleet: Fleet) -> None:
    """It may come from a node that means no good."""
    held = hold(
        fleet,
        "sh",
        "-c",
        "yes | head -n 20000; head -c 100000 /dev/zero | tr '\\0' x; echo; echo over >&2; cat",
    )
    assert processes.awaited(lambda: held._lines.qsize() >= 100)
    lines = []
    while (line := held.next(0.3)) is not None:
        lines.append(line)

    assert 100 <= len(lines) < 20000
    assert max(len(each.text) for each in lines) <= 8192


def test_words_in_front_of_a_command_run_it(fleet: Fleet) -> None:
    """With its own input and output: one command, one round trip."""
    before = ("sh", "-c", 'echo "first $1"; shift; exec "$@"', "before", "it's")
    (answer,) = fleet.run(
        [Command(node="gpu01", argv=("cat", "-"), stdin=lambda: b"second\n", preamble=before)]
    )

    assert (answer.code, answer.out) == (0, "first it's\nsecond\n")


def test_it_is_talked_to(fleet: Fleet) -> None:
    """Lines that are said later come behind its input, also those said before it has begun; when
    nobody can say any more, it ends.
    """
    seconds = processes.unique_seconds()
    program = f'while read -r x; do echo "heard $x"; [ "$x" != last ] || exec sleep {seconds}; done'
    held = fleet.hold(
        Command(
            node="gpu01",
            argv=("sh", "-c", program),
            timeout=math.inf,
            stdin=lambda: b"first\n",
            hold_stdin=True,
            interactive=True,
        )
    )
    held.say("second")
    assert [held.next(60).text for _ in range(2)] == ["heard first", "heard second"]
    held.say('{"third": [1, 2]}')
    held.say("last")

    assert held.next(60).text == 'heard {"third": [1, 2]}'
    assert held.next(60).text == "heard last"
    held.end()
    assert processes.disappears(seconds)
    with pytest.raises(ValueError, match="cannot be said"):
        held.say("a\\nb")


def test_it_hears_all_of_a_long_input_first(fleet: Fleet) -> None:
    """A line that is said while the input is still on its way comes behind it."""
    held = fleet.hold(
        Command(
            node="gpu01",
            argv=("sh", "-c", "head -c 2000000 | wc -c; read -r x; echo $x"),
            timeout=60,
            stdin=lambda: b"x" * 1_999_999 + b"\n",
            hold_stdin=True,
            interactive=True,
        )
    )
    held.say("behind")

    said = [held.next(60), held.next(60)]
    assert [each.text.strip() for each in said] == ["2000000", "behind"]
