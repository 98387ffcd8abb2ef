"""Places of replicas: spread over nodes, stable, and rejected with the sum if they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from launcher.core.domain import Inventory, ServeDefaults, ServerSpec
from launcher.core.errors import PlacementError, RequestError
from launcher.serving.replicas import choose_numbers, list_members, place_replicas
from launcher.tools.site import Site
from launcher.tools.site.snapshot import ClusterSnapshot
from tests.served import INVENTORY, make_snapshot, request, server_row, uneven


def spec(backend: Any = "mp", **changes: Any) -> ServerSpec:
    values = {"name": "chat", "model": "org/m", "host": "0.0.0.0", "port": 8000, **changes}
    return ServerSpec(backend=backend, **values)


def snapshot(*servers: Any, inventory: Inventory = INVENTORY) -> ClusterSnapshot:
    found = make_snapshot(*servers)
    return replace(found, site=Site(inventory, found.site.facts))


def places(
    numbers: Sequence[int] = (1, 2), *servers: Any, inventory: Inventory = INVENTORY, **changes: Any
) -> list[tuple[str, int, str, int | None]]:
    """Return name, port, nodes and GPUs per node of each replica."""
    placed = place_replicas(spec(**changes), numbers, snapshot(*servers, inventory=inventory))
    return [(p.name, p.port, " ".join(p.nodes), p.gpus) for p in placed]


def test_replicas_are_spread_over_nodes() -> None:
    """Nodes with the fewest replicas come first, then those with the most free GPUs."""
    assert places((1, 2, 3), tp=2) == [
        ("chat", 8000, "n1", 2),
        ("chat.2", 8001, "n2", 2),
        ("chat.3", 8002, "n1", 2),
    ]
    other = server_row(request("mp", tp=1, pp=1, nodes=("n1",), gpus=1, name="x", port=9000))
    assert [place[2] for place in places((1, 2), other, tp=2)] == ["n2", "n1"]
    assert [place[2] for place in places((1, 2), tp=2, nodes=("n2",))] == ["n2", "n2"]


def test_a_replica_may_span_nodes() -> None:
    """As few nodes as possible, with equal numbers of GPUs."""
    four = uneven(4, 4, 4, 4)
    assert places(inventory=four, tp=4, pp=2) == [
        ("chat", 8000, "n1 n2", 4),
        ("chat.2", 8001, "n3 n4", 4),
    ]
    assert places(inventory=four, tp=2, pp=2, gpus=2) == [
        ("chat", 8000, "n1 n2", 2),
        ("chat.2", 8001, "n3 n4", 2),
    ]


@pytest.mark.parametrize(
    ("gpus", "count", "tp", "pp"),
    [((8, 8), 2, 8, 1), ((8, 8), 4, 4, 1), ((8, 8), 3, 4, 1), ((8, 8, 8, 8), 2, 8, 2)],
)
def test_the_default_layout_is_a_share(gpus: tuple[int, ...], count: int, tp: int, pp: int) -> None:
    """Each replica gets whole nodes, or a part of one."""
    found = snapshot(inventory=uneven(*gpus))
    placed = place_replicas(spec(), range(1, count + 1), found)

    assert {(p.tp, p.pp, p.dp) for p in placed} == {(tp, pp, 1)}


def test_ray_chooses_the_places() -> None:
    """Only ports differ; the sizes of the inventory count."""
    inventory = replace(INVENTORY, serve=ServeDefaults(tp=2, pp=1))
    assert places(backend="ray", inventory=inventory) == [
        ("chat", 8000, "", None),
        ("chat.2", 8001, "", None),
    ]


def test_replicas_that_exist_stay() -> None:
    """Whatever their order or their nodes, as long as their layout is the same."""
    first = server_row(request("mp", tp=2, pp=1, name="chat"))
    second = server_row(request("mp", tp=2, pp=1, nodes=("n1",), gpus=2, name="chat.2", port=8001))

    assert places((1, 2, 3), first, second, tp=2) == [
        ("chat", 8000, "", None),
        ("chat.2", 8001, "n1", 2),
        ("chat.3", 8002, "n2", 2),
    ]
    # without sizes, the layout of those that exist
    assert places((1, 2, 3), first, second)[2] == ("chat.3", 8002, "n2", 2)
    # another layout
    assert [place[2:] for place in places((1, 2), first, second, tp=4)] == [("n1", 4), ("n2", 4)]


def test_replicas_keep_the_nodes_that_ray_chose() -> None:
    """With another backend: they are replaced one after another, so that others are not free."""
    rows = [
        server_row(request("ray", tp=2, pp=1, name=name, port=port), ranks={node: ["a", "b"]})
        for name, port, node in (("chat", 8000, "n2"), ("chat.2", 8001, "n1"))
    ]

    assert [place[2:] for place in places((1, 2), *rows, tp=2)] == [("n2", 2), ("n1", 2)]
    assert [place[2:] for place in places((1, 2), *rows, tp=1, pp=2)] == [("n2", 2), ("n1", 2)]


def test_the_sum_must_fit() -> None:
    """The error has the arithmetic, and names the other users."""
    two = uneven(1, 1)
    other = server_row(request("mp", tp=1, pp=1, nodes=("n1",), gpus=1, name="x", port=9000))
    with pytest.raises(PlacementError) as caught:
        places((1, 2), other, inventory=two, tp=2)
    assert caught.value.message == (
        "2 replicas of 2 GPUs (TP 2 × PP 1) need 4 GPUs; the cluster has 2, of which 1 is used by"
        " server `x`"
    )
    assert "stop server `x`: `vlaunch stop x`" in caught.value.hint
    with pytest.raises(PlacementError, match=r"need 3 GPUs; the cluster has 2$") as caught:
        places((1, 2, 3), inventory=two, tp=1, backend="ray")
    assert caught.value.hint == "use `--replicas 2`"
    with pytest.raises(PlacementError, match=r"`chat\.3` of 3 GPUs .* fits on no nodes") as caught:
        places((1, 2, 3), inventory=uneven(4, 5), tp=3)
    assert caught.value.evidence == "free GPUs: n1 1, n2 2"


def test_ports_must_exist() -> None:
    """The last one has an upper limit."""
    with pytest.raises(RequestError, match="replica 2 would need port 65536"):
        places(tp=1, port=65535)


def test_numbers() -> None:
    """The lowest stay, and gaps are filled."""
    rows = [
        server_row(request("mp", tp=1, pp=1, nodes=("n1",), gpus=1, name=name))
        for name in ("chat.10", "chat", "chat.2", "chat-b", "x")
    ]
    members = list_members(snapshot(*rows), "chat")

    assert [server.name for server in members] == ["chat", "chat.2", "chat.10"]
    assert choose_numbers(members, None) == (1, 2, 10)
    assert choose_numbers(members, 2) == (1, 2)
    assert choose_numbers(members, 4) == (1, 2, 3, 10)
    assert choose_numbers((), None) == (1,)
