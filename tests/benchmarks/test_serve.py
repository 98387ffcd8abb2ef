"""The parts of the benchmark of `serve` that need no cluster: what is typed by hand, how it is
ended, and the report.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import serve
from benchmarks.client import Endpoint
from benchmarks.faults.testbed import wait_until
from benchmarks.serve import Bench, Row
from launcher.agent import desired
from launcher.agent.desired import ProcessSpec
from launcher.inventory.load import loads

INVENTORY = loads(
    "cluster: c\nimage: i\ndocker: [sudo, -n, docker]\n"
    "nodes: [{host: n1, ip: 10.0.0.1, gpus: 8}, {host: n2, ip: 10.0.0.2, gpus: 8}]\n",
    Path("inventory.yaml"),
)


def test_by_hand_is_what_the_keeper_starts() -> None:
    """The same words with the same variables in the same container, and secrets by the same first
    program.
    """
    argv = ("vllm", "serve", "it's", "--headless")
    process = ProcessSpec(node="n2", argv=argv, env={"B": "two words", "A": "1"}, gpus=(4, 5))
    want = desired.Desired(
        name="bench",
        id="1",
        model="m",
        backend="mp",
        processes=(process,),
        host="0.0.0.0",
        port=8000,
        places={"n2": 2},
        visible="CUDA_VISIBLE_DEVICES",
    )
    bench = Bench(inventory=INVENTORY, backend="mp", spec=want, target=Endpoint(url="", model=""))
    first, line = serve.node_command(bench, process).split("; ", 1)
    command = shlex.split(line)

    assert (first, command[-3:]) == ("date +%s.%N", ["&&", "date", "+%s.%N"])
    assert command[:5] == ["sudo", "-n", "docker", "exec", "--detach"]
    env_options = command[5 : command.index("vlaunch-c-n2")]
    assert env_options == [
        "--env",
        "A=1",
        "--env",
        "B=two words",
        "--env",
        "CUDA_VISIBLE_DEVICES=4,5",
    ]
    assert command[command.index("/opt/vlaunch/entry.sh") + 1 : -3] == list(argv)


def test_what_was_typed_by_hand_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """Politely, and then its whole session; nothing else."""
    enter, stop = (
        text.replace(serve._BY_HAND, str(tmp_path / "it")) for text in (serve._ENTER, serve._STOP)
    )
    log = tmp_path / "it.log"
    started = "sleep 61.5 & trap 'exit 3' TERM; echo ready; wait"
    with (
        subprocess.Popen(["sleep", "61"]) as other,
        subprocess.Popen(["setsid", "sh", "-c", enter, "enter", "sh", "-c", started]) as entered,
    ):
        assert wait_until(lambda: log.exists() and "ready" in log.read_text(), 20)
        assert (tmp_path / "it.pid").read_text() == f"{entered.pid}\n"
        subprocess.run([sys.executable, "-c", stop], check=True, timeout=50)
        listing = subprocess.run(
            ["ps", "--no-headers", "-o", "stat", "-s", str(entered.pid)],
            capture_output=True,
            text=True,
            check=False,
        )

        assert entered.wait(60) == 3
        assert [line for line in listing.stdout.split() if not line.startswith("Z")] == []
        assert other.poll() is None
        other.kill()


def test_a_process_is_killed_by_its_title() -> None:
    """The first that begins so; none is an error."""
    kill = (sys.executable, "-c", serve._KILL)
    with subprocess.Popen(["sleep", "61.25"]) as child:
        subprocess.run([*kill, "sleep 61.25"], check=True, timeout=20)
        assert child.wait(60) == -9
    none = subprocess.run(
        [*kill, "sleep 61.25"], capture_output=True, text=True, timeout=20, check=False
    )

    assert (none.returncode, none.stderr) == (1, "no process `sleep 61.25`\n")


def test_the_cost_of_a_process() -> None:
    """Seconds of CPU and bytes of memory, here of this machine's first process."""
    output = subprocess.run(
        [sys.executable, "-c", serve._COST], capture_output=True, text=True, timeout=20, check=True
    ).stdout
    seconds, memory = map(float, output.split())

    assert seconds >= 0
    assert memory >= 0


def test_the_stand_ins_are_servers_that_the_keeper_can_read() -> None:
    """Each is one process on the head, at a port of its own."""
    server = serve.stand_in_spec("bench-1", INVENTORY.head, 8102)

    assert desired.parse_spec(json.loads(json.dumps(server.as_json()))) == server
    assert (server.api_node, server.port, server.places, server.ray) == ("n1", 8102, {}, None)


@pytest.mark.parametrize(
    ("output", "gpus"),
    [
        ("Usage:\n 1.0/4.0 CPU\n 2.0/2.0 GPU\n", 2.0),
        ("0.0/2.0 GPU", 0.0),
        ("", None),
        ("no status", None),
    ],
)
def test_gpus_that_are_taken_in_ray(output: str, gpus: float | None) -> None:
    """None where Ray does not say: that is not free."""
    assert serve.gpus_in_use(output) == gpus


def test_a_ratio_is_of_the_same_round() -> None:
    """And the median of them: a round in which the machine was busy with something else does not
    count.
    """
    assert serve.ratio([10.0, 40.0, 11.0], [10.0, 20.0, 10.0]) == pytest.approx(1.1)


def test_the_report() -> None:
    """Seconds with their ratio, figures without seconds, and what has no goal."""
    rows = [
        Row(what="by hand", seconds=[20.0, 22.0, 18.0]),
        Row(what="vlaunch", seconds=[21.0], ratio=1.06, goal=1.05),
        Row(what="keeper", seconds=(), ratio=0.002, goal=0.01),
        Row(what="memory", seconds=(), ratio=30e6, goal=50e6),
    ]

    assert serve.report(rows).splitlines()[2:] == [
        "| by hand | 20.0 | 18.0–22.0 |  |   |",
        "| vlaunch | 21.0 | 21.0–21.0 | 1.06× | ≤ 1.05× missed |",
        "| keeper |  |  |  | < 1% of a core met |",
        "| memory |  |  |  | < 50 MB met |",
    ]
    assert [row.met for row in rows] == [True, False, True, True]
