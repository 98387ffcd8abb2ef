"""The network probe's parent, with fake ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.network.probe.conftest import PATH
from tests.ports import free_port

pytestmark = pytest.mark.processes

DRIVER = """
import json, sys
sys.path[:0] = sys.argv[1].split(':')
import network
stub, argv = sys.argv[2], sys.argv[3:]
probe = network.NodeProbe(network.parse_args(argv), (sys.executable, stub), argv, "")
print(json.dumps(probe.run()))
"""
# Reports the events in `--nonce`, a Python list, then performs the action after the bar.
STUB = """
import json, os, sys, time
words = sys.argv
events = int(words[words.index("--events") + 1])
say = lambda **what: os.write(events, json.dumps(what).encode() + b"\\n")
exec(words[words.index("--nonce") + 1])
"""


class Run:
    """The parent as a process, with fake ranks; its standard input stays open."""

    def __init__(self, tmp_path: Path, does: str, *args: str, rank: int = 1) -> None:
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
            *args,
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, PATH, str(tmp_path / "stub.py"), *argv],
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
        """Wait for the exit and return the printed report."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        out, err = self.process.stdout.read(), self.process.stderr.read()
        for item in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert item is not None
            item.close()
        self.process.wait(60)
        assert err == b""
        payload: dict[str, Any] = json.loads(out)
        return payload


def until_written(path: Path) -> str:
    """Wait for a file with content; at most a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.01)
    raise AssertionError(f"{path} was not written")


def gone(pid: int) -> bool:
    """Return whether a process exits within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_the_report(tmp_path: Path) -> None:
    """Phases, figures, facts and the worst collective, with NCCL's log; the folder is removed."""
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
    report = Run(tmp_path, does, "--ranks-per-node", "2").report()

    assert [
        (rank["rank"], rank["phase"], rank["ended"], rank["tail"]) for rank in report["ranks"]
    ] == [
        (2, "done", True, "said 0\n"),
        (3, "done", True, "said 1\n"),
    ]
    assert [(transfer["source"], transfer["local_rank"]) for transfer in report["transfers"]] == [
        ("a", 0),
        ("a", 1),
    ]
    assert report["collective"] == {"ranks": 4, "busbw": 8.0}
    assert (report["gpu"], report["versions"]) == ("H", {"torch": "2", "nccl": "2.27"})
    assert report["infiniband"] == []
    assert report["memlock"] is None or report["memlock"] > 0
    assert report["env"]["NCCL_DEBUG_FILE"] == "/mine"
    assert report["env"]["NCCL_IB_HCA"] == "mlx5_0"
    assert "nothing" not in report["log"]
    pair = ["Channel 00/1 : 0[0] -> 1[0] [send] via NET/IB/0", "NET/IB : Using [0]mlx5_0:1/RoCE"]
    assert report["pair_logs"] == {"a": "".join(f"{line}\n" for line in pair * 2)}
    assert [path.name for path in tmp_path.iterdir()] == ["stub.py"]


@pytest.mark.parametrize(
    ("does", "error", "text"),
    [
        (
            "say(phase='importing torch'); os.kill(os.getpid(), 11)",
            "ended by signal 11",
            "in phase `importing torch`: ended by",
        ),
        ("sys.exit(3)", "ended with exit code 3", "in phase `starting`: ended with exit code 3"),
        ("say(error='no GPU'); sys.exit(1)", "no GPU", "no GPU"),
        ("say(phase='done', done=True)", "", "this pair was not reached"),
    ],
    ids=["signal", "exit code", "own word", "silent about a peer"],
)
def test_an_unmeasured_direction_has_a_reason(
    tmp_path: Path, does: str, error: str, text: str
) -> None:
    """The report has every direction towards its node, whatever became of the rank."""
    report = Run(tmp_path, does, "--reach", "0.3").report()

    assert report["ranks"][0]["error"] == error
    ((source, target, output),) = [
        (transfer["source"], transfer["target"], transfer["error"])
        for transfer in report["transfers"]
    ]
    assert (source, target) == ("a", "b")
    assert text in output


def test_the_deadline_stops_ranks(tmp_path: Path) -> None:
    """It is named, and earlier results stay in the report."""
    does = (
        f"say(phase='all_reduce'); open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()));"
        " time.sleep(60)"
    )
    report = Run(tmp_path, does, "--deadline", "1").report()

    assert report["error"] == "the deadline of 1 s passed"
    assert report["ranks"][0]["phase"] == "all_reduce"
    assert (
        report["transfers"][0]["error"]
        == "rank 1 in phase `all_reduce`: the deadline of 1 s passed"
    )
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("how", ["input", "signal"])
def test_a_cancelled_launcher_stops_everything(tmp_path: Path, how: str) -> None:
    """By the end of standard input, or SIGTERM: the ranks exit, and the report has the reason."""
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
            "input": "standard input closed: vlaunch no longer waits for the report",
            "signal": "ended by SIGTERM",
        }[how]
    )
    assert gone(pid)


