"""The head's view of the cluster's agents: valid reports, and connected nodes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given

from launcher.agent import records
from launcher.agent.front.haproxy import Front, Rotation
from launcher.agent.link import leader
from launcher.agent.link.leader import Leader, ReportRejected
from launcher.agent.link.members import ReportReply
from launcher.agent.processes.node import KEEP, NOTHING, RUN, AgentReport, Order, ServerReport
from tests.agent.stage import Clock
from tests.hostile import mutate

SERVERS = {"chat": {"state": "running", "last": 1, "prepared": 1, "probe": {"answers": {}}}}
CHAT = ServerReport(state="running", last=1, prepared=1)
ORDER = Order(generation=1, phase=RUN, argv=("true",))
COUNTERS = {"progress": [], "running": 1, "waiting": 1, "tokens": 1.0, "failed": 0.0}


class Node:
    """A node that starts nothing."""

    def __init__(self) -> None:
        self.orders: Any = {}
        self.front = Front("")

    def tick(self) -> None:
        """Do nothing."""

    def report(self) -> dict[str, Any]:
        """Report a stopped server."""
        return {"chat": ServerReport(prepared=7)}


class Connection(asyncio.BaseTransport):
    """A fake connection."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def is_closing(self) -> bool:
        """Return whether a test closed it."""
        return self.closed


class Head:
    """The head's agent, and reports to it."""

    def __init__(self) -> None:
        self.lead = Leader("gpu1", Node())  # type: ignore[arg-type]
        self.connections: dict[str, Connection] = {}

    def post(self, name: str = "gpu2", number: int = 1, **fields: Any) -> ReportReply:
        """Report over a node's connection."""
        report = {
            "node": name,
            "boot": "b1",
            "number": number,
            "head_boot": self.lead.boot,
            "done": 0,
            "servers": SERVERS,
            **fields,
        }
        connection = self.connections.setdefault(name, Connection())
        return self.lead.exchange(
            name, records.parse_record(AgentReport, report, "report"), connection
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the head's agent."""
    created = Clock()
    monkeypatch.setattr(leader, "time", created)
    return created


@pytest.fixture
def head(clock: Clock) -> Head:
    """The head's agent."""
    return Head()


def test_a_report_is_answered_with_orders(head: Head) -> None:
    """Always all of them; orders that were carried out are settled."""
    lead = head.lead
    first = head.post()
    assert (first.orders, lead.is_connected("gpu2"), lead.boot_of("gpu2")) == ({}, True, "b1")
    assert not lead.orders_done("gpu2")

    lead.orders, lead.ray = {"gpu2": {"chat": ORDER}}, "b1.1"
    lead.tick()
    orders = {"chat": ORDER}
    expected = ReportReply(head_boot=lead.boot, number=first.number + 1, orders=orders, ray="b1.1")
    for number, done in ((2, first.number), (3, first.number + 1)):
        assert head.post(number=number, done=done) == expected
        assert lead.orders_done("gpu2") is (done == expected.number)
    lead.tick()
    assert lead.order_number("gpu2") == expected.number


def test_the_last_report_of_a_node_counts(head: Head) -> None:
    """Missing servers are empty; a disconnected node has no report."""
    head.lead.tick()
    head.post(servers={"chat": {"state": "stopping"}, "odd": {}})
    head.post(number=2)

    assert head.lead.report("gpu2", "chat") == CHAT
    assert head.lead.report("gpu2", "odd") == NOTHING
    assert head.lead.report("gpu3", "chat") == NOTHING
    assert head.lead.report("gpu1", "chat") == ServerReport(prepared=7)


def test_the_first_answer_has_no_orders(head: Head) -> None:
    """Reports from before a restart of the head's agent, and repeated ones, change nothing."""
    head.lead.orders = {"gpu2": {"chat": ORDER}}
    assert head.post(head_boot="") == ReportReply(head_boot=head.lead.boot)
    assert not head.lead.is_connected("gpu2")


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"number": 5}, "gpu2 sent report 5 after report 5"),
        ({"number": 4}, "gpu2 sent report 4 after report 5"),
        ({"boot": "b0"}, "gpu2 sent a report of an earlier start of its agent"),
        ({"head_boot": "other"}, "gpu2 reports to another start of the head's agent"),
        ({"node": "gpu3"}, "the certificate of gpu2 came with a report of gpu3"),
        ({"boot": ""}, "gpu2 sent an invalid report: its 'boot' has 0 letters"),
        ({"boot": "b" * 41}, "gpu2 sent an invalid report: its 'boot' has 41 letters"),
    ],
)
def test_rejected_reports_change_nothing(
    head: Head, clock: Clock, extra: dict[str, Any], why: str
) -> None:
    """Repeated, reordered, to another head, or from another node."""
    head.post(boot="b0", number=9)
    head.post(number=5)
    clock.now += 3.0
    with pytest.raises(ReportRejected, match=why):
        head.post(**{"number": 6, "servers": {}, "done": 1, **extra})

    assert (head.lead.report_ages()["gpu2"], head.lead.is_connected("gpu3")) == (3.0, False)
    assert (head.lead.report("gpu2", "chat"), head.lead.boot_of("gpu2")) == (CHAT, "b1")
    head.post(number=6)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"servers": []}, "servers"),
        ({"number": None}, "number"),
        ({"number": "7"}, "number"),
        ({"done": None}, "done"),
        ({"servers": {"chat": 1}}, "servers.chat"),
        ({"servers": {"chat": {"last": True}}}, "servers.chat.last"),
        ({"servers": {"chat": {"room": [1, None]}}}, "servers.chat.room.1"),
        ({"servers": {"chat": {"probe": {"task": 7}}}}, "servers.chat.probe.task"),
        *(
            ({"servers": {"chat": {"probe": {"asking": {"": odd}}}}}, "servers.chat.probe.asking.")
            for odd in (-1.0, 2.0**50)
        ),
        *(
            (
                {"servers": {"chat": {"probe": {"counters": {**COUNTERS, name: odd}}}}},
                f"servers.chat.probe.counters.{name}",
            )
            for name in ("running", "waiting", "tokens", "failed")
            for odd in (-1, 2**50)
        ),
        ({"servers": {"chat": {"inspection": {"number": 1}}}}, "servers.chat.inspection.at"),
    ],
)
def test_an_invalid_report_names_its_field(change: dict[str, Any], field: str) -> None:
    """The whole report is rejected."""
    report = {"node": "gpu2", "boot": "b", "number": 1, "head_boot": "", "done": 0, "servers": {}}
    with pytest.raises(ValueError, match=f"invalid report: '{field}': "):
        records.parse_record(AgentReport, {**report, **change}, "report")


