"""Background commands over a real sshd and on this machine, and preambles of commands."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from launcher.core.domain import Answer, Node
from launcher.core.transport import Command
from launcher.ssh.background import BackgroundCommand
from launcher.ssh.fleet import Fleet, Line
from tests.ssh import processes, sshd


@pytest.fixture(params=["ssh", "local"])
def fleet(request: pytest.FixtureRequest, server: sshd.Sshd) -> Iterator[Fleet]:
    """One node, through SSH and as the local machine."""
    local = Node(
        name="gpu01", host="localhost", ip="127.0.0.1", gpus=0, head=True, connection="local"
    )
    with Fleet(sshd.inventory(server.node() if request.param == "ssh" else local)) as open_fleet:
        yield open_fleet


def hold(fleet: Fleet, *argv: str) -> BackgroundCommand:
    return fleet.hold(
        Command(
            node="gpu01", argv=argv, timeout=math.inf, stdin=lambda: b"a line\n", hold_stdin=True
        )
    )


def test_it_runs_until_it_is_stopped(fleet: Fleet) -> None:
    """It keeps its open input while other commands run."""
    seconds = processes.unique_seconds()
    background = hold(fleet, "sh", "-c", f"read -r x; echo $x; sleep {seconds}")

    assert background.next(60) == Line(node="gpu01", text="a line")
    (answer,) = fleet.run([Command(node="gpu01", argv=("echo", "beside"))])
    assert (answer.out, background.over, background.next(0)) == ("beside\n", None, None)
    background.end()
    assert isinstance(background.next(60), Answer)
    # 143 of a shell after SIGTERM, if its status arrives before the channel closes.
    assert background.over is not None and background.over.code in (143, 255)
    assert processes.disappears(seconds)


def test_it_stops_with_the_fleet(fleet: Fleet) -> None:
    """A background command that is never stopped leaves nothing behind."""
    seconds = processes.unique_seconds()
    hold(fleet, "sleep", seconds)
    assert processes.appears(seconds)
    fleet.close()

    assert processes.disappears(seconds)


def test_its_exit_is_reported_at_once(fleet: Fleet) -> None:
    """With its output."""
    background = hold(fleet, "sh", "-c", "echo out; echo err >&2; exit 7")
    items = [background.next(60) for _ in range(3)]

    assert {(item.text, item.error) for item in items[:2]} == {("out", False), ("err", True)}
    assert items[2].code == 7 and background.over is items[2]


def test_a_broken_connection_stops_it(server: sshd.Sshd) -> None:
    """The loss of the cluster's lock is noticed at once."""
    with Fleet(sshd.inventory(server.node())) as fleet:
        background = hold(fleet, "sh", "-c", "echo there; cat >/dev/null")
        assert background.next(60) == Line(node="gpu01", text="there")
        fleet.transport("gpu01").close()

        assert isinstance(background.next(60), Answer)
        assert background.over is not None and background.over.code == 255


def test_unread_output_takes_no_memory(fleet: Fleet) -> None:
    """The node may be malicious."""
    background = hold(
        fleet,
        "sh",
        "-c",
        "yes | head -n 20000; head -c 100000 /dev/zero | tr '\\0' x; echo; echo over >&2; cat",
    )
    assert processes.awaited(lambda: background._lines.qsize() >= 100)
    lines = []
    while (line := background.next(0.3)) is not None:
        lines.append(line)

    assert 100 <= len(lines) < 20000
    assert max(len(item.text) for item in lines) <= 8192


def test_preamble_runs_the_command(fleet: Fleet) -> None:
    """With its own input and output: one command, one round trip."""
    before = ("sh", "-c", 'echo "first $1"; shift; exec "$@"', "before", "it's")
    (answer,) = fleet.run(
        [Command(node="gpu01", argv=("cat", "-"), stdin=lambda: b"second\n", preamble=before)]
    )

    assert (answer.code, answer.out) == (0, "first it's\nsecond\n")


def test_it_receives_lines(fleet: Fleet) -> None:
    """Lines follow its input, including those sent before it has started; it exits when its input
    closes.
    """
    seconds = processes.unique_seconds()
    program = f'while read -r x; do echo "heard $x"; [ "$x" != last ] || exec sleep {seconds}; done'
    background = fleet.hold(
        Command(
            node="gpu01",
            argv=("sh", "-c", program),
            timeout=math.inf,
            stdin=lambda: b"first\n",
            hold_stdin=True,
            interactive=True,
        )
    )
    background.say("second")
    assert [background.next(60).text for _ in range(2)] == ["heard first", "heard second"]
    background.say('{"third": [1, 2]}')
    background.say("last")

    assert background.next(60).text == 'heard {"third": [1, 2]}'
    assert background.next(60).text == "heard last"
    background.end()
    assert processes.disappears(seconds)
    with pytest.raises(ValueError, match="cannot be sent"):
        background.say("a\\nb")


def test_long_input_precedes_lines(fleet: Fleet) -> None:
    """A line sent during the transfer of the input arrives after it."""
    background = fleet.hold(
        Command(
            node="gpu01",
            argv=("sh", "-c", "head -c 2000000 | wc -c; read -r x; echo $x"),
            timeout=60,
            stdin=lambda: b"x" * 1_999_999 + b"\n",
            hold_stdin=True,
            interactive=True,
        )
    )
    background.say("behind")

    items = [background.next(60), background.next(60)]
    assert [item.text.strip() for item in items] == ["2000000", "behind"]
