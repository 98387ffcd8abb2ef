"""Agents as they run in containers, on loopback, with stand-ins for vLLM and for Ray."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import agent
from launcher.agent import server, state
from launcher.agent.__main__ import Agent
from launcher.agent.desired import Policy, Ray
from launcher.agent.observed import FirstAnswer, Observed
from launcher.tools import agent_queries, servers
from tests.agent import specs
from tests.agent.authority import Authority
from tests.agent.waits import PATIENCE, lives, until

pytestmark = pytest.mark.processes
ENGINE = str(Path(__file__).with_name("stand_in_engine.py"))
QUICK = Policy(canary=0.2, stuck=60.0, start_timeout=20.0, grace=0.5, pause=0.1, longest_pause=1.0)
# As the entry point of a container has it; times are shorter, and orphans come to it as to the
# first process of a container.
MAIN = """if 1:
    import ctypes, sys
    sys.path.insert(0, sys.argv.pop(1))
    from vlaunch_agent import __main__, leader, members, node, server, supervisor
    leader._RETURN, members.EVERY, server._HANDSHAKE = 0.5, 0.2, 1.0
    node._CHECK_SECONDS, supervisor._GATHER_SECONDS = 0.2, 0.3
    __main__._INTERVAL, __main__._RAY_RETRY, supervisor._RECONNECT_SECONDS = 0.1, 0.3, 1.0
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    sys.exit(__main__.main())"""


def free() -> int:
    """Return a port that nobody has, and that the kernel will not hand out to another test
    meanwhile.
    """
    while True:
        port = random.randrange(20000, 32000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


class Cluster:
    """Agents with a folder each, as nodes have; the first one is the head's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free()
        self.ports: dict[str, int] = {}  # of the head, as other nodes see it
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.request_count = 0
        self.authority = Authority()
        (folder / "lib").mkdir()
        (folder / "lib" / "vlaunch_agent").symlink_to(Path(agent.__file__).parent)

    def start(
        self,
        *nodes: str,
        ray: tuple[str, ...] = (),
        authority: Authority | None = None,
    ) -> None:
        """Start agents; the head's is told so."""
        for node in nodes:
            (self.folder / "state" / node).mkdir(parents=True, exist_ok=True)
            (authority or self.authority).deliver(self.folder / "secrets" / node, node)
            parts = [
                "--node",
                node,
                "--head",
                "127.0.0.1",
                "--port",
                str(self.ports.get(node, self.port)),
            ]
            parts += ["--lead", "--metrics-port", "0"] if node == "gpu1" else []
            with (self.folder / f"log-{node}").open("ab") as log:
                self.agents[node] = subprocess.Popen(
                    [
                        sys.executable,
                        "-u",
                        "-c",
                        MAIN,
                        str(self.folder / "lib"),
                        *parts,
                        *(("--", *ray) if ray else ()),
                    ],
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={
                        **os.environ,
                        "VLAUNCH_STATE": str(self.folder / "state" / node),
                        "VLAUNCH_SECRETS": str(self.folder / "secrets" / node),
                        "VLAUNCH_MOUNTS": str(self.folder / "mounts"),
                        "VLAUNCH_AGENT_SOCKET": str(self.folder / f"{node}.sock"),
                    },
                )

    def write_spec(
        self,
        name: str,
        *nodes: str,
        policy: Policy = QUICK,
        be: tuple[str, ...] = (),
        **fields: Any,
    ) -> tuple[Server, dict[str, Any]]:
        """Return a server with one process on each node; its engines are as the words say."""
        server = Server(self, name, nodes)
        server.be(*be)
        self.request_count += 1
        processes = tuple(
            specs.process(
                node,
                *(sys.executable, "-S", ENGINE, str(server.folder), str(rank), str(server.port)),
                *(["--headless"] if rank else []),
            )
            for rank, node in enumerate(nodes)
        )
        want = specs.mp(
            *nodes,
            **{
                "name": name,
                "processes": processes,
                "port": server.port,
                "asked": float(self.request_count),
                "policy": policy,
                **fields,
            },
        )
        return server, want.as_json()

    def serve(self, name: str, *nodes: str, **fields: Any) -> Server:
        """Want a server."""
        server, want = self.write_spec(name, *nodes, **fields)
        file = self.folder / "state" / "gpu1" / name / "desired.json"
        state.write_json(str(file), want, durable=False)
        return server

    def kill(self, node: str) -> None:
        """Let a container end, as it does without warning."""
        self.agents[node].kill()
        self.agents[node].wait()

    def log(self, node: str) -> str:
        """Return what a node's container would have printed."""
        return (self.folder / f"log-{node}").read_text()

    def logs(self) -> str:
        """Return what all printed."""
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in self.folder.glob("log-*"))

    def says(self, node: str, text: str) -> None:
        """Wait until a node's agent has printed something."""
        until(lambda: text in self.log(node), f"{node} says {text!r}", self.logs)

    def end(self) -> None:
        """End everything that is left."""
        for item in self.agents.values():
            if item.poll() is None:
                item.send_signal(signal.SIGCONT)
                item.kill()
                item.wait()
        numbers = [
            int(pid)
            for path in self.folder.glob("engines/*/engine?")
            for pid in path.read_text().split()
        ]
        for pid in numbers:
            if lives(pid):
                os.kill(pid, signal.SIGCONT)
        until(lambda: not any(map(lives, numbers)), "the engines end with their agents")
        # What nobody tells that the container has gone, as there would be none of it any more.
        for path in (*self.folder.glob("engines/*/child?"), *self.folder.glob("rays*")):
            for pid in filter(lives, map(int, path.read_text().split())):
                os.kill(pid, signal.SIGKILL)
        assert "Traceback" not in self.logs()


