"""Agents as in containers, on loopback, with fakes of vLLM and Ray."""

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

from launcher.agent import state
from launcher.agent.__main__ import Agent
from launcher.agent.desired import Policy, Ray
from launcher.agent.link import server
from launcher.agent.observed import FirstAnswer, Observed
from launcher.agent.processes import process
from launcher.tools import agent_queries
from launcher.tools.shipped import zipapps
from launcher.tools.site import servers
from tests.agent import specs
from tests.agent.authority import Authority
from tests.agent.waits import PATIENCE, lives, until

pytestmark = pytest.mark.processes
ENGINE = str(Path(__file__).with_name("stand_in_engine.py"))
QUICK = Policy(canary=0.2, stuck=60.0, start_timeout=20.0, grace=0.5, pause=0.1, longest_pause=1.0)
# As in the entry point of a container, with shorter times; it adopts orphans like a container's
# first process.
MAIN = """if 1:
    import ctypes, sys
    sys.path.insert(0, sys.argv.pop(1))
    from vlaunch_agent.agent import __main__
    from vlaunch_agent.agent.link import leader, members, server
    from vlaunch_agent.agent.processes import node
    from vlaunch_agent.agent.supervise import supervisor
    leader._RETURN, members.EVERY, server._HANDSHAKE = 0.5, 0.2, 1.0
    node._CHECK_SECONDS, supervisor._GATHER_SECONDS = 0.2, 0.3
    __main__._INTERVAL, __main__._RAY_RETRY, supervisor._RECONNECT_SECONDS = 0.1, 0.3, 1.0
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    sys.exit(__main__.main())"""


def free() -> int:
    """Return a free port that the kernel does not assign to another test."""
    while True:
        port = random.randrange(20000, 32000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


class Cluster:
    """Agents with a folder per node; the first agent is the head's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free()
        self.ports: dict[str, int] = {}  # the head's address for other nodes
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.request_count = 0
        self.authority = Authority()
        (folder / "agent.pyz").write_bytes(zipapps.pack(zipapps.agent_files()))

    def start(
        self,
        *nodes: str,
        ray: tuple[str, ...] = (),
        authority: Authority | None = None,
    ) -> None:
        """Start agents; the head's gets its own option."""
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
                        str(self.folder / "agent.pyz"),
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
        """Return a server with one process per node; its engines have the named traits."""
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
        spec = specs.mp(
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
        return server, spec.as_json()

    def serve(self, name: str, *nodes: str, **fields: Any) -> Server:
        """Store a spec."""
        server, spec = self.write_spec(name, *nodes, **fields)
        file = self.folder / "state" / "gpu1" / name / "desired.json"
        state.write_json(str(file), spec, durable=False)
        return server

    def kill(self, node: str) -> None:
        """Kill a container's processes without warning."""
        self.agents[node].kill()
        self.agents[node].wait()

    def log(self, node: str) -> str:
        """Return the log of a node's container."""
        return (self.folder / f"log-{node}").read_text()

    def logs(self) -> str:
        """Return all logs."""
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in self.folder.glob("log-*"))

    def says(self, node: str, text: str) -> None:
        """Wait for a text in a node's log."""
        until(lambda: text in self.log(node), f"{node} says {text!r}", self.logs)

    def end(self) -> None:
        """Kill all remaining processes."""
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
        # A killed container would leave no records either.
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
        """Add traits to the engine and remove others."""
        for label in args:
            (self.folder / label).touch()
        for label in no:
            (self.folder / label).unlink()

    @property
    def status(self) -> Observed:
        """Return the record."""
        return state.read_status(
            self.name, str(self.cluster.folder / "state" / "gpu1")
        ) or Observed(name="", id="", asked=0.0, state="")

    def started(self, rank: int = 0) -> list[int]:
        """Return all processes that a rank has had."""
        path = self.folder / f"engine{rank}"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self) -> list[int]:
        """Return the living processes."""
        return [pid for rank in range(len(self.nodes)) for pid in self.started(rank) if lives(pid)]

    def hit(self, rank: int = 0, number: int = signal.SIGKILL) -> None:
        """Signal a rank."""
        os.kill(self.started(rank)[-1], number)

    def is_(self, *states: str, generation: int = 0) -> Observed:
        """Wait for a state, and for one process per rank of the same generation."""

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
        """Remove the spec."""
        (self.cluster.folder / "state" / "gpu1" / self.name / "desired.json").unlink()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster for one test."""
    created = Cluster(tmp_path)
    yield created
    created.end()


# ---- from a start to a stop ----------------------------------------------------------------------


def test_a_server_on_two_nodes(cluster: Cluster) -> None:
    """It starts once both agents are connected; engines print to their nodes' logs; a stop removes
    everything.
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


