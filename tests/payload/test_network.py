"""The network probe's parts that need no torch: the parent with stand-ins for ranks, rounds, sizes,
logs, and calls to NCCL.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.processes

FOLDER = Path(__file__).parent.parent.parent / "launcher" / "payload"
NAMES = ("network", "network_node", "network_lanes", "network_work", "network_rank")
DRIVER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import network
stub, argv = sys.argv[2], sys.argv[3:]
print(json.dumps(network.Probe(network.parsed(argv), (sys.executable, stub), argv).run()))
"""
# Tells what it is told to by `--nonce`, a Python expression list of events; then does what follows
# the bar.
STUB = """
import json, os, sys, time
words = sys.argv
events = int(words[words.index("--events") + 1])
say = lambda **what: os.write(events, json.dumps(what).encode() + b"\\n")
exec(words[words.index("--nonce") + 1])
"""


@pytest.fixture(scope="module")
def payload() -> Iterator[SimpleNamespace]:
    """The payload's modules, imported as they are in a container; nothing of them stays behind."""
    sys.path.insert(0, str(FOLDER))
    kept = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    try:
        modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in NAMES}
        yield SimpleNamespace(
            **{name.removeprefix("network_"): module for name, module in modules.items()}
        )
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


class Run:
    """The parent as a process, with stand-ins for its ranks; its standard input is held open."""

    def __init__(self, tmp_path: Path, does: str, *more: str, rank: int = 1) -> None:
        (tmp_path / "stub.py").write_text(STUB)
        argv = [
            "--node",
            ("a", "b")[rank],
            "--node-rank",
            str(rank),
            "--nodes",
            "a=127.0.0.1,b=127.0.0.2",
            "--master",
            "127.0.0.1",
            "--port",
            "1",
            "--backend",
            "nccl",
            "--nonce",
            does,
            "--deadline",
            "20",
            *more,
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(FOLDER), str(tmp_path / "stub.py"), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "TMPDIR": str(tmp_path),
                "NCCL_IB_HCA": "mlx5_0",
                "NCCL_DEBUG_FILE": "/mine",
            },
        )

    def report(self) -> dict[str, Any]:
        """Wait for the end and return the one object it printed."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        out, err = self.process.stdout.read(), self.process.stderr.read()
        for each in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert each is not None
            each.close()
        self.process.wait(20)
        assert err == b""
        found: dict[str, Any] = json.loads(out)
        return found


def until_written(path: Path) -> str:
    """Wait for a file with something in it; at most ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.01)
    raise AssertionError(f"{path} was not written")


def gone(pid: int) -> bool:
    """True as soon as a process is no more; false after ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_what_ranks_tell_becomes_the_report(tmp_path: Path) -> None:
    """Phases, figures, facts and the worst collective, with NCCL's log read back and the folder
    removed.
    """
    does = (
        "local = int(words[words.index('--child') + 1])\n"
        "log = os.environ['NCCL_DEBUG_FILE'].replace('%h', 'h').replace('%p', str(os.getpid()))\n"
        "head = 'NET/IB : Using [0]mlx5_0:1/RoCE\\nnothing\\n'\n"
        "open(log, 'w').write(head + 'Channel 00/1 : 0[0] -> 1[0] [send] via NET/IB/0\\n')\n"
        "say(facts={'gpu': 'H', 'versions': {'torch': '2', 'nccl': '2.27'}})\n"
        "say(log={'peer': 'a', 'start': len(head), 'end': 999})\n"
        "say(transfer={'source': 'a', 'target': 'b', 'local_rank': local, 'bandwidth': 1.0})\n"
        "say(collective={'ranks': 4, 'busbw': 9.0 - local})\n"
        "print('said', local)\n"
        "say(phase='done', done=True)\n"
    )
    report = Run(tmp_path, does, "--ranks-per-node", "2", "--running").report()

    assert [
        (rank["rank"], rank["phase"], rank["ended"], rank["tail"]) for rank in report["ranks"]
    ] == [
        (2, "done", True, "said 0\n"),
        (3, "done", True, "said 1\n"),
    ]
    assert [(each["source"], each["local_rank"]) for each in report["transfers"]] == [
        ("a", 0),
        ("a", 1),
    ]
    assert report["collective"] == {"ranks": 4, "busbw": 8.0}
    assert (report["gpu"], report["inside"]["nccl"], report["inside"]["running"]) == (
        "H",
        "2.27",
        True,
    )
    assert report["env"]["NCCL_DEBUG_FILE"] == "/mine"
    assert report["env"]["NCCL_IB_HCA"] == "mlx5_0"
    assert "nothing" not in report["log"]
    pair = ["Channel 00/1 : 0[0] -> 1[0] [send] via NET/IB/0", "NET/IB : Using [0]mlx5_0:1/RoCE"]
    assert report["pair_logs"] == {"a": "".join(f"{line}\n" for line in pair * 2)}
    assert [path.name for path in tmp_path.iterdir()] == ["stub.py"]


@pytest.mark.parametrize(
    ("does", "error", "words"),
    [
        (
            "say(phase='importing torch'); os.kill(os.getpid(), 11)",
            "ended by signal 11",
            "in phase `importing torch`: ended by",
        ),
        ("sys.exit(3)", "ended with exit code 3", "in phase `starting`: ended with exit code 3"),
        ("say(error='no GPU'); sys.exit(1)", "no GPU", "no GPU"),
        ("say(phase='done', done=True)", "", "did not come to this pair"),
    ],
    ids=["signal", "exit code", "own word", "silent about a peer"],
)
def test_a_direction_that_was_not_measured_says_why(
    tmp_path: Path, does: str, error: str, words: str
) -> None:
    """The node's report has every direction towards it, whatever became of the rank."""
    report = Run(tmp_path, does).report()

    assert report["ranks"][0]["error"] == error
    ((source, target, said),) = [
        (each["source"], each["target"], each["error"]) for each in report["transfers"]
    ]
    assert (source, target) == ("a", "b")
    assert words in said