class Server:
    """A server of the cluster."""

    def __init__(self, cluster: Cluster, name: str, nodes: tuple[str, ...]) -> None:
        self.cluster, self.name, self.nodes, self.port = cluster, name, nodes, free()
        self.folder = cluster.folder / "engines" / name
        self.folder.mkdir(parents=True, exist_ok=True)

    def be(self, *args: str, no: tuple[str, ...] = ()) -> None:
        """Be something from now on, and something else no more."""
        for label in args:
            (self.folder / label).touch()
        for label in no:
            (self.folder / label).unlink()

    @property
    def status(self) -> Observed:
        """The record."""
        return state.read_status(
            self.name, str(self.cluster.folder / "state" / "gpu1")
        ) or Observed(name="", id="", asked=0.0, state="")

    def started(self, rank: int = 0) -> list[int]:
        """Return every process that a rank has had."""
        path = self.folder / f"engine{rank}"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self) -> list[int]:
        """Return the living processes."""
        return [pid for rank in range(len(self.nodes)) for pid in self.started(rank) if lives(pid)]

    def hit(self, rank: int = 0, number: int = signal.SIGKILL) -> None:
        """Signal a rank."""
        os.kill(self.started(rank)[-1], number)

    def is_(self, *states: str, generation: int = 0) -> Observed:
        """Wait for a state, and for one living process of each rank, all of that generation."""

        def holds() -> bool:
            status = self.status
            if status.state not in states or (generation and status.generation != generation):
                return False
            return "ready" not in states or len(self.pids()) == len(self.nodes)

        until(
            holds,
            f"{self.name} is {states}, generation {generation}",
            lambda: f"{self.status}\n{self.cluster.logs()}",
        )
        return self.status

    def answers(self) -> None:
        """Wait for another canary."""
        last = self.status.answered or 0.0
        until(
            lambda: (self.status.answered or 0.0) > last,
            "it answers",
            lambda: f"{self.status}\n{self.cluster.logs()}",
        )

    def stop(self) -> None:
        """Want it no more."""
        (self.cluster.folder / "state" / "gpu1" / self.name / "desired.json").unlink()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Agents that end with the test."""
    created = Cluster(tmp_path)
    yield created
    created.end()


# ---- from a start to a stop ----------------------------------------------------------------------


def test_a_server_on_two_nodes(cluster: Cluster) -> None:
    """Nothing runs before both agents are there; what engines print is in their nodes' logs; a stop
    leaves nothing.
    """
    cluster.start("gpu1")
    server = cluster.serve("chat", "gpu1", "gpu2", be=("child", "stubborn"))
    until(lambda: server.status.doing == "waiting for the agent of gpu2", "it waits", cluster.logs)
    assert server.pids() == []

    cluster.start("gpu2")
    status = server.is_("ready", generation=1)
    assert (status.faults, status.restarts_left) == ([], None)
    assert (
        "the engine of rank 1 runs"
        in (cluster.folder / "state" / "gpu2" / "chat" / "engine.log").read_text()
    )

    children = [int((server.folder / f"child{rank}").read_text()) for rank in (0, 1)]
    server.stop()
    server.is_("stopped")
    assert (server.pids(), [lives(pid) for pid in children]) == ([], [False, False])


def ask_servers(cluster: Cluster) -> servers.ServersState:
    """Query the head's agent as the launcher does."""
    argv = [
        str(cluster.folder / "gpu1.sock") if label == state.SOCKET else label
        for label in agent_queries.servers()
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return servers.parse_servers(json.loads(done.stdout))


def test_the_launcher_asks_with_curl(cluster: Cluster) -> None:
    """The supervisor's status comes back, with the connected agents."""
    cluster.start("gpu1", "gpu2")
    cluster.serve("chat", "gpu1", "gpu2").is_("ready")
    saved = ask_servers(cluster)
    (server,) = saved.servers

    assert servers.server_health(server, saved.agent) == ("answering", "")
    assert server.observed is not None
    assert isinstance(server.observed.first_answer, FirstAnswer)
    assert (set(saved.members), saved.agent < 5) == ({"gpu1", "gpu2"}, True)


def test_a_first_start_that_fails(cluster: Cluster) -> None:
    """It is said at once, with the cause; the agent goes on, and the next wish is tried."""
    cluster.start("gpu1")
    server = cluster.serve("chat", "gpu1", be=("typo",))
    status = server.is_("failed")
    assert (
        status.doing
        == "it never answered: vLLM ended with exit code 1: ValueError: the model `m0del` does not"
        " exist"
    )

    server = cluster.serve("chat", "gpu1")
    server.be(no=("typo",))
    server.is_("ready")


def test_a_server_that_is_stopped_while_it_starts(cluster: Cluster) -> None:
    """Nobody waits for its first answer."""
    cluster.start("gpu1", "gpu2")
    server = cluster.serve("chat", "gpu1", "gpu2", be=("slow",))
    until(lambda: len(server.pids()) == 2, "it starts", cluster.logs)
    server.stop()
    server.is_("stopped")

    assert server.pids() == []


# ---- faults --------------------------------------------------------------------------------------


def test_a_killed_rank_names_its_node(cluster: Cluster) -> None:
    """The other rank ends with it; everything starts anew, and nothing of the old engine is
    left.
    """
    cluster.start("gpu1", "gpu2")
    server = cluster.serve("chat", "gpu1", "gpu2", be=("brittle", "child"))
    server.is_("ready", generation=1)
    server.hit(1)
    status = server.is_("ready", generation=2)
    (fault,) = status.faults

    assert (fault.node, fault.rank) == ("gpu2", "1")
    assert (
        fault.what
        == "vLLM's process on gpu2 was killed by SIGKILL (by hand, or for lack of memory)"
    )
    assert list(fault.phases) == ["stopped", "whole", "started"]
    children = [
        int(part)
        for rank in (0, 1)
        for part in (server.folder / f"child{rank}").read_text().split()
    ]
    assert [lives(pid) for pid in children] == [False, True, False, True]


def test_an_engine_of_one_process_comes_back(cluster: Cluster) -> None:
    """As one whose ranks Ray runs; the first error is the cause."""
    cluster.start("gpu1")
    server = cluster.serve("chat", "gpu1")
    server.is_("ready", generation=1)
    server.hit()
    (fault,) = server.is_("ready", generation=2).faults

    assert (fault.what, fault.node) == (
        "vLLM was killed by SIGKILL (by hand, or for lack of memory)",
        "",
    )


def test_a_frozen_engine(cluster: Cluster) -> None:
    """Thawed in time, nothing has happened to it."""
    cluster.start("gpu1", "gpu2")
    server = cluster.serve("chat", "gpu1", "gpu2")
    server.is_("ready", generation=1)
    for rank in (0, 1):
        server.hit(rank, signal.SIGSTOP)
    until(lambda: server.status.still > 1.0, "it stands still", cluster.logs)
    for rank in (0, 1):
        server.hit(rank, signal.SIGCONT)
    server.answers()

    assert (server.status.state, server.status.generation, server.status.faults) == ("ready", 1, [])
    assert server.status.longest_step > 1.0


def test_a_server_that_sleeps_is_left_alone(cluster: Cluster) -> None:
    """And an answer of 500 is told."""
    cluster.start("gpu1")
    server = cluster.serve("chat", "gpu1")
    server.is_("ready")
    server.be("asleep")
    until(lambda: server.status.reason == "it sleeps", "it sleeps", cluster.logs)
    slept = server.status.asking
    until(lambda: server.status.asking > slept + 1.5, "it sleeps on", cluster.logs)
    server.be("broken", no=("asleep",))
    until(
        lambda: "canary failed: HTTP 500: no luck" in server.status.reason,
        "it is odd",
        cluster.logs,
    )
    server.be(no=("broken",))
    server.answers()

    assert (server.status.state, server.status.generation, server.status.faults) == ("ready", 1, [])


def test_an_engine_that_says_that_it_is_dead(cluster: Cluster) -> None:
    """It is ended, and comes back."""
    cluster.start("gpu1")
    server = cluster.serve("chat", "gpu1")
    server.is_("ready")
    server.be("dead")
    until(lambda: server.status.faults != [], "it is noticed", cluster.logs)
    server.be(no=("dead",))
    status = server.is_("ready")

    assert status.faults[0].what == "the engine reports that it is dead"


# ---- agents and connections ----------------------------------------------------------------------


class Wire:
    """Relay between a node and the head, until it is cut."""

    def __init__(self, port: int) -> None:
        self.to, self.port, self.cut = port, free(), False
        self.server = socket.create_server(("127.0.0.1", self.port))
        self.ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", 1 if self.cut else self.to), 5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self.ends += [near, far]
            for first, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(first, other), daemon=True).start()

    def _pass(self, first: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := first.recv(1 << 16):
                other.sendall(data)
        for item in (first, other):
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)

    def set(self, *, cut: bool) -> None:
        """Cut it, or mend it."""
        self.cut = cut
        for item in self.ends if cut else ():
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.set(cut=True)
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        for item in (self.server, *self.ends):
            item.close()