def test_queries_with_curl(cluster: Cluster) -> None:
    """The answer has the supervisor's status and the connected agents."""
    cluster.start("gpu1", "gpu2")
    cluster.serve("chat", "gpu1", "gpu2").is_("ready")
    saved = ask_servers(cluster)
    (server,) = saved.servers

    assert servers.server_health(server, saved.agent) == ("answering", "")
    assert server.observed is not None
    assert isinstance(server.observed.first_answer, FirstAnswer)
    assert (set(saved.members), saved.agent < 5) == ({"gpu1", "gpu2"}, True)


def test_a_failed_first_start(cluster: Cluster) -> None:
    """It is reported at once, with the cause; the agent then starts the next spec."""
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


def test_a_stop_during_the_start(cluster: Cluster) -> None:
    """It does not wait for the first answer."""
    cluster.start("gpu1", "gpu2")
    server = cluster.serve("chat", "gpu1", "gpu2", be=("slow",))
    until(lambda: len(server.pids()) == 2, "it starts", cluster.logs)
    server.stop()
    server.is_("stopped")

    assert server.pids() == []


# ---- faults --------------------------------------------------------------------------------------


def test_a_killed_rank_names_its_node(cluster: Cluster) -> None:
    """The other rank is stopped, all restart, and no process of the old engine is left."""
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


def test_an_engine_of_one_process_restarts(cluster: Cluster) -> None:
    """Ray may run its ranks; the first error is the cause."""
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
    """If it is resumed in time, it is not restarted."""
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


def test_a_sleeping_server_is_not_restarted(cluster: Cluster) -> None:
    """And a canary's answer of 500 is reported."""
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


def test_an_engine_that_reports_its_death(cluster: Cluster) -> None:
    """It is stopped and restarted."""
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
        """Cut or restore the connection."""
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


def test_a_lost_connection_stops_nothing(cluster: Cluster) -> None:
    """The engine continues; on reconnection, its state is compared with the spec."""
    cluster.start("gpu1")
    with Wire(cluster.port) as between:
        cluster.ports["gpu2"] = between.port
        cluster.start("gpu2")
        server = cluster.serve("chat", "gpu1", "gpu2", be=("bound",))
        server.is_("ready", generation=1)
        pids = server.pids()
        between.set(cut=True)
        until(lambda: "from the agent of gpu2" in server.status.warning, "it is away", cluster.logs)
        for _ in range(4):  # longer than the deadline for a return, and than three canaries
            server.answers()
        assert (server.status.state, server.pids()) == ("ready", pids)
        between.set(cut=False)
        until(lambda: server.status.warning == "", "it is back", cluster.logs)
        server.answers()

        assert (server.status.generation, server.status.faults, server.pids()) == (1, [], pids)


def test_a_briefly_frozen_agent_stops_nothing(cluster: Cluster) -> None:
    """Its reports are late, and its engine is unaffected."""
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


def test_an_exited_container(cluster: Cluster) -> None:
    """Its rank is lost and no completion returns: everything starts once it is back."""
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


def test_a_quickly_restarted_container(cluster: Cluster) -> None:
    """It must not join an engine that has lost it and would wait forever: all ranks restart."""
    cluster.start("gpu1", "gpu2")
    server = cluster.serve("chat", "gpu1", "gpu2", be=("bound",))
    server.is_("ready", generation=1)
    cluster.kill("gpu2")
    cluster.start("gpu2")
    (fault,) = server.is_("ready", generation=2).faults

    assert fault.node == "gpu2"
    assert fault.what in ("the container of gpu2 was restarted", "gpu2 is gone")


