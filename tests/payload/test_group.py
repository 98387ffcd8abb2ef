"""Groups of real processes on this machine: they start together, and what ends one member's engine ends all of them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.supervised import AGAIN

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
GROUP = HERE.parent.parent / "launcher" / "payload" / "group.py"
QUICK = {
    "every": 0.05, "silence": 5, "settle": 0.1, "canary": 0.05, "timeout": 5, "grace": 0.3, "start-timeout": 10, "restarts": 3,
    "stuck": 0.5,
}  # fmt: skip


def free() -> int:
    """Return a port that nobody has, and that the kernel will not hand out to another test meanwhile."""
    while True:
        port = random.randrange(20000, 32000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


def flags(**more: float) -> pytest.MarkDecorator:
    """Let a test have another group."""
    return pytest.mark.parametrize("group", [more], indirect=True)


class Group:
    """A group whose members have a folder each, as nodes have; `folder` is also what tells its engines how to be."""

    def __init__(self, folder: Path, of: int = 2, **policy: float) -> None:
        self.folder, self.of, self.policy = folder, of, {**QUICK, **policy}
        self.port, self.api = free(), free()
        self.engine = (sys.executable, "-S", str(HERE / "stand_in_engine.py"), str(folder))
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(of):
            (folder / f"state{rank}").mkdir()
            self.secret(rank, "a secret")
        self.be(wanted={"version": 1, "id": "abcd1234", "model": "m", "backend": "mp"})

    def secret(self, rank: int, value: str) -> None:
        """Give a member's node a secret."""
        (self.folder / f"secrets{rank}").mkdir(exist_ok=True)
        (self.folder / f"secrets{rank}" / "RAY_AUTH_TOKEN").write_text(value, encoding="utf-8")

    def be(self, *names: str, wanted: object = None) -> None:
        """Make the engines be something, from now on."""
        for name in names:
            (self.folder / name).touch()
        if wanted is not None:
            (self.folder / "state0" / "wanted.json").write_text(json.dumps(wanted), encoding="utf-8")

    def start(self, *ranks: int) -> None:
        """Start members; all of them when none is named."""
        for rank in ranks or range(self.of):
            policy = [word for name, value in self.policy.items() for word in (f"--{name}", str(value))]
            with (self.folder / f"log{rank}").open("ab") as log:
                self.processes[rank] = subprocess.Popen(
                    [
                        sys.executable, str(GROUP), "--rank", str(rank), "--of", str(self.of), "--head", "127.0.0.1",
                        "--port", str(self.port), "--id", "abcd1234", "--node", f"n{rank}", "--api", str(self.api), *policy,
                        "--", *self.engine, str(rank), str(self.api),
                    ],
                    stdout=log, stderr=log, start_new_session=True,
                    env={
                        **os.environ,
                        "VLAUNCH_STATE": str(self.folder / f"state{rank}"),
                        "VLAUNCH_SECRETS": str(self.folder / f"secrets{rank}"),
                    },
                )  # fmt: skip

    def end(self) -> None:
        """End everything that is left, and see that nothing of the engines is."""
        for process in self.processes.values():
            process.kill()
            process.wait(5)
        until(lambda: not any(self.engines(rank) for rank in range(self.of)), "the engines end with their members")

    def signal(self, rank: int, number: int) -> None:
        """Signal a member itself."""
        self.processes[rank].send_signal(number)

    def started(self, rank: int) -> list[int]:
        """Return every engine that a member has started."""
        path = self.folder / f"engine{rank}"
        return [int(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def engines(self, rank: int) -> list[int]:
        """Return the engines of a member that live."""
        return [pid for pid in self.started(rank) if lives(pid)]

    def log(self, rank: int) -> str:
        """Return what a member's container would have printed."""
        return (self.folder / f"log{rank}").read_text(encoding="utf-8")

    @property
    def said(self) -> dict[str, Any]:
        """What rank 0 wrote down."""
        path = self.folder / "state0" / "server.json"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found

    def is_(self, state: str, generation: int = 0) -> None:
        """Wait for a state, and for one engine a member, the so-and-so many-eth each."""
        counts = [(generation, 1)] * self.of

        def there() -> bool:
            if self.said.get("state") != state:
                return False
            return not generation or [(len(self.started(n)), len(self.engines(n))) for n in range(self.of)] == counts

        until(there, f"it is {state}, for time {generation}", self)

    def hit(self, rank: int) -> None:
        """Kill the engine of a member."""
        os.kill(self.started(rank)[-1], signal.SIGKILL)


def lives(pid: int) -> bool:
    """True unless a process is gone or waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(true: Callable[[], bool], what: str, group: Group | None = None) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + 15
    while not true():
        if time.monotonic() > deadline:
            logs = "\n".join(group.log(rank) for rank in group.processes) if group else ""
            raise AssertionError(f"not within 15 s: {what}; {group and group.said}\n{logs}")
        time.sleep(0.01)


@pytest.fixture
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Group]:
    """A group of two, or as a test says, which ends with the test."""
    made = Group(tmp_path, **getattr(request, "param", {}))
    yield made
    made.end()


def test_engines_start_when_all_members_are_there(group: Group) -> None:
    """The first waits for the second; what engines print is what containers print; what has answered is remembered."""
    group.start(0)
    until(lambda: group.said.get("doing") == "waiting for rank 1 to come back", "rank 0 waits", group)
    assert group.started(0) == []

    group.start(1)
    group.is_("ready", 1)
    answered = json.loads((group.folder / "state0" / "answered.json").read_text(encoding="utf-8"))

    assert [each["wanted"]["model"] for each in answered] == ["m"]
    assert "the engine of rank 1 runs" in group.log(1)
    assert (group.said["restarts_left"], group.said["faults"], group.said["doing"]) == (3, [], "")


@flags(grace=60, settle=0.3)
def test_a_killed_engine_ends_the_others_and_all_start_anew(group: Group) -> None:
    """It is named with its node, and what its death brought about is not; what is left of it is told to end."""
    group.be("child", "brittle")
    group.start()
    group.is_("ready", 1)
    group.hit(1)
    until(lambda: group.said["faults"] != [], "it is noticed", group)
    group.is_("ready", 2)
    (fault,) = group.said["faults"]

    assert (fault["rank"], fault["node"], fault["in_flight"]) == ("1", "n1", 2)
    assert fault["what"] == "the engine of rank 1 on n1 was killed by SIGKILL (by hand, or for lack of memory)"
    assert "the engine of rank 1 runs" in fault["evidence"]
    assert list(fault["phases"]) == ["stopped", "started"]
    assert 0 <= fault["phases"]["stopped"] <= fault["phases"]["started"] < fault["ready_again_after"]
    assert group.said["restarts_left"] == 2
    assert group.log(0).count(AGAIN) == 1
    assert "supervisor:   the engine of rank 1 runs" in group.log(0)


def test_no_engine_starts_before_the_last_one_has_ended(group: Group) -> None:
    """It would find the other's memory taken."""
    group.be("stubborn")
    group.start()
    group.is_("ready", 1)
    group.hit(0)
    until(lambda: len(group.started(0)) == 2, "rank 0's engine starts anew", group)

    assert not lives(group.started(1)[0])


def test_a_lost_member_is_waited_for(group: Group) -> None:
    """Nothing runs without it, and everything when it is back: nobody need type anything."""
    group.start()
    group.is_("ready", 1)
    group.signal(1, signal.SIGKILL)
    until(lambda: group.said["doing"] == "waiting for rank 1 on n1 to come back", "rank 0 waits", group)
    until(lambda: not group.engines(0), "its engine ends", group)
    group.processes[1].wait()
    group.start(1)
    group.is_("ready", 2)

    assert group.said["faults"][0]["what"].startswith("rank 1 on n1 is gone: its connection")


@flags(settle=0.5)
def test_a_member_that_is_back_at_once_has_been_away(group: Group) -> None:
    """It must not join an engine that has lost it, which would wait for ever: all of them start anew."""
    group.start()
    group.is_("ready", 1)
    group.signal(1, signal.SIGKILL)
    group.processes[1].wait()
    group.start(1)
    until(lambda: group.said["faults"] != [], "it is noticed", group)
    group.is_("ready", 2)

    assert group.said["faults"][0]["what"].startswith("rank 1 on n1 is gone: its connection")


def test_a_lost_rank_0_ends_the_engines_of_the_others(group: Group) -> None:
    """They come back to it; it knows that it was there before, and its end costs a restart."""
    group.start()
    group.is_("ready", 1)
    group.signal(0, signal.SIGKILL)
    until(lambda: not group.engines(1), "rank 1 ends its engine", group)
    group.processes[0].wait()
    group.start(0)
    until(lambda: group.said["state"] != "ready", "rank 0 is back", group)
    group.is_("ready", 2)
    (fault,) = group.said["faults"]

    assert fault["what"] == "rank 0 ended without a word: its container or its host was restarted"
    assert (group.said["restarts_left"], fault["ready_again_after"] > 0) == (2, True)


@flags(silence=0.6)
def test_a_silent_member_is_a_dead_one(group: Group) -> None:
    """Its connection stands, as behind a network that swallows everything."""
    group.start()
    group.is_("ready", 1)
    group.signal(1, signal.SIGSTOP)
    until(lambda: group.said["faults"] != [], "it is noticed", group)
    until(lambda: not group.engines(0), "the other engine ends", group)
    group.signal(1, signal.SIGCONT)
    group.is_("ready", 2)

    assert group.said["faults"][0]["what"] == "rank 1 on n1 is gone: it has been silent for 0.6 s"


@flags(timeout=0.3)
@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("hang", r"no completion came back for \ds, and nothing else moved"),
        ("broken", "a completion ends with 500: .*EngineDeadError.*"),
    ],
)
def test_a_completion_that_does_not_come_back_is_a_death(group: Group, way: str, what: str) -> None:
    """Though /health says 200 and every process lives."""
    group.start()
    group.is_("ready", 1)
    group.be(way)
    until(lambda: group.said["faults"] != [], "it is noticed", group)
    (group.folder / way).unlink()
    group.is_("ready", 2)

    assert re.fullmatch(what, group.said["faults"][0]["what"])


