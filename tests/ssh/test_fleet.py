"""Commands on nodes over a real sshd: answers and cleanup."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from launcher.core.domain import Answer, Node
from launcher.core.errors import ConnectError
from launcher.core.transport import Command
from launcher.ssh import envelope
from launcher.ssh import fleet as fleet_module
from launcher.ssh.connect import Connection, Connector
from launcher.ssh.fleet import Fleet, Line
from launcher.ssh.output import LIMIT
from tests.ports import free_port
from tests.ssh import processes, sshd

pytestmark = pytest.mark.processes

Kind = Literal["ssh", "local"]


def node(server: sshd.Sshd, kind: Kind = "ssh", name: str = "gpu01") -> Node:
    if kind == "ssh":
        return server.node(name)
    return Node(
        name=name,
        host="localhost",
        ip="127.0.0.1",
        gpus=0,
        head=name == "gpu01",
        connection="local",
    )


@pytest.fixture(params=["ssh", "local"])
def fleet(request: pytest.FixtureRequest, server: sshd.Sshd) -> Iterator[Fleet]:
    """A fleet over SSH, and one of the local machine."""
    with Fleet(sshd.inventory(node(server, request.param))) as open_fleet:
        yield open_fleet


def run(
    fleet: Fleet, *argv: str, stdin: Callable[[], bytes] | None = None, timeout: float = 30.0
) -> Answer:
    (answer,) = fleet.run([Command(node="gpu01", argv=argv, timeout=timeout, stdin=stdin)])
    return answer


def test_answer(fleet: Fleet) -> None:
    """An answer contains the exit status and both streams separately."""
    answer = run(fleet, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (answer.node, answer.code, answer.out, answer.err) == ("gpu01", 3, "out\n", "err\n")
    assert not answer.timed_out
    assert answer.seconds > 0


def test_arguments_arrive_unchanged(fleet: Fleet) -> None:
    """Arguments are not split, expanded or interpreted."""
    arguments = (
        "a b",
        "it's",
        '"q"',
        "$HOME `id` $(id)",
        "back\\slash\\n",
        "two\nlines",
        "*",
        "",
        "!x",
        "ü",
        "-n",
        "~",
    )
    assert run(fleet, "printf", "<%s>", *arguments).out == "".join(
        f"<{argument}>" for argument in arguments
    )


def test_programs_not_shell_builtins(fleet: Fleet) -> None:
    """The first argument is a program from PATH, not a shell builtin or another command."""
    assert run(fleet, "exit", "3").code == 127
    missing = run(fleet, "no-such-program")
    assert missing.code == 127
    assert "no-such-program" in missing.err


@pytest.mark.parametrize("size", [0, 1, 70_000, 5_000_000])
def test_standard_input_arrives_whole(fleet: Fleet, size: int) -> None:
    """The exact bytes arrive, followed by the end of file."""
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    assert (
        run(fleet, "sha256sum", stdin=lambda: data).out.split()[0]
        == hashlib.sha256(data).hexdigest()
    )


def test_no_standard_input_is_empty(fleet: Fleet) -> None:
    """A command that reads does not wait for a terminal."""
    assert run(fleet, "cat", timeout=10).ok
    assert processes.awaited(lambda: not threads("stdin"))


def test_input_stays_open(fleet: Fleet) -> None:
    """Open standard input is closed when the command is stopped, and not before."""
    command = Command(
        node="gpu01",
        argv=("sh", "-c", "cat; echo ended"),
        timeout=0.5,
        stdin=lambda: b"x\n",
        hold_stdin=True,
    )
    (answer,) = fleet.run([command])
    assert (answer.out, answer.timed_out) == ("x\n", True)


def test_unread_input(fleet: Fleet) -> None:
    """A command that exits without reading its large input is not an error."""
    assert run(fleet, "true", stdin=lambda: b"x" * 5_000_000).ok


def test_input_and_output_at_once(fleet: Fleet) -> None:
    """Large input and large output flow at the same time."""
    answer = run(fleet, "cat", stdin=lambda: b"x" * 6_000_000)
    assert len(answer.out) == 6_000_000


def test_output_flood_is_bounded(fleet: Fleet) -> None:
    """Output beyond the limit is dropped, with a note in the text."""
    answer = run(fleet, "head", "-c", str(LIMIT + 3_000_000), "/dev/zero")
    assert answer.ok
    assert answer.out.endswith("…[truncated]")
    assert len(answer.out) < LIMIT + 100


def test_output_that_is_not_text(fleet: Fleet) -> None:
    """Bytes that are not UTF-8 become replacement characters."""
    assert run(fleet, "printf", r"a\377b").out == "a\N{REPLACEMENT CHARACTER}b"


def test_deadline(fleet: Fleet) -> None:
    """A slow command is stopped on the node, and its answer reports the timeout."""
    seconds = processes.unique_seconds()
    answer = run(fleet, "sleep", seconds, timeout=0.5)
    assert (answer.code, answer.timed_out, answer.ok) == (124, True, False)
    assert processes.disappears(seconds)


def test_a_command_that_exits_124_did_not_time_out(fleet: Fleet) -> None:
    """The exit status of `timeout` is no timeout before the deadline."""
    answer = run(fleet, "sh", "-c", "exit 124")
    assert (answer.code, answer.timed_out) == (124, False)


def test_deadline_reaches_children(fleet: Fleet) -> None:
    """The children of a command are stopped with it."""
    seconds = processes.unique_seconds()
    run(fleet, "sh", "-c", f"sleep {seconds} & sleep {seconds}", timeout=0.5)
    assert processes.disappears(seconds)


def test_deadline_of_a_command_that_ignores_term(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that ignores TERM is killed."""
    monkeypatch.setattr(envelope, "KILL_AFTER", 0.5)
    seconds = processes.unique_seconds()
    answer = run(fleet, "sh", "-c", f"trap '' TERM; sleep {seconds}; sleep {seconds}", timeout=0.5)
    assert (answer.code, answer.timed_out) == (124, True)
    assert processes.disappears(seconds)