def test_a_connection_that_is_cut_ends_nothing(cluster: Cluster) -> None:
    """The engine works on meanwhile; what is here and what is wanted are compared when the agent is
    back.
    """
    cluster.start("gpu1")
    with Wire(cluster.port) as between:
        cluster.ports["gpu2"] = between.port
        cluster.start("gpu2")
        server = cluster.serve("chat", "gpu1", "gpu2", be=("bound",))
        server.is_("ready", generation=1)
        pids = server.pids()
        between.set(cut=True)
        until(lambda: "from the agent of gpu2" in server.status.warning, "it is away", cluster.logs)
        for _ in range(4):  # longer than an agent has to come back, and than three canaries
            server.answers()
        assert (server.status.state, server.pids()) == ("ready", pids)
        between.set(cut=False)
        until(lambda: server.status.warning == "", "it is back", cluster.logs)
        server.answers()

        assert (server.status.generation, server.status.faults, server.pids()) == (1, [], pids)


def test_an_agent_that_is_frozen_for_a_moment_ends_nothing(cluster: Cluster) -> None:
    """It is behind with its reports, and has its engine still."""
    cluster.start("gpu1", "gpu2")
    server = cluster.serve("chat", "gpu1", "gpu2")
    server.is_("ready", generation=1)
    pids = server.pids()
    cluster.agents["gpu2"].send_signal(signal.SIGSTOP)
    for _ in range(3):
        server.answers()
    cluster.agents["gpu2"].send_signal(signal.SIGCONT)
    server.answers()

    assert (server.status.state, server.status.generation, server.status.faults, server.pids()) == (
        "ready",
        1,
        [],
        pids,
    )