def test_the_deadline_ends_ranks_and_is_named(tmp_path: Path) -> None:
    """What was told before is kept."""
    does = (
        f"say(phase='all_reduce'); open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()));"
        " time.sleep(60)"
    )
    report = Run(tmp_path, does, "--deadline", "1").report()

    assert report["error"] == "the deadline of 1 s came"
    assert report["ranks"][0]["phase"] == "all_reduce"
    assert (
        report["transfers"][0]["error"] == "rank 1 in phase `all_reduce`: the deadline of 1 s came"
    )
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("how", ["input", "signal"])
def test_nobody_waiting_ends_everything(tmp_path: Path, how: str) -> None:
    """The end of standard input, or SIGTERM: the ranks are gone, and the report says so."""
    does = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    run = Run(tmp_path, does)
    pid = int(until_written(tmp_path / "pid"))
    if how == "input":
        assert run.process.stdin is not None
        run.process.stdin.close()
    else:
        run.process.send_signal(signal.SIGTERM)
    report = run.report()

    assert (
        report["error"]
        == {
            "input": "standard input ended: nobody waits for the answer",
            "signal": "ended by SIGTERM",
        }[how]
    )
    assert gone(pid)


def test_a_taken_port_is_said_at_once(tmp_path: Path) -> None:
    """With who took it, as far as /proc tells; no rank is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        report = Run(tmp_path, "say(phase='never')", "--port", str(port), rank=0).report()

    assert report["error"].startswith(f"port {port} is taken on the head by pid {os.getpid()} (")
    assert report["ranks"][0]["phase"] == "starting"


def test_an_address_of_another_node_is_no_rendezvous(payload: SimpleNamespace) -> None:
    """The head's address must be on the head."""
    with pytest.raises(payload.node.Unusable, match=r"192\.0\.2\.1 is not an address of this node"):
        payload.node.reserve("192.0.2.1", 29577)


def test_the_port_is_reserved_but_refuses_until_the_store_opens(payload: SimpleNamespace) -> None:
    """Nobody can take it meanwhile; who knocks too early is refused, and waits no longer than its
    window.
    """
    with payload.node.reserve("127.0.0.1", 0) as held:
        port = held.getsockname()[1]

        with pytest.raises(
            payload.work.Failed,
            match=f"did not open 127.0.0.1:{port} within 0 s: connection refused",
        ):
            payload.rank.knock("127.0.0.1", port, 0.3)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 31, 32])
def test_every_pair_meets_once_and_nobody_twice_a_round(
    payload: SimpleNamespace, count: int
) -> None:
    """In as few rounds as can be."""
    rounds = payload.rank.tournament(count)
    pairs = [pair for each in rounds for pair in each]

    assert sorted(pairs) == [(low, high) for low in range(count) for high in range(low + 1, count)]
    assert all(len({node for pair in each for node in pair}) == 2 * len(each) for each in rounds)
    assert len(rounds) == (0 if count == 1 else count - 1 + count % 2)