def test_closing_the_iterator_ends_commands(fleet: Fleet) -> None:
    """Closing the iterator stops the commands."""
    seconds = processes.unique_seconds()
    answers = fleet.stream(
        [Command(node="gpu01", argv=("sh", "-c", f"echo up; sleep {seconds}"), timeout=math.inf)]
    )
    assert next(answers) == Line(node="gpu01", text="up")
    assert processes.appears(seconds)
    answers.close()  # type: ignore[attr-defined]
    assert processes.disappears(seconds)


def test_a_child_in_the_background_does_not_hold_the_answer(fleet: Fleet) -> None:
    """A command exits even if a background child keeps its output open; the child survives."""
    seconds = processes.unique_seconds()
    answer = run(fleet, "sh", "-c", f"sleep {seconds} & echo $!")
    assert answer.code == 0
    assert processes.alive(seconds)
    os.kill(int(answer.out), signal.SIGKILL)


def test_lines_are_yielded_as_they_arrive(fleet: Fleet) -> None:
    """From a running command, before its answer; including a last line without a line break."""
    script = "echo one; echo two >&2; read x; printf three"
    items = list(fleet.stream([Command(node="gpu01", argv=("sh", "-c", script), timeout=30)]))
    assert [item.text for item in items if isinstance(item, Line) and not item.error] == [
        "one",
        "three",
    ]
    assert [item.text for item in items if isinstance(item, Line) and item.error] == ["two"]
    assert isinstance(items[-1], Answer)
    assert (items[-1].code, items[-1].out) == (0, "")