@flags(timeout=0.3)
def test_a_replica_whose_completions_do_not_come_back_is_a_death(group: Group) -> None:
    """Though the other one's do, and its counters move."""
    group.be(wanted={"version": 1, "id": "abcd1234", "model": "m", "metadata": {"vlaunch.dp": "2"}})
    group.start()
    group.is_("ready", 1)
    group.be("half")
    until(lambda: group.said["faults"] != [], "it is noticed", group)
    (group.folder / "half").unlink()
    group.is_("ready", 2)
    (fault,) = group.said["faults"]

    assert re.fullmatch(r"no completion of replica 1 came back for \ds, and nothing else of it moved", fault["what"])


@flags(timeout=0.3)
def test_a_busy_engine_is_alive(group: Group) -> None:
    """A completion that waits behind others proves nothing."""
    group.be("busy")
    group.start()
    group.is_("ready", 1)
    group.be("hang")
    until(lambda: group.said["doing"] == "no completion within 0.3 s", "it is told", group)
    time.sleep(0.6)  # longer than what a dead one is given
    (group.folder / "hang").unlink()
    until(lambda: group.said["doing"] == "", "the next one comes back", group)

    assert (group.said["state"], group.said["faults"]) == ("ready", [])


def test_a_member_with_another_secret_is_refused(group: Group) -> None:
    """No engine starts with a stranger; a secret that is put right is read again."""
    group.secret(1, "another")
    group.start()
    until(lambda: "it refuses this member: the secrets differ" in group.log(1), "it is refused", group)
    assert (group.started(0), group.started(1)) == ([], [])

    group.secret(1, "a secret")
    group.is_("ready", 1)


