"""The status table, in a narrow and in a wide terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.app.terminal import show
from launcher.serving.endpoints import Endpoint
from launcher.serving.status import ClusterStatus, NodeStatus, ServerStatus
from launcher.serving.status_view import render_status
from launcher.tools.host import UnfinishedModel
from launcher.tools.servers import shown_state
from tests import golden, supervision

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
        agent="lost",
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
    name="default",
    state="answering",
    backend="ray",
    model="Qwen/Qwen3-0.6B",
    nodes=("gpu01", "gpu02"),
    endpoint="http://10.0.0.11:8000/v1",
    fingerprint="vllm-0.32.0-pp2-abc",
    seconds=0.31,
    kv_tokens=123456,
    concurrency=12.5,
    load=supervision.make_load(running=3, waiting=0, tokens_per_s=0.0),
    observed=supervision.make_record(),
    age=1.7,
)
BUSY = replace(
    ANSWERING,
    name="chat",
    state="busy",
    load=supervision.make_load(),
    observed=supervision.make_record("chat", asking=84.3),
)
FAULT = supervision.make_fault(evidence="Worker died\n\nmore\nmost", lost=12)
AGAIN = supervision.make_record(
    state="pausing",
    doing="starts it again in 40 s",
    fault_count=4,
    faults=[FAULT],
    restarts=[1.0, 2.0, 3.0],
    next_start=supervision.AT + 42,
)


def make_status(state: str, **fields: Any) -> ServerStatus:
    """Return a server of one node, with what the terminal is to show of it."""
    return ServerStatus(
        **{
            "name": "default",
            "state": state,
            "backend": "ray",
            "model": "m",
            "nodes": ("gpu01",),
            **fields,
        }
    )


def drawn(
    width: int,
    *,
    nodes: tuple[NodeStatus, ...] = NODES,
    servers: tuple[ServerStatus, ...] = (ANSWERING,),
) -> str:
    """Render a status as a console of this width prints it, without colour."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    status = ClusterStatus(
        cluster="h100", nodes=nodes, servers=servers, endpoint="http://10.0.0.11:8000/v1"
    )
    show(render_status(status), console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_certificates_that_expire_soon_have_a_line() -> None:
    """The warning is shown unchanged."""
    warning = "the agents' certificates expire on 2032-02-28; run `vlaunch up` to renew them"
    status = ClusterStatus(cluster="c", nodes=NODES, endpoint="", certificates=warning)
    console = Console(file=io.StringIO(), width=100, color_system=None, highlight=False)
    show(render_status(status), console)
    assert isinstance(console.file, io.StringIO)

    assert warning in console.file.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_the_table(width: int) -> None:
    """Nothing is lost in a narrow terminal, and remarks are folded."""
    text = drawn(width)

    assert all(len(line) <= width for line in text.splitlines())
    golden.check(GOLDEN / f"status-{width}.txt", text)


@pytest.mark.parametrize(
    "server",
    [
        make_status("starting", backend="mp"),
        make_status("waiting", detail="waiting for gpu02 to be in Ray"),
        make_status("stopping", backend="", nodes=()),
        make_status("failed", detail="exit code 1"),
        make_status(
            "suspect",
            detail="no completion: timed out; nothing has moved for 42 s",
            observed=supervision.make_record(still=42.0),
            age=0.4,
        ),
        ServerStatus(name="", state="unknown", detail="the head is unreachable"),
        make_status("recovering", detail="starts it again in 40 s", observed=AGAIN, age=2.0),
        make_status(
            "gave-up",
            detail="restart limit of 1 reached in 1 h",
            observed=replace(
                AGAIN,
                state="gave-up",
                next_start=None,
                restarts=[1.0],
                restarts_left=0,
                faults=[
                    FAULT,
                    supervision.make_fault(
                        rank="", evidence="", cause="", lost=None, ready_again_after=71.2
                    ),
                ],
            ),
            age=3.0,
        ),
        replace(ANSWERING, warning="2 canaries were refused with HTTP 500"),
        BUSY,
    ],
    ids=lambda server: server.state,
)
def test_the_servers_line(server: ServerStatus) -> None:
    """The state is a word, and its reason stands beside it."""
    golden.check(
        GOLDEN / f"server-{server.state}.txt",
        drawn(100, nodes=(), servers=(server,)).split("\n", 2)[2],
    )


def test_every_endpoint_has_a_line() -> None:
    """The line has its URL, state and reason; while they start, they have the server's state."""
    good = Endpoint(node="gpu01", url="http://10.0.0.11:8000/v1", state="answering")
    dead = Endpoint(
        node="gpu02",
        url="http://10.0.0.12:8000/v1",
        state="suspect",
        detail="no completion: Connection refused",
    )
    apart = replace(
        ANSWERING,
        backend="mp",
        state="suspect",
        detail="gpu02: no completion: Connection refused",
        endpoints=(replace(good, seconds=0.31), dead),
    )
    text = drawn(100, nodes=(), servers=(apart,)).split("\n", 2)[2]

    golden.check(GOLDEN / "server-endpoints.txt", text)
    again = replace(apart, state="recovering", detail="starting the engine")
    assert "8000" not in drawn(100, nodes=(), servers=(again,))


def test_a_container_with_every_right_is_named() -> None:
    """With what it means, nodes of which it is true together."""
    nodes = tuple(replace(node, privileged=True) for node in NODES[:2])

    assert "  gpu[01-02]: its container is privileged: its root is root on the node\n" in drawn(
        200, nodes=nodes
    )


def test_what_engines_compiled_is_shown_with_its_size() -> None:
    """Nodes with as much of it together; nothing where it is not worth a word."""
    sizes = (1 << 30, (1 << 30) + 4096, 340 << 20, 4096)
    nodes = tuple(replace(node, compiled=size) for node, size in zip(NODES, sizes, strict=True))

    assert "\ncompiled: 1.0 GiB on gpu[01-02], 340 MiB on gpu03\n" in drawn(200, nodes=nodes)
    assert "compiled" not in drawn(200)


def test_models_that_are_not_finished_are_named() -> None:
    """With what goes on with them, nodes of which it is true together."""
    unfinished = UnfinishedModel(kind="copy", model="org/m", bytes=5 << 20)
    nodes = tuple(replace(node, unfinished=(unfinished,)) for node in NODES[:2])

    assert "  gpu[01-02]: a copy of org/m is incomplete, 5 MiB so far: `vlaunch model" in drawn(
        200, nodes=nodes
    )


def test_no_server_is_reported() -> None:
    """In the words of old."""
    assert "server: none" in drawn(80, servers=())


def test_several_servers_have_their_names() -> None:
    """One that was given no name too; alone it needs none."""
    lines = drawn(200, servers=(ANSWERING, BUSY)).splitlines()

    assert [line.partition(":")[0] for line in lines if line.startswith("server")] == [
        "server default",
        "server chat",
    ]
    assert drawn(200).count("server default") == 0


@pytest.mark.parametrize(
    ("server", "colour"),
    [
        (BUSY, "green"),
        (replace(BUSY, warning="x"), "yellow"),
        (make_status("waiting"), "yellow"),
        (make_status("suspect"), "red"),
    ],
)
def test_a_state_has_a_colour(server: ServerStatus, colour: str) -> None:
    """A loaded server is green, a doubtful one yellow, a dead one red."""
    codes = {"green": "\x1b[32m", "yellow": "\x1b[33m", "red": "\x1b[31m"}
    console = Console(
        file=io.StringIO(), width=200, force_terminal=True, color_system="standard", highlight=False
    )
    console.print(
        render_status(ClusterStatus(cluster="c", nodes=(), servers=(server,), endpoint=""))
    )

    assert f"{codes[colour]}{shown_state(server.state)}" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("at", [-1.0, 253402300800.0, 2.0**61])
def test_a_fault_at_no_date_can_be_shown(at: float) -> None:
    """A number that is no moment would end the command, where it is turned into one."""
    assert "last of 4 faults at " in drawn(
        200,
        servers=(
            make_status(
                "failed", observed=replace(AGAIN, faults=[supervision.make_fault(at=at)]), age=1.0
            ),
        ),
    )


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
    fault = supervision.make_fault(at=0.0, what=bad, cause=bad, node=bad, rank=bad, evidence=bad)
    record = supervision.make_record(bad, doing=bad, warning=bad, faults=[fault], fault_count=1)
    for state in ("answering", "busy", "failed"):
        server = make_status(
            state,
            name=bad,
            backend=bad,
            model=bad,
            endpoint=bad,
            detail=bad,
            warning=bad,
            fingerprint=bad,
            observed=record,
            age=1.0,
        )
        assert not {"\x1b", "\x07", "\x9b"} & set(drawn(300, nodes=(node,), servers=(server,)))


def test_an_empty_or_blank_trouble_is_no_error() -> None:
    """Any text renders as a table."""
    node = NodeStatus(node="a", role="head", ip="10.0.0.1", container="unknown", trouble="\n")

    assert "unknown" in drawn(80, nodes=(node,))


def test_what_a_model_gave_that_does_not_generate() -> None:
    """Stands where a completion has its fingerprint."""
    embeds = replace(ANSWERING, fingerprint="", came="an embedding of 128 numbers", load=None)

    assert "an embedding of 128 numbers, answered in 0.3s" in drawn(200, servers=(embeds,))