@pytest.mark.parametrize(
    ("backend", "asked", "free", "ranks", "size"),
    [
        ("nccl", 0, 80 << 30, 1, 256 << 20),
        ("gloo", 0, 80 << 30, 8, 64 << 20),
        ("nccl", 5 << 20, 80 << 30, 1, 4 << 20),
        ("nccl", 0, 1 << 30, 2, 64 << 20),
        ("gloo", 0, 0, 1, 8),
    ],
)
def test_the_largest_transfer_fits(
    payload: SimpleNamespace, backend: str, asked: int, free: int, ranks: int, size: int
) -> None:
    """What was asked for, an eighth of the free memory divided by ranks, a power of two, never
    nothing.
    """
    assert payload.lanes.limit(backend, asked, free, ranks) == size


def test_sizes_grow_until_time_or_memory_end_it(payload: SimpleNamespace) -> None:
    """A slow link is measured with little."""
    assert payload.lanes.following(1 << 20, 0.1, 4 << 20) == 2 << 20
    assert payload.lanes.following(1 << 20, 0.2, 4 << 20) == 0
    assert payload.lanes.following(4 << 20, 0.01, 4 << 20) == 0


def test_a_size_is_measured_again_once_it_is_large_enough(payload: SimpleNamespace) -> None:
    """Three times, or once where a transfer takes longer than a second."""
    size, most = 1 << 20, 4 << 20
    assert payload.lanes.next_size(size, [0.1], most) == 2 << 20
    assert payload.lanes.next_size(size, [0.2], most) == size
    assert payload.lanes.next_size(size, [0.2, 0.1], most) == size
    assert payload.lanes.next_size(size, [0.2, 0.1, 0.1], most) == 0
    assert payload.lanes.next_size(size, [1.1], most) == 0
    assert payload.lanes.next_size(most, [0.01], most) == most


def test_capabilities_are_read_by_name(payload: SimpleNamespace) -> None:
    """Docker's default set has no IPC_LOCK; a privileged container has all."""
    docker = payload.node.capabilities("CapEff:\t00000000a80425fb\n")

    assert "NET_RAW" in docker
    assert "IPC_LOCK" not in docker
    assert {"IPC_LOCK", "SYS_PTRACE", "SYS_ADMIN"} <= set(
        payload.node.capabilities("CapEff:\t000001ffffffffff\n")
    )
    assert payload.node.capabilities("") == []


def test_a_long_log_is_cut_at_a_line_and_says_so(payload: SimpleNamespace) -> None:
    """Only telling lines count."""
    line = "gpu1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
    cut = payload.node.capped("NCCL INFO threadThresholds 8/8/64\n" + line * 100, 1000)

    assert len(cut) <= 1000
    assert cut.startswith(line)
    assert cut.endswith("more characters)\n")
    assert set(cut.splitlines(keepends=True)[:-1]) == {line}


def test_gloo_uses_the_named_interface_or_the_node_s_address(
    payload: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that no interface has is said at once, with those that are there."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert payload.lanes.gloo_devices("10.0.0.2") == [{"hostname": "10.0.0.2"}]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert payload.lanes.gloo_devices("10.0.0.2") == [{"interface": "lo"}]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth99")
    with pytest.raises(
        ValueError, match="GLOO_SOCKET_IFNAME names eth99, which is not here: there are lo"
    ):
        payload.lanes.gloo_devices("10.0.0.2")


@pytest.mark.parametrize(
    ("said", "short"),
    [
        (
            (
                "[/pytorch/gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.2]:33."
                " This is typically caused by x"
            ),
            "Connection closed by peer [10.0.0.2]:33",
        ),
        (
            (
                "NCCL error in: NCCLUtils.cpp:94, unhandled system error\nncclSystemError: System"
                " call failed.\nLast error:\nBootstrap : no socket interface found"
            ),
            "Bootstrap : no socket interface found",
        ),
        ("", "ValueError"),
    ],
)
def test_an_exception_is_cut_to_its_telling_line(
    payload: SimpleNamespace, said: str, short: str
) -> None:
    """Without the place in somebody's source; NCCL's last error tells more than its first."""
    assert payload.work.short(ValueError(said)) == short