def test_a_rank_0_with_another_secret_is_not_obeyed(group: Group) -> None:
    """Whoever takes its port could make the nodes run things."""
    with socket.create_server(("127.0.0.1", group.port)) as server:
        group.start(1)
        sock, _ = server.accept()
        with sock, sock.makefile("rw", encoding="utf-8") as lines:
            lines.write('{"challenge": "c"}\n')
            lines.flush()
            hello = json.loads(lines.readline())
            lines.write('{"proof": "", "run": 1}\n{"run": 1}\n')
            lines.flush()
            assert ended(sock)
        sock, _ = server.accept()
        with sock:
            sock.sendall(b'{"refused": "\\u001b[2J\\nno"}\n')
            until(lambda: "it refuses this member: ?[2J?no" in group.log(1), "it draws nothing", group)
        sock, _ = server.accept()
        with sock:
            sock.sendall(b'{"challenge": "\\ud800"}\n')
            assert ended(sock)
        until(lambda: "rank 0 is gone: it says no JSON" in group.log(1), "it lives on", group)
    until(lambda: "it does not know this cluster's secret" in group.log(1), "it says so", group)

    assert (hello["rank"], hello["state"], group.started(1)) == (1, "idle", [])
    assert "a secret" not in json.dumps(hello)


@flags(silence=20)
def test_strangers_are_turned_away(group: Group) -> None:
    """Whatever they say; the members come in all the same."""
    group.start(0)
    until(lambda: "waiting for rank 1" in group.said.get("doing", ""), "rank 0 listens", group)
    for said in (
        b"\x00\xff\n", b"{}\n", b"[1]\n", b"[" * 60_000 + b"\n", b"x" * 70_000, b'{"rank": 1, "proof": 1}\n',
        b'{"rank": {}, "proof": "\xc3\xa9", "id": []}\n', b'{"rank": ' + b"9" * 5000 + b"}\n",
        b'{"id": "\\ud800", "rank": 1, "proof": "x"}\n', b'{"id": "abcd1234", "rank": 1, "proof": "\\ud800"}\n',
    ):  # fmt: skip
        with socket.create_connection(("127.0.0.1", group.port), 5) as stranger:
            stranger.sendall(said)
            assert ended(stranger), said[:40]
    group.start(1)
    group.is_("ready", 1)

    assert "Traceback" not in group.log(0)