def test_a_container_that_ends(cluster: Cluster) -> None:
    """Its rank is gone with it, and no completion comes back: it is waited for, and everything
    starts when it is back.
    """
    cluster.start("gpu1", "gpu2")
    server = cluster.serve("chat", "gpu1", "gpu2", be=("bound",))
    server.is_("ready", generation=1)
    cluster.kill("gpu2")
    until(
        lambda: server.status.doing == "waiting for the agent of gpu2",
        "it is waited for",
        cluster.logs,
    )
    assert (server.pids(), server.status.faults[0].what, server.status.faults[0].node) == (
        [],
        "gpu2 is gone",
        "gpu2",
    )
    cluster.start("gpu2")

    server.is_("ready", generation=2)


def test_a_container_that_is_back_at_once(cluster: Cluster) -> None:
    """It must not join an engine that has lost it, which would wait for ever: all of them start
    anew.
    """
    cluster.start("gpu1", "gpu2")
    server = cluster.serve("chat", "gpu1", "gpu2", be=("bound",))
    server.is_("ready", generation=1)
    cluster.kill("gpu2")
    cluster.start("gpu2")
    (fault,) = server.is_("ready", generation=2).faults

    assert fault.node == "gpu2"
    assert fault.what in ("the container of gpu2 was restarted", "gpu2 is gone")