def test_the_heads_node_cannot_be_impersonated(head: Head) -> None:
    """Not even with its certificate."""
    with pytest.raises(ReportRejected, match="gpu1 is this node itself"):
        head.post("gpu1")


def test_reports_from_before_an_outage_are_rejected(head: Head, clock: Clock) -> None:
    """A lost node is remembered."""
    head.post(number=7)
    clock.now += 61.0
    head.lead.tick()
    with pytest.raises(ReportRejected, match="gpu2 sent report 7 after report 7"):
        head.post(number=7)

    assert not head.lead.is_connected("gpu2")


def test_remembered_starts_are_limited(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compromised node must not fill the head's memory."""
    monkeypatch.setattr(leader, "_MAX_BOOTS", 3)
    for at in range(9):
        head.post(boot=f"b{at}")

    assert list(head.lead._boots["gpu2"]) == ["b6", "b7", "b8"]


def test_a_disconnected_agent_may_return(head: Head, clock: Clock) -> None:
    """It is disconnected at once, but gone only later; on return its boot is unchanged, and it gets
    its orders again.
    """
    number = head.post().number
    head.connections.pop("gpu2").closed = True
    head.lead.tick()
    assert (
        head.lead.is_connected("gpu2"),
        head.lead.gone_reason("gpu2"),
        head.lead.report("gpu2", "chat"),
    ) == (
        False,
        "",
        NOTHING,
    )
    assert head.lead.boot_of("gpu2") == ""
    clock.now += 10.0
    assert head.lead.gone_reason("gpu2") == "its connection closed"
    assert head.lead.gone_reason("gpu2", patience=5.0) == ""
    clock.now += 5.0
    assert head.lead.gone_reason("gpu2", patience=5.0) == "its connection closed"

    head.post(number=2, done=number)
    assert (
        head.lead.is_connected("gpu2"),
        head.lead.gone_reason("gpu2"),
        head.lead.boot_of("gpu2"),
    ) == (
        True,
        "",
        "b1",
    )
    assert not head.lead.orders_done("gpu2")


def test_a_new_connection_replaces_a_broken_one(head: Head) -> None:
    """Even before the break is noticed."""
    head.post()
    old = head.connections.pop("gpu2")
    head.post(number=2)
    old.closed = True
    head.lead.tick()

    assert head.lead.is_connected("gpu2")


def test_a_silent_agent_is_gone_after_a_minute(head: Head, clock: Clock) -> None:
    """Its connection is open, as with dropped packets; its reports count as stale much earlier."""
    head.post()
    clock.now += 30.0
    head.lead.tick()
    assert (
        head.lead.is_connected("gpu2"),
        head.lead.is_reporting("gpu2"),
        head.lead.report_ages(),
    ) == (
        True,
        False,
        {"gpu1": 0.0, "gpu2": 30.0},
    )
    clock.now += 31.0
    head.lead.tick()

    assert (head.lead.is_connected("gpu2"), head.lead.gone_reason("gpu2")) == (
        False,
        "no report for 60 s",
    )


def test_a_restarted_agent(head: Head) -> None:
    """It replaces itself; late reports of the old one are ignored."""
    head.post(number=9)
    head.post(boot="b2", servers={})

    assert (head.lead.boot_of("gpu2"), head.lead.report("gpu2", "chat")) == ("b2", NOTHING)
    with pytest.raises(ReportRejected, match="earlier start"):
        head.post(number=10)


def test_an_engine_of_an_unreadable_server_is_ordered_to_stay(head: Head) -> None:
    """From the first orders of an agent that reconnects: without one, its node would stop it."""
    head.lead.left_alone = {"chat"}
    head.lead.tick()
    stay = {"chat": Order(generation=1, phase=KEEP)}
    first = head.post()
    assert first.orders == stay
    head.lead.tick()
    assert head.post(number=2, done=first.number) == first
    assert head.lead.node.orders == {"chat": Order(generation=0, phase=KEEP)}

    head.lead.left_alone = set()
    head.lead.tick()
    assert head.post(number=3).orders == {}


def test_the_program_of_each_agent_is_known(head: Head) -> None:
    """Empty for an older one, which reports none; this one runs from plain files."""
    head.post(program="a" * 65)
    head.post("gpu3")

    assert head.lead.programs() == {"gpu1": "", "gpu2": "a" * 64, "gpu3": ""}


@mutate.examples(60)
@given(chance=mutate.chances)
def test_any_report(clock: Clock, chance: mutate.Chance) -> None:
    """A malicious node does not affect others."""
    head = Head()
    head.post("gpu3")
    good = {"node": "gpu2", "boot": "b", "number": 1, "done": 0, "servers": SERVERS}
    for number in range(1, 5):
        text = mutate.text({**good, "number": number, "head_boot": head.lead.boot}, chance)
        try:
            report = records.parse_record(AgentReport, text.encode(errors="replace"), "report")
            head.lead.exchange("gpu2", report, Connection())
        except (ValueError, ReportRejected):
            pass
        head.lead.tick()
        assert isinstance(head.lead.report("gpu2", "chat"), ServerReport)
        json.dumps(head.lead.report_ages(), ensure_ascii=False).encode()
    head.post("gpu3", number=2)
    assert head.lead.report("gpu3", "chat") == CHAT


def test_states_for_fronts_go_to_nodes_with_one(head: Head) -> None:
    """Reports of fronts count while their nodes are connected."""
    head.lead.front_states = {"chat": "drain"}
    assert head.post().front == {}
    reply = head.post(number=2, front={"chat": {"state": "ready", "requests": 3}})
    assert reply.front == {"chat": "drain"}
    assert head.lead.fronts() == {"gpu2": {"chat": Rotation(state="ready", requests=3)}}
    head.post(number=3, front={})
    assert head.lead.fronts() == {"gpu2": {}}
    head.connections["gpu2"].closed = True
    head.lead.tick()
    assert head.lead.fronts() == {}
