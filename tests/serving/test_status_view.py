"""The status table, in a narrow and in a wide terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.app.terminal import show
from launcher.front.state import FrontState
from launcher.serving.endpoints import Endpoint
from launcher.serving.status import ClusterStatus, NodeStatus, ServerStatus
from launcher.serving.status_view import render_status
from launcher.tools.host import UnfinishedModel
from launcher.tools.site.servers import shown_state
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
    """Return a server of one node, with some fields."""
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
    """Return a status as printed on a console of some width, without colour."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    status = ClusterStatus(
        cluster="h100", nodes=nodes, servers=servers, endpoint="http://10.0.0.11:8000/v1"
    )
    show(render_status(status), console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_expiring_certificates_have_a_line() -> None:
    """With the unchanged warning."""
    warning = "the agents' certificates expire on 2032-02-28; run `vlaunch up` to renew them"
    status = ClusterStatus(cluster="c", nodes=NODES, endpoint="", certificates=warning)
    console = Console(file=io.StringIO(), width=100, color_system=None, highlight=False)
    show(render_status(status), console)
    assert isinstance(console.file, io.StringIO)

    assert warning in console.file.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_the_table(width: int) -> None:
    """Complete in a narrow terminal, with folded remarks."""
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
    """The state with its reason."""
    golden.check(
        GOLDEN / f"server-{server.state}.txt",
        drawn(100, nodes=(), servers=(server,)).split("\n", 2)[2],
    )


def test_a_replica_out_of_rotation_is_named() -> None:
    """While others are ready."""
    text = "out of rotation: other replicas get new requests"
    assert text not in drawn(200)
    record = supervision.make_record("chat", drained=True)
    assert text in drawn(200, servers=(ANSWERING, replace(BUSY, observed=record)))


def test_every_endpoint_has_a_line() -> None:
    """With URL, state and reason; during the start, with the server's state."""
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


def test_privileged_containers_are_named() -> None:
    """With the consequence; nodes are folded."""
    nodes = tuple(replace(node, privileged=True) for node in NODES[:2])

    assert "  gpu[01-02]: its container is privileged: its root is root on the node\n" in drawn(
        200, nodes=nodes
    )


def test_an_agent_of_another_version_is_named() -> None:
    """With the commands that replace it."""
    nodes = tuple(replace(node, old_agent=True) for node in NODES[:2])

    assert (
        "  gpu[01-02]: its agent runs another version of vlaunch; to replace it, run `vlaunch"
        " down`, then `vlaunch up`: this stops all servers\n"
    ) in drawn(200, nodes=nodes)


def test_the_compile_cache_is_shown_with_its_size() -> None:
    """Nodes with as much of it together; nothing where it is not worth a word."""
    sizes = (1 << 30, (1 << 30) + 4096, 340 << 20, 4096)
    nodes = tuple(replace(node, compiled=size) for node, size in zip(NODES, sizes, strict=True))

    assert "\ncompiled: 1.0 GiB on gpu[01-02], 340 MiB on gpu03\n" in drawn(200, nodes=nodes)
    assert "compiled" not in drawn(200)


def test_incomplete_models_are_named() -> None:
    """With their progress; nodes are folded."""
    unfinished = UnfinishedModel(kind="copy", model="org/m", bytes=5 << 20)
    nodes = tuple(replace(node, unfinished=(unfinished,)) for node in NODES[:2])

    assert "  gpu[01-02]: a copy of org/m is incomplete, 5 MiB so far: `vlaunch model" in drawn(
        200, nodes=nodes
    )


def test_no_server_is_reported() -> None:
    """In the unchanged format."""
    assert "server: none" in drawn(80, servers=())


def test_several_servers_have_their_names() -> None:
    """Including the default one, which has no name when alone."""
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
def test_a_fault_at_an_impossible_date(at: float) -> None:
    """The conversion of its time must not fail."""
    assert "last of 4 faults at " in drawn(
        200,
        servers=(
            make_status(
                "failed", observed=replace(AGAIN, faults=[supervision.make_fault(at=at)]), age=1.0
            ),
        ),
    )


def test_the_table_is_sanitized() -> None:
    """Everything from a node may contain escape sequences."""
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


def test_an_empty_reason_is_no_error() -> None:
    """Any text renders as a table."""
    node = NodeStatus(node="a", role="head", ip="10.0.0.1", container="unknown", trouble="\n")

    assert "unknown" in drawn(80, nodes=(node,))


def test_answers_of_pooling_models() -> None:
    """In place of a completion's fingerprint."""
    embeds = replace(ANSWERING, fingerprint="", came="an embedding of 128 numbers", load=None)

    assert "an embedding of 128 numbers, answered in 0.3s" in drawn(200, servers=(embeds,))


def test_replicas_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Above their own lines, with the address of all."""
    one = replace(ANSWERING, name="chat")
    two = replace(ANSWERING, name="chat.2", state="starting", detail="loading")
    front = FrontState(url="https://models:8443/NAME/v1", nodes={"gpu01": "running"})
    status = ClusterStatus(
        cluster="c", nodes=(), servers=(one, two), endpoint=one.endpoint, front=front
    )
    show(render_status(status))
    lines = capsys.readouterr().out.splitlines()

    assert "replicas of chat: 1 of 2 ready  https://models:8443/chat/v1" in lines