def test_a_call_that_hangs_is_left_behind(payload: SimpleNamespace) -> None:
    """Its result counts when it comes in time, and so does its error."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))

        assert payload.work.bounded(lambda: 7, 5) == (True, 7, None)
        done, value, error = payload.work.bounded(lambda: int("x"), 5)
        assert (done, value, type(error)) == (True, None, ValueError)
        assert payload.work.bounded(lambda: signal.sigtimedwait([], 0.5), 0.01)[0] is False


def test_nccl_is_called_as_its_group_is_made(payload: SimpleNamespace) -> None:
    """Options with our timeout, lists of tensors, peers and tags; a queue that does not end is a
    timeout, and aborted.
    """
    calls: list[Any] = []

    class Group:
        def __init__(self, *args: Any) -> None:
            calls.append(("group", *args))

        def __getattr__(self, name: str) -> Any:
            return lambda *args: calls.append((name, *args)) or SimpleNamespace(wait=lambda: None)

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def query(self) -> bool:
            return False

        def elapsed_time(self, other: Any) -> float:
            return 2.5

    class Options:
        _timeout: Any = None

    Group.Options = Options  # type: ignore[attr-defined]
    torch = SimpleNamespace(
        distributed=SimpleNamespace(ProcessGroupNCCL=Group), cuda=SimpleNamespace(Event=Event)
    )
    lane = payload.lanes.Nccl(torch, "store", 1, 2, 0.05, "10.0.0.2")
    lane.send("t", 0)
    lane.recv("t", 0)
    lane.reduce("t")
    with pytest.raises(TimeoutError, match="the GPU waited 0 s"):
        lane.settle()
    lane.abort()

    (name, store, rank, size, options), *rest = calls
    assert (name, store, rank, size) == ("group", "store", 1, 2)
    assert options._timeout == datetime.timedelta(seconds=0.05)
    assert rest == [("send", ["t"], 0, 0), ("recv", ["t"], 0, 0), ("allreduce", ["t"]), ("abort",)]
    assert lane.between(lane.mark(), lane.mark()) == 0.0025


def test_the_probe_needs_torch_and_the_standard_library_only() -> None:
    """There is no launcher in the image."""
    import ast

    for file in FOLDER.glob("network*.py"):
        tree = ast.parse(file.read_text())
        names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        names |= {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert {name.split(".")[0] for name in names} <= {*NAMES, "torch", *sys.stdlib_module_names}


def test_a_thread_takes_its_own_gpu(
    payload: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's current device belongs to a thread, and every group is made in a new one."""
    taken: list[int] = []
    torch = SimpleNamespace(cuda=SimpleNamespace(set_device=taken.append))
    store = SimpleNamespace(set_timeout=lambda _: None)
    args = SimpleNamespace(backend="nccl", pair_timeout=5, node_rank=0)
    rank = SimpleNamespace(
        torch=torch, args=args, local=3, ips=["10.0.0.1"], connect=lambda prefix: store
    )
    monkeypatch.setitem(payload.lanes.LANES, "nccl", lambda *given: given[1:])

    assert payload.work.Work(rank).open("pair", 0, 2) == (store, 0, 2, 4, "10.0.0.1")
    assert taken == [3]


def test_a_failed_pair_names_what_was_done_and_with_whom(payload: SimpleNamespace) -> None:
    """A hang, an error of the library, and a word of our own that needs nothing added."""
    rank = SimpleNamespace(
        args=SimpleNamespace(pair_timeout=8), called=lambda ranks: f"rank {ranks[0]} (b)"
    )
    work = payload.work.PairWork(rank, 0, 1, 1)
    work.say("sending")

    assert work.told(None) == "sending, rank 1 (b) on the other side: no end after 8 s"
    assert work.told(OSError("reset")) == "sending, rank 1 (b) on the other side: reset"
    assert work.told(payload.work.Failed("no eth9")) == "no eth9"


def test_a_link_is_never_cut_for_what_every_communicator_repeats(
    payload: SimpleNamespace, tmp_path: Path
) -> None:
    """With many nodes the share of a pair is small, and NCCL tells of its devices again for each of
    them.
    """
    devices = "".join(
        f"n1:7:9 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA {i} 'mlx5_{i}'\n"
        for i in range(8)
    )
    link = "n1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA\n"
    (tmp_path / "nccl.n1.7.log").write_text(devices * 60 + devices + link)
    start = len(devices * 60)
    kept = payload.node.pair_log(str(tmp_path), 7, start, start + len(devices + link), 1500)

    assert kept.startswith(link)
    assert kept.count("GPU Direct RDMA Enabled for HCA 3 ") <= 2