@flags(silence=0.6)
def test_a_stranger_who_says_nothing_is_not_waited_for(group: Group) -> None:
    """It may prove who it is, but must do so at once."""
    group.start(0)
    until(lambda: "waiting for rank 1" in group.said.get("doing", ""), "rank 0 listens", group)
    with socket.create_connection(("127.0.0.1", group.port), 5) as silent:
        assert ended(silent)


@flags(silence=20)
def test_strangers_who_say_nothing_keep_nobody_out(group: Group) -> None:
    """However many: those who came first go first."""
    group.start(0)
    until(lambda: "waiting for rank 1" in group.said.get("doing", ""), "rank 0 listens", group)
    silent = [socket.create_connection(("127.0.0.1", group.port), 5) for _ in range(40)]
    group.start(1)
    group.is_("ready", 1)

    assert all(ended(each) for each in silent[:24])
    for each in silent:
        each.close()


def ended(stranger: socket.socket) -> bool:
    """True when the other side ends the connection."""
    try:
        while stranger.recv(4096):
            continue
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_group_that_dies_too_often_gives_up(group: Group) -> None:
    """It says why, stays there to be asked, and stays down when a host is restarted; the signal to end still ends it."""
    group.be(wanted={"version": 1, "id": "abcd1234", "model": "m", "policy": {"restarts": 1}})
    group.start()
    group.is_("ready", 1)
    group.hit(0)
    until(lambda: len(group.said["faults"]) == 1, "it is noticed", group)
    group.is_("ready", 2)
    group.hit(1)
    group.is_("gave-up")
    until(lambda: not group.engines(0), "nothing runs", group)
    group.signal(0, signal.SIGKILL)
    group.processes[0].wait()
    group.start(0)
    until(lambda: "has given up earlier" in group.log(0), "it stays down", group)
    until(lambda: group.log(1).count("the group has given up") == 1, "all know it", group)
    for rank in (0, 1):
        group.signal(rank, signal.SIGTERM)

    assert [group.processes[rank].wait(5) for rank in (0, 1)] == [0, 0]
    assert (group.said["state"], group.said["restarts_left"]) == ("gave-up", 0)
    assert "all 1 restarts within 3600 s are used up; the last fault: the engine of rank 1" in group.said["doing"]
    assert (group.folder / "state0" / "gave-up.json").exists()
    assert [len(group.started(rank)) for rank in (0, 1)] == [2, 2]


def test_what_never_answered_is_not_tried_again(group: Group) -> None:
    """A typo stays one; whoever waits for the first answer is told at once. Who stops it has seen it."""
    group.be("typo")
    group.start()
    group.is_("gave-up")
    (fault,) = group.said["faults"]

    assert "the first start failed: the engine of rank" in group.said["doing"]
    assert "ended with exit code 1" in fault["what"]
    assert "ValueError: the model `m0del` does not exist" in fault["evidence"]
    assert group.said["restarts_left"] == 3
    (group.folder / "state0" / "wanted.json").unlink()
    group.signal(0, signal.SIGTERM)
    assert (group.processes[0].wait(5), group.said["state"]) == (0, "stopped")


@flags(of=1)
def test_the_signal_to_end_ends_everything(group: Group) -> None:
    """Also an engine that ignores it, and what the engine has started; it is no fault."""
    group.be("stubborn", "child")
    group.start()
    group.is_("ready", 1)
    group.signal(0, signal.SIGTERM)

    assert group.processes[0].wait(5) == 0
    assert (group.said["state"], group.said["faults"], group.engines(0)) == ("stopped", [], [])
    assert not lives(int((group.folder / "child0").read_text(encoding="utf-8")))
