"""The status table, in a narrow and in a wide terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from launcher.plan.status import ClusterStatus, NodeStatus, ServerStatus
from launcher.plan.supervised import Fault, Supervision
from launcher.ui.status import render
from tests import golden

GOLDEN = Path(__file__).parent / "golden"
IMAGE = "vlaunch/ray:2.60.0-0123456789ab"
NODES = (
    NodeStatus(
        node="gpu01",
        role="head",
        ip="10.0.0.11",
        container="running",
        image=IMAGE,
        ray="alive",
        gpus="8/8",
        ranks=("TP0 PP0", "TP1 PP0"),
    ),
    NodeStatus(
        node="gpu02",
        role="worker",
        ip="10.0.0.12",
        container="running",
        image=IMAGE,
        ray="alive",
        gpus="8/8",
        drift=("env OMP_NUM_THREADS: 1 → 2", "command: 8 → 4"),
    ),
    NodeStatus(
        node="gpu03",
        role="worker",
        ip="10.0.0.13",
        container="running",
        ray="dead",
        gpus="8/8",
        drift=("env OMP_NUM_THREADS: 1 → 2",),
    ),
    NodeStatus(
        node="gpu04.rack7.example",
        role="worker",
        ip="10.0.0.14",
        container="unknown",
        trouble="cannot be reached: timed out\nmore",
    ),
)
ANSWERING = ServerStatus(
    state="answering",
    backend="ray",
    model="Qwen/Qwen3-0.6B",
    fingerprint="vllm-0.32.0-pp2-abc",
    seconds=0.31,
    kv_tokens=123456,
    concurrency=12.5,
)


FAULT = Fault(
    at=1_700_000_000.0, what="a rank is dead", node="gpu02", rank="PP1", evidence=("Worker died", "more", "most"), lost=4
)
SUPERVISION = Supervision(id="1", state="recovering", restarts_left=2, faults=2, fault=FAULT)


def drawn(width: int, *, nodes: tuple[NodeStatus, ...] = NODES, server: ServerStatus = ANSWERING) -> str:
    """Render a status as a console of this width prints it, without colour."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    console.print(render(ClusterStatus(cluster="h100", nodes=nodes, server=server, endpoint="http://10.0.0.11:8000/v1")))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_the_table(width: int) -> None:
    """Nothing is lost in a narrow terminal, and remarks are folded."""
    text = drawn(width)

    assert all(len(line) <= width for line in text.splitlines())
    golden.check(GOLDEN / f"status-{width}.txt", text)


@pytest.mark.parametrize(
    "server",
    [
        ServerStatus(state="none"),
        ServerStatus(state="starting", backend="mp", model="m"),
        ServerStatus(state="failed", backend="ray", model="m", detail="exit code 1"),
        ServerStatus(state="silent", backend="ray", model="m", detail="/health says 200, no completion: no"),
        ServerStatus(state="unknown", detail="the head cannot be reached"),
        ServerStatus(
            state="recovering", backend="ray", model="m", detail="waiting for gpu02 to be in Ray again", supervision=SUPERVISION
        ),
        ServerStatus(
            state="gave-up",
            backend="ray",
            model="m",
            detail="no restart is left of 1 in 1 h",
            supervision=replace(SUPERVISION, restarts_left=1, fault=replace(FAULT, ready_again_after=71.2, lost=1)),
        ),
    ],
    ids=lambda server: server.state,
)
def test_the_servers_line(server: ServerStatus) -> None:
    """The state is a word, and its reason stands beside it."""
    golden.check(GOLDEN / f"server-{server.state}.txt", drawn(100, nodes=(), server=server).split("\n", 2)[2])


def test_what_nodes_say_cannot_draw_on_the_terminal() -> None:
    """Everything that was read from a node may hold escape sequences."""
    bad = "\x1b[31mred\x1b]0;title\x07\x9b2J"
    node = NodeStatus(
        node="a",
        role="head",
        ip="10.0.0.1",
        container=bad,
        image=bad,
        ray="alive",
        gpus=bad,
        ranks=(bad,),
        drift=(bad,),
        trouble=bad,
    )
    states = ("answering", "failed")
    fault = Fault(at=0, what=bad, node=bad, rank=bad, evidence=(bad,))
    kept = Supervision(id=bad, state=bad, fault=fault)
    servers = [
        ServerStatus(state=state, backend="ray", model=bad, detail=bad, fingerprint=bad, supervision=kept) for state in states
    ]  # type: ignore[arg-type]

    for server in servers:
        assert not {"\x1b", "\x07", "\x9b"} & set(drawn(300, nodes=(node,), server=server))


def test_an_empty_trouble_or_a_blank_one_is_no_error() -> None:
    """Whatever the words were, there is a table."""
    node = NodeStatus(node="a", role="head", ip="10.0.0.1", container="unknown", trouble="\n")

    assert "unknown" in drawn(80, nodes=(node,))