def test_a_head_that_ends_and_starts_again(cluster: Cluster) -> None:
    """Its own engine ended with it, and comes back as one fault; one on other nodes has gone on,
    and nothing happened to it.
    """
    cluster.start("gpu1", "gpu2")
    chat, embed = cluster.serve("chat", "gpu1", "gpu2"), cluster.serve("embed", "gpu2")
    chat.is_("ready", generation=1)
    embed.is_("ready", generation=1)
    pids = embed.pids()
    cluster.kill("gpu1")
    assert embed.pids() == pids
    cluster.start("gpu1")
    (fault,) = chat.is_("ready", generation=2).faults
    embed.is_("ready")
    embed.answers()

    assert fault.what == "the head's container was restarted"
    assert (embed.pids(), embed.status.generation, embed.status.faults) == (pids, 1, [])


def test_one_server_dies_again_and_again_and_the_other_does_not_notice(cluster: Cluster) -> None:
    """Each has its own processes; a stop of one leaves the other alone."""
    cluster.start("gpu1", "gpu2")
    chat, embed = cluster.serve("chat", "gpu1", "gpu2"), cluster.serve("embed", "gpu1", "gpu2")
    chat.is_("ready", generation=1)
    embed.is_("ready", generation=1)
    pids = embed.pids()
    for at in range(3):
        chat.hit(at % 2)
        chat.is_("ready", generation=at + 2)
    assert (len(chat.status.faults), len(chat.status.restarts)) == (3, 3)
    chat.stop()
    chat.is_("stopped")
    embed.answers()

    assert (embed.pids(), embed.status.generation, embed.status.faults) == (pids, 1, [])