@pytest.mark.parametrize("kind", ["ssh", "local"])
def test_a_killed_launcher_leaves_nothing(server: sshd.Sshd, tmp_path: Path, kind: Kind) -> None:
    """After SIGKILL of the launcher, the node stops its commands."""
    seconds = processes.unique_seconds()
    program = tmp_path / "launcher.py"
    program.write_text(
        textwrap.dedent(f"""
        import os, signal, sys
        sys.path[:0] = {sys.path!r}
        from launcher.core.domain import Node, Ssh
        from launcher.ssh.fleet import Fleet
        from launcher.core.transport import Command
        from tests.ssh import processes, sshd

        def die():
            os.kill(os.getpid(), signal.SIGKILL)

        nodes = {[node(server, kind, f"gpu0{n}") for n in (1, 2)]!r}
        def late():
            processes.appears({seconds!r})
            die()
        with Fleet(sshd.inventory(*nodes)) as fleet:
            commands = [
                Command(node="gpu01", argv=("sleep", {seconds!r})),
                Command(node="gpu02", argv=("true",), stdin=late),
            ]
            list(fleet.run(commands))
        """)
    )
    ended = subprocess.run([sys.executable, str(program)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert processes.disappears(seconds)


def test_truncated_input_never_looks_complete(server: sshd.Sshd, tmp_path: Path) -> None:
    """If the connection breaks during the input, the command is killed before it sees an end of
    file.
    """
    with Fleet(sshd.inventory(server.node())) as fleet:
        for attempt in range(4):
            started, ended = tmp_path / f"started{attempt}", tmp_path / f"ended{attempt}"
            script = f": > {started}; while read -r line; do :; done; : > {ended}"
            channel = fleet.transport("gpu01").open_session()
            channel.exec_command(
                envelope.wrap(("sh", "-c", script), timeout=30, stdin=100, marker="m")
            )
            channel.sendall(b"half\n")
            assert processes.awaited(started.exists)
            channel.close()
            assert processes.disappears(script)
            assert not ended.exists()


def test_nodes_at_once_and_commands_in_order(server: sshd.Sshd, tmp_path: Path) -> None:
    """Nodes run in parallel, commands of a node in order; a failure does not stop the others."""
    nodes = [server.node(f"gpu0{n}") for n in range(1, 5)]
    with Fleet(sshd.inventory(*nodes)) as fleet:
        assert fleet.connect() == {}
        # Every command waits for those of the other nodes.
        wait = 'touch "$1.$2"; until set -- "$1" $2 "$1."*; [ $# = 6 ]; do sleep 0.05; done'
        commands = [
            Command(
                node=node.name,
                argv=(
                    "sh",
                    "-c",
                    f"{wait}; echo {step}; exit {step}",
                    "meet",
                    f"{tmp_path}/{step}",
                    node.name,
                ),
                timeout=120,
            )
            for step in (1, 2)
            for node in nodes
        ]
        answers = list(fleet.run(commands))
    for node in nodes:
        node_answers = [answer for answer in answers if answer.node == node.name]
        assert [(answer.code, answer.out) for answer in node_answers] == [(1, "1\n"), (2, "2\n")]


def test_one_connection_per_node(server: sshd.Sshd, tmp_path: Path) -> None:
    """All of a node's commands share one connection: they see the same client port."""
    with Fleet(sshd.inventory(server.node())) as fleet:
        argv = ("sh", "-c", "echo $SSH_CONNECTION")
        ports = {answer.out for answer in fleet.run([Command(node="gpu01", argv=argv)] * 3)}
        ports |= {answer.out for answer in fleet.run([Command(node="gpu01", argv=argv)])}
    assert len(ports) == 1


@pytest.mark.parametrize(
    ("does", "code", "timed_out"), [("exit 0", 254, False), ("sleep 60", 124, True)]
)
def test_a_login_shell_that_ends_or_waits_before_the_command_is_no_success(
    start_server: Callable[..., sshd.Sshd],
    monkeypatch: pytest.MonkeyPatch,
    does: str,
    code: int,
    timed_out: bool,
) -> None:
    """An `exit` in a start-up file must not count as the command's success."""
    monkeypatch.setattr("launcher.ssh.channel.GRACE", 0.2)
    node = start_server(extra=f"ForceCommand {does}").node()
    with Fleet(sshd.inventory(node)) as fleet:
        answer = run(fleet, "true", timeout=0.5)

    assert (answer.code, answer.timed_out, answer.ok) == (code, timed_out, False)
    assert "its start-up files (~/.bashrc)" in answer.err


def test_noise_of_a_login_shell(start_server: Callable[..., sshd.Sshd]) -> None:
    """Output of start-up files is not part of the answer, on either stream."""
    noisy = start_server(
        extra=(
            'ForceCommand echo "Welcome to node!"; printf "no line break" ; echo warn >&2; eval'
            ' "$SSH_ORIGINAL_COMMAND"'
        )
    )
    with Fleet(sshd.inventory(noisy.node())) as fleet:
        answer = run(fleet, "sh", "-c", "echo out; echo err >&2")
    assert (answer.out, answer.err) == ("out\n", "err\n")


def test_a_shell_that_refuses_is_quoted(start_server: Callable[..., sshd.Sshd]) -> None:
    """If the command never starts, the shell's output is the evidence."""
    with Fleet(
        sshd.inventory(
            start_server(extra='ForceCommand echo "This account is closed."; exit 1').node()
        )
    ) as fleet:
        answer = run(fleet, "true")
    assert (answer.code, answer.out) == (1, "This account is closed.\n")


def test_lost_connection_is_255_and_the_next_command_reconnects(server: sshd.Sshd) -> None:
    """A connection that breaks while a command runs is an answer, not an exception; the node is
    reached again after.
    """
    to_the_session = (
        'p=$PPID; until grep -q "^sshd" /proc/$p/comm; do p=$(cut -d" " -f4 /proc/$p/stat); done;'
        " echo $p; sleep 60"
    )
    with Fleet(sshd.inventory(server.node(), server.node("gpu02"))) as fleet:
        items = fleet.stream([Command(node="gpu01", argv=("sh", "-c", to_the_session))])
        line = next(items)
        assert isinstance(line, Line)
        os.kill(int(line.text), signal.SIGKILL)
        (lost,) = items
        assert isinstance(lost, Answer)
        assert (lost.code, lost.ok, lost.timed_out) == (255, False, False)
        assert "connection was lost" in lost.err
        assert all(
            answer.ok
            for answer in fleet.run([Command(node=n, argv=("true",)) for n in ("gpu01", "gpu02")])
        )


def test_unreachable_node_is_255_and_names_the_cause(server: sshd.Sshd) -> None:
    """The others answer as usual."""
    gone = server.node("gpu02", port=free_port())
    with Fleet(sshd.inventory(server.node(), gone)) as fleet:
        answers = {
            a.node: a
            for a in fleet.run([Command(node=n, argv=("true",)) for n in ("gpu01", "gpu02")])
        }
    assert answers["gpu01"].ok
    assert answers["gpu02"].code == 255
    assert "Connection refused" in answers["gpu02"].err


@pytest.mark.parametrize(("remembered", "code", "tries"), [(60.0, 255, 1), (0.0, 0, 2)])
def test_a_node_that_could_not_be_reached_is_tried_again(
    server: sshd.Sshd, monkeypatch: pytest.MonkeyPatch, remembered: float, code: int, tries: int
) -> None:
    """After a delay: commands of a batch share the failure, but the node may be starting."""
    monkeypatch.setattr(fleet_module, "_REMEMBERED", remembered)
    opened: list[str] = []
    really = Connector.open

    def fail_first(self: Connector, target: Node) -> Connection:
        opened.append(target.name)
        if len(opened) == 1:
            raise ConnectError(target.name, "cannot be reached")
        return really(self, target)

    monkeypatch.setattr(Connector, "open", fail_first)
    with Fleet(sshd.inventory(server.node())) as fleet:
        assert list(fleet.connect()) == ["gpu01"]
        assert run(fleet, "true").code == code
    assert len(opened) == tries


def test_unknown_node_is_a_mistake_in_the_program(server: sshd.Sshd) -> None:
    """A command for a node outside the inventory is rejected before any command runs."""
    with Fleet(sshd.inventory(server.node())) as fleet, pytest.raises(KeyError, match="gpu09"):
        list(fleet.run([Command(node="gpu09", argv=("true",))]))


def test_ctrl_c_ends_commands(server: sshd.Sshd, tmp_path: Path) -> None:
    """An interrupt while waiting stops the commands on the nodes, and is raised."""
    seconds = processes.unique_seconds()
    program = tmp_path / "launcher.py"
    program.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path[:0] = {sys.path!r}
        from launcher.core.domain import Node, Ssh
        from launcher.ssh.fleet import Fleet
        from launcher.core.transport import Command
        from tests.ssh import sshd
        with Fleet(sshd.inventory({server.node()!r})) as fleet:
            try:
                list(fleet.run([Command(node="gpu01", argv=("sleep", {seconds!r}))]))
            except KeyboardInterrupt:
                print("interrupted")
        """)
    )
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True
    ) as launched:
        assert processes.appears(seconds)
        launched.send_signal(signal.SIGINT)
        out, _ = launched.communicate(timeout=60)
    assert out == "interrupted\n"
    assert processes.disappears(seconds)


@pytest.mark.parametrize("kind", ["ssh", "local"])
def test_tunnel(server: sshd.Sshd, kind: Kind) -> None:
    """A local port leads to an address in the node's network, in both directions."""
    with socket.create_server(("127.0.0.1", 0)) as service:

        def echo() -> None:
            peer, _ = service.accept()
            with peer:
                while data := peer.recv(4096):
                    peer.sendall(data.upper())

        threading.Thread(target=echo, daemon=True).start()
        with (
            Fleet(sshd.inventory(node(server, kind))) as fleet,
            fleet.forward("gpu01", "127.0.0.1", service.getsockname()[1]) as tunnel,
            socket.create_connection(("127.0.0.1", tunnel.port), timeout=60) as client,
        ):
            client.sendall(b"hello")
            client.shutdown(socket.SHUT_WR)
            assert client.makefile("rb").read() == b"HELLO"
    assert processes.awaited(lambda: not threads("tunnel-gpu01"))


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]
