"""Several endpoints of one server: where they are, what is asked of each, and how it is then."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from launcher.payload.agent.desired import Desired, Process
from launcher.site import Site
from launcher.state import endpoints
from launcher.state.liveness import BAD, ServerState
from launcher.state.observe import observe
from launcher.state.servers import read
from tests import kept
from tests.fakes import FakeTransport
from tests.plan.served import INVENTORY
from tests.simulated import World
from tests.state.conftest import ANSWER, LATE, serve

WENT = {"status": 0, "error": "Connection refused"}


def apart(*held: tuple[int, int], nodes: tuple[str, ...] = ("gpu01", "gpu02")) -> Desired:
    """Return a server with an API on each node, behind which are so many replicas."""
    processes = tuple(
        Process(node=node, argv=("vllm", "serve"), replicas=each)
        for node, each in zip(nodes, held, strict=True)
    )
    return kept.wanted(backend="mp", processes=processes, replicas=sum(count for _, count in held))


PAIR = apart((0, 1), (1, 1))


def test_each_node_has_an_endpoint(world: World) -> None:
    """With the numbers of its replicas; a node that the inventory has no more has none."""
    found = endpoints.of(world.inventory, apart((0, 2), (2, 1)))
    assert [(each.node, each.url, each.replicas) for each in found] == [
        ("gpu01", "http://10.0.0.11:8000/v1", range(2)),
        ("gpu02", "http://10.0.0.12:8000/v1", range(2, 3)),
    ]

    gone = apart((0, 2), (2, 1), nodes=("gpu09", "gpu02"))
    assert [each.node for each in endpoints.of(world.inventory, gone)] == ["gpu02"]


def test_each_endpoint_is_asked_on_its_node(world: World) -> None:
    """For each of its own replicas, by the numbers that they have in the server."""
    facts = observe(world.inventory, FakeTransport(world.answer), [world.inventory.image])
    said = kept.said(kept.one(apart((0, 2), (2, 2)), kept.seen()))
    (server,) = read(said).servers
    found = endpoints.query(Site(world.inventory, facts), server)

    assert {node: [each.node for each in asked] for node, asked in found.items()} == {
        "gpu01": ["gpu01", "gpu01"],
        "gpu02": ["gpu02", "gpu02"],
    }
    first, second = (asked[1].argv for asked in found.values())
    assert (first[-2:], second[-4:]) == (("--engines", "2"), ("--engines", "2", "--first", "2"))


@pytest.mark.parametrize(
    ("one", "other", "state", "detail"),
    [
        (ANSWER, ANSWER, "answering", ""),
        (ANSWER, WENT, "silent", "gpu02: no completion: Connection refused"),
        (WENT, ANSWER, "silent", "gpu01: no completion: Connection refused"),
        (WENT, WENT, "silent", "no completion: Connection refused"),
        (ANSWER, {**LATE, "moved": True}, "busy", ""),
        (WENT, {**LATE, "moved": True}, "silent", "gpu01: no completion: Connection refused"),
    ],
)
def test_a_server_is_as_its_worst_endpoint(
    world: World, one: dict[str, Any], other: dict[str, Any], state: str, detail: str
) -> None:
    """Whose node is named; the others are as they are."""
    found = serve(world, kept.seen(), wanted=PAIR, gpu01=one, gpu02=other)

    assert (found.state, found.detail) == (state, detail)
    assert [each.node for each in found.endpoints if each.state == "answering"] == [
        node for node, said in (("gpu01", one), ("gpu02", other)) if said is ANSWER
    ]
    assert found.endpoint == "http://10.0.0.11:8000/v1"


def test_an_endpoint_whose_node_cannot_be_asked(world: World) -> None:
    """Nobody knows how it is, and the server counts as its worst."""
    world.stop("gpu02")
    found = serve(world, kept.seen(), wanted=PAIR, gpu01=ANSWER)

    assert (found.state, found.detail) == (
        "unknown",
        "gpu02: the node that has its API was not asked",
    )


def test_what_all_endpoints_hold_is_added_up(world: World) -> None:
    """Where one does not say, nobody knows."""
    world.said["about"] = {
        "health": 200,
        "capacity": {"kv_cache_size_tokens": "1000", "kv_cache_max_concurrency": "2.5"},
        "load": {"running": 1, "waiting": 2},
    }
    both = {"gpu01": ANSWER, "gpu02": ANSWER}
    found = serve(world, kept.seen(load=kept.load()), wanted=PAIR, **both)

    assert (found.kv_tokens, found.concurrency) == (2000, 5.0)
    assert found.load == kept.load(running=2, waiting=4)
    assert endpoints.holds([world.said["about"], {}]).tokens is None


def test_what_one_endpoint_does_not_count_is_its_keepers(world: World) -> None:
    """The load of all, as it was counted last; nothing where that is long ago."""
    one = {"gpu01": {**ANSWER, "load": {"running": 1, "waiting": 2}}, "gpu02": ANSWER}
    keeper = kept.seen(load=kept.load())

    assert serve(world, keeper, wanted=PAIR, **one).load == kept.load()
    assert serve(world, keeper, wanted=PAIR, age=99.0, **one).load is None


def test_every_state_has_its_place() -> None:
    """What is bad comes before what is good."""
    assert set(endpoints.WORST) == set(get_args(ServerState))
    assert set(endpoints.WORST[: len(BAD)]) == set(BAD)


@pytest.mark.parametrize(
    ("bind", "url"),
    [
        ("0.0.0.0", "http://10.0.0.1:8000/v1"),
        ("::", "http://10.0.0.1:8000/v1"),
        ("127.0.0.1", "http://127.0.0.1:8000/v1"),
        ("fd00::1", "http://[fd00::1]:8000/v1"),
    ],
)
def test_where_clients_go(bind: str, url: str) -> None:
    """To the head's address between the nodes, or to the one address that was asked for."""
    assert endpoints.url(INVENTORY, bind, 8000) == url
    assert endpoints.url(INVENTORY, bind, 8000, "n2") == url.replace("10.0.0.1", "10.0.0.2")