def test_a_used_port_is_reported_at_once(tmp_path: Path) -> None:
    """No rank is started."""
    with socket.socket() as claimed:
        claimed.bind(("127.0.0.1", 0))
        claimed.listen()
        port = claimed.getsockname()[1]
        report = Run(tmp_path, "say(phase='never')", "--port", str(port), rank=0).report()

    assert report["error"] == f"port {port} is taken on the head"
    assert report["ranks"][0]["phase"] == "starting"


def test_ranks_wait_for_their_release(tmp_path: Path) -> None:
    """A rank with torch is released if it has no other to wait for; the report has the duration."""
    does = (
        "say(ready=True, took={'torch': 2.5}); word = sys.stdin.readline()\n"
        "say(took={'meeting': 0.5}, phase=word.strip(), done=True)"
    )
    port = free_port()
    run = Run(tmp_path, does, "--port", str(port), "--nodes", "a=127.0.0.1", rank=0)
    (rank,) = run.report()["ranks"]

    assert (rank["phase"], rank["ended"]) == ("go", True)
    assert (rank["torch"], rank["meeting"]) == (2.5, 0.5)


def test_ranks_get_the_reason_of_a_failed_start(tmp_path: Path) -> None:
    """The head's port stays closed."""
    does = "say(ready=True); say(error=sys.stdin.readline().strip())"
    report = Run(tmp_path, does, "--reach", "0.3").report()

    assert report["ranks"][0]["error"] == (
        "no the head did not open 127.0.0.1:1 within 0 s: connection refused"
    )


DEATH = """
rank = words[words.index('--node') + 1] + words[words.index('--child') + 1]
kill = lambda moment: (rank, moment) == ({rank!r}, {moment!r}) and os.kill(os.getpid(), 9)
kill('at once')
say(phase='torch', ready=True)
kill('with torch')
word = sys.stdin.readline()
kill('released')
if word == 'go\\n':
    word = sys.stdin.readline()
say(phase=word.strip(), took={{'meeting': 0.1}}, done=True)
"""


@pytest.mark.parametrize("moment", ["at once", "with torch", "released"])
@pytest.mark.parametrize("node", ["a", "b"])
@pytest.mark.parametrize("per_node", [1, 2])
def test_a_killed_rank_stops_its_node(
    tmp_path: Path, per_node: int, node: str, moment: str
) -> None:
    """Long before the deadline: the other rank of its node stops, the head continues without that
    node, and no node continues without the head.
    """
    script = tmp_path / "does"
    script.write_text(DEATH.format(rank=f"{node}0", moment=moment))
    port = free_port()
    options = ("--port", str(port), "--ranks-per-node", str(per_node), "--deadline", "50")
    runs = [Run(tmp_path, f"exec(open({str(script)!r}).read())", *options, rank=i) for i in (0, 1)]
    reports = [run.report() for run in runs]

    ranks = [rank for report in reports for rank in report["ranks"]]
    killed = ranks.pop(("a", "b").index(node) * per_node)
    assert (killed["exit"], killed["error"]) == (-9, "ended by signal 9")
    stopped = [f"no stopped: rank {killed['rank']} ({node}) ended"] * (per_node - 1)
    if node == "b":  # the head may have released it before it knows
        mapping = {"at once": ["go b"], "with torch": ["go b", "lost b"], "released": ["lost b"]}
        expected = [[*[label] * per_node, *stopped] for label in mapping[moment]]
    else:
        head = f"no stopped: the head's probe at 127.0.0.1:{port} ended before all ranks had met"
        expected = [[*stopped, *[f"{head}: rank 0 (a) ended"] * per_node]]
    assert [rank["phase"] for rank in ranks] in expected
    assert [report["error"] for report in reports] == ["", ""]


def test_name_servers_have_a_short_timeout(payload: SimpleNamespace) -> None:
    """Other resolver options stay."""
    env = payload.network.rank_environment({"RES_OPTIONS": "rotate", "A": "1"}, "/tmp/x")

    assert (env["RES_OPTIONS"], env["A"]) == ("rotate timeout:1 attempts:1", "1")