def over(stranger: socket.socket) -> bool:
    """True when the other side ends the connection."""
    stranger.settimeout(PATIENCE)
    try:
        while stranger.recv(1 << 16):
            continue
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_strangers_on_the_port_change_nothing(cluster: Cluster) -> None:
    """Whatever they say, and however long; the agents stay, and so does the server."""
    cluster.start("gpu1", "gpu2")
    server = cluster.serve("chat", "gpu1", "gpu2")
    server.is_("ready", generation=1)
    cluster.start("gpu3", authority=Authority())
    silent = [socket.create_connection(("127.0.0.1", cluster.port), 5) for _ in range(70)]
    for text in (b"\x00\xff\n", b"{}\n", b"x" * (10 << 20), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", cluster.port), 5) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(text)
            assert over(stranger), text[:40]
    for item in silent:
        assert over(item)
        item.close()
    cluster.says("gpu3", "the certificate is not accepted")
    server.answers()

    assert (server.status.generation, server.status.faults) == (1, [])
    assert set(ask_servers(cluster).members) == {"gpu1", "gpu2"}
    cluster.authority.deliver(cluster.folder / "secrets" / "gpu3", "gpu3")  # they are read again
    cluster.says("gpu1", "agent of gpu3 connected")


def test_certificates_are_renewed_beside_a_server(cluster: Cluster) -> None:
    """Node by node, as `vlaunch secrets rotate` does; nothing starts anew."""
    cluster.start("gpu1", "gpu2")
    server = cluster.serve("chat", "gpu1", "gpu2")
    server.is_("ready", generation=1)
    pids = server.pids()
    cluster.authority = Authority()
    for node in ("gpu2", "gpu1"):
        cluster.authority.deliver(cluster.folder / "secrets" / node, node)
        server.answers()
    until(lambda: cluster.log("gpu1").count("agent of gpu2 connected") == 2, "it is back")
    server.answers()

    assert (server.status.generation, server.status.faults, server.pids()) == (1, [], pids)


# ---- the first process of a container ------------------------------------------------------------


def zombies(pid: int) -> list[str]:
    """Return a process's children that wait to be reaped."""
    results = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            argv = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if argv[0] == "Z" and argv[1] == str(pid):
            results.append(path.parent.name)
    return results


def test_orphans_are_reaped_and_exit_codes_are_not_stolen(cluster: Cluster) -> None:
    """Both are children that have ended."""
    cluster.start("gpu1")
    server = cluster.serve("chat", "gpu1", be=("orphan",))
    server.is_("ready")
    for generation in (2, 3):
        server.hit(0, signal.SIGSEGV)
        server.is_("ready", generation=generation)
    until(lambda: not zombies(cluster.agents["gpu1"].pid), "they are reaped", cluster.logs)

    assert [fault.what for fault in server.status.faults] == ["vLLM was killed by SIGSEGV"] * 2
    assert len((server.folder / "orphans").read_text().split()) == 3


def test_the_signal_to_end_ends_everything(cluster: Cluster) -> None:
    """Also engines that ignore it, and what they have started; what is wanted stays wanted, and no
    fault is made of it.
    """
    cluster.start("gpu1", "gpu2")
    server = cluster.serve("chat", "gpu1", "gpu2", be=("stubborn", "child"))
    server.is_("ready")
    children = [int((server.folder / f"child{rank}").read_text()) for rank in (0, 1)]
    for node in ("gpu1", "gpu2"):
        cluster.agents[node].terminate()

    assert [cluster.agents[node].wait(PATIENCE) for node in ("gpu1", "gpu2")] == [143, 143]
    assert (server.pids(), [lives(pid) for pid in children]) == ([], [False, False])
    assert server.status.faults == [] or {fault.node for fault in server.status.faults} <= {"gpu2"}
    assert (cluster.folder / "state" / "gpu1" / "chat" / "desired.json").exists()


@pytest.mark.parametrize(("ends", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_a_container_ends_with_ray(cluster: Cluster, ends: str, code: int) -> None:
    """With its exit code, as Docker starts it again then."""
    cluster.start("gpu1", ray=("sh", "-c", f"sleep 0.2; {ends}"))

    assert cluster.agents["gpu1"].wait(PATIENCE) == code


def test_an_image_without_ray(cluster: Cluster) -> None:
    """The container ends as a shell would end it."""
    cluster.start("gpu1", ray=("/no/ray", "start"))

    assert cluster.agents["gpu1"].wait(PATIENCE) == 127
    assert "/no/ray: No such file" in cluster.log("gpu1")


def test_ray_ends_beside_an_engine(cluster: Cluster) -> None:
    """It is started again, and what does not need it goes on; what it left behind is ended first.

    It ends with the agent.
    """
    marks = cluster.folder / "rays"
    cluster.start(
        "gpu1", ray=("sh", "-c", f"setsid sleep 60 & echo $$ $! >> {marks}; wait; exit 1")
    )
    server = cluster.serve("chat", "gpu1")
    server.is_("ready")
    pids = server.pids()
    first, remaining = [int(part) for part in marks.read_text().split()]
    os.kill(first, signal.SIGKILL)
    until(lambda: len(marks.read_text().split()) == 4, "it is started again", cluster.logs)
    server.answers()
    assert (server.pids(), server.status.faults, lives(remaining)) == (pids, [], False)

    cluster.agents["gpu1"].terminate()
    assert cluster.agents["gpu1"].wait(PATIENCE) == 143
    assert not lives(int(marks.read_text().split()[2]))


def test_ray_joins_a_head_that_is_another_one(cluster: Cluster) -> None:
    """It would wait for the one that is gone, and then end with its container; the engine beside it
    does not notice.
    """
    marks = {node: cluster.folder / f"rays-{node}" for node in ("gpu1", "gpu2")}
    for node, file in marks.items():
        cluster.start(node, ray=("sh", "-c", f"echo $$ >> {file}; exec sleep 60"))
    server = cluster.serve("chat", "gpu1", "gpu2")
    server.is_("ready")
    server.answers()
    pids = server.pids()
    os.kill(int(marks["gpu1"].read_text()), signal.SIGKILL)
    until(
        lambda: len(marks["gpu2"].read_text().split()) == 2, "it joins the new head", cluster.logs
    )
    server.answers()
    first, second = map(int, marks["gpu2"].read_text().split())

    assert (lives(first), lives(second), server.pids(), server.status.faults) == (
        False,
        True,
        pids,
        [],
    )
    assert cluster.log("gpu2").count("Ray's head was restarted; rejoining it") == 1
    for node in marks:
        cluster.agents[node].terminate()
        assert cluster.agents[node].wait(PATIENCE) == 143
    assert not lives(second)


def test_a_server_beside_ray_is_no_part_of_it(cluster: Cluster) -> None:
    """Its GPUs are to be set aside in a Ray that does not answer: nodes that it takes whole do not
    wait for that.
    """
    cluster.start("gpu1")
    ray = Ray(dashboard=1, node_manager=1, gpus=1, reserve=True)
    server = cluster.serve("chat", "gpu1", ray=ray, addresses={"gpu1": "127.0.0.1"})
    server.is_("ready")
    server.stop()

    server.is_("stopped")


def test_no_member_is_answered_before_the_first_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first orders are of the records: without any, its engines would end."""
    steps: list[str] = []
    serving = SimpleNamespace(start=lambda: steps.append("answer members"))
    monkeypatch.setattr(server, "HttpServer", lambda *_: serving)
    monkeypatch.setattr(Agent, "tick", lambda self: steps.append("turn") or self.signals.append(15))
    args = argparse.Namespace(
        node="gpu1",
        head="127.0.0.1",
        port=1,
        metrics_port=2,
        lead=True,
        private_shm=False,
        command=[],
    )
    Agent(args).run()
    assert steps == ["turn", "answer members"]