def test_a_restarted_head(cluster: Cluster) -> None:
    """Its own engine exited with it and restarts, with one fault; an engine on other nodes is
    unaffected.
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


def test_a_crash_loop_does_not_affect_another_server(cluster: Cluster) -> None:
    """Nor does a stop: all have their own processes."""
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
    """Return whether the other side closes the connection."""
    stranger.settimeout(PATIENCE)
    try:
        while stranger.recv(1 << 16):
            continue
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_unauthorized_clients_change_nothing(cluster: Cluster) -> None:
    """Whatever they send, and for however long; agents and server are unaffected."""
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
    cluster.authority.deliver(cluster.folder / "secrets" / "gpu3", "gpu3")  # they are reloaded
    cluster.says("gpu1", "agent of gpu3 connected")


def test_certificates_are_renewed_without_a_restart(cluster: Cluster) -> None:
    """Node by node, as in `vlaunch secrets rotate`."""
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
    """Return a process's zombie children."""
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
    """Both are exited children."""
    cluster.start("gpu1")
    server = cluster.serve("chat", "gpu1", be=("orphan",))
    server.is_("ready")
    for generation in (2, 3):
        server.hit(0, signal.SIGSEGV)
        server.is_("ready", generation=generation)
    until(lambda: not zombies(cluster.agents["gpu1"].pid), "they are reaped", cluster.logs)

    assert [fault.what for fault in server.status.faults] == ["vLLM was killed by SIGSEGV"] * 2
    assert len((server.folder / "orphans").read_text().split()) == 3


def test_sigterm_stops_everything(cluster: Cluster) -> None:
    """Engines that ignore it and their children too; specs stay, and no fault is recorded."""
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
def test_the_container_exits_with_ray(cluster: Cluster, ends: str, code: int) -> None:
    """With Ray's exit code, so that Docker restarts it."""
    cluster.start("gpu1", ray=("sh", "-c", f"sleep 0.2; {ends}"))

    assert cluster.agents["gpu1"].wait(PATIENCE) == code


def test_an_image_without_ray(cluster: Cluster) -> None:
    """The container exits as after a shell's error."""
    cluster.start("gpu1", ray=("/no/ray", "start"))

    assert cluster.agents["gpu1"].wait(PATIENCE) == 127
    assert "/no/ray: No such file" in cluster.log("gpu1")


def test_ray_is_restarted_beside_an_engine(cluster: Cluster) -> None:
    """Independent engines continue; Ray's leftovers are stopped first. Ray exits with the agent."""
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


def test_ray_joins_a_replaced_head(cluster: Cluster) -> None:
    """It would wait for the old head, then exit with its container; the engine beside it is
    unaffected.
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


def test_a_server_without_ray_does_not_wait_for_it(cluster: Cluster) -> None:
    """Its GPUs are to be reserved in an unresponsive Ray: whole nodes do not wait for that."""
    cluster.start("gpu1")
    ray = Ray(dashboard=1, node_manager=1, gpus=1, reserve=True)
    server = cluster.serve("chat", "gpu1", ray=ray, addresses={"gpu1": "127.0.0.1"})
    server.is_("ready")
    server.stop()

    server.is_("stopped")


def agent_of_head() -> Agent:
    """Return an agent of a head that does not run."""
    return Agent(
        argparse.Namespace(
            node="gpu1",
            head="127.0.0.1",
            port=1,
            metrics_port=2,
            lead=True,
            private_shm=False,
            command=[],
        )
    )


@pytest.mark.parametrize("busy", ["", "router", "server", "batch job", "disk"])
def test_lost_gpus_restart_a_container_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    """Not while anything in it works: on the head, it ends Ray, batch jobs and the router."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(state, "FOLDER", str(tmp_path / "file" if busy == "disk" else tmp_path))
    monkeypatch.setattr(server, "HttpServer", lambda *_: None)
    if busy != "batch job":  # another test's worker on this machine
        monkeypatch.setattr(process, "busy_ray_workers", list)
    agents = [agent_of_head() for _ in range(2)]
    first = agents[0]
    ready = SimpleNamespace(status=Observed(name="chat", id="", asked=0.0, state="ready"))
    with contextlib.ExitStack() as stack:
        if busy == "router":
            monkeypatch.setattr(first.router, "_process", object())
        elif busy == "server":
            first.supervisors["chat"] = ready  # type: ignore[assignment]
        elif busy == "batch job":
            argv = ["ray::JobSupervisor", "60"]
            worker = stack.enter_context(subprocess.Popen(argv, executable="/bin/sleep"))
            stack.callback(worker.kill)
            until(lambda: worker.pid in process.busy_ray_workers(), "its title")
        for agent in agents if not busy else [first]:
            agent.node._on_gpus_lost("lost")

    assert [agent.code for agent in agents] == ([None, None] if busy else [1, None])


def test_no_member_is_answered_before_the_records_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Empty first orders would stop its engines."""
    steps: list[str] = []
    serving = SimpleNamespace(start=lambda: steps.append("answer members"))
    monkeypatch.setattr(server, "HttpServer", lambda *_: serving)
    monkeypatch.setattr(Agent, "tick", lambda self: steps.append("turn") or self.signals.append(15))
    agent_of_head().run()
    assert steps == ["turn", "answer members"]
