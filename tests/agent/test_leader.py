"""The agents of a cluster as the head's sees them: whose reports count, and who is there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given

from launcher.agent import leader, records
from launcher.agent.leader import Leader, ReportRejected
from launcher.agent.members import ReportReply
from launcher.agent.node import NOTHING, RUN, AgentReport, Order, ServerReport
from tests.agent.stage import Clock
from tests.hostile import mutate

SERVERS = {"chat": {"state": "running", "last": 1, "prepared": 1, "probe": {"answers": {}}}}
CHAT = ServerReport(state="running", last=1, prepared=1)
ORDER = Order(generation=1, phase=RUN, argv=("true",))
COUNTERS = {"progress": [], "running": 1, "waiting": 1, "tokens": 1.0, "failed": 0.0}


class Node:
    """Starts nothing."""

    def __init__(self) -> None:
        self.orders: Any = {}

    def tick(self) -> None:
        """Do nothing."""

    def report(self) -> dict[str, Any]:
        """Report a server that does not run."""
        return {"chat": ServerReport(prepared=7)}


class Connection(asyncio.BaseTransport):
    """A connection that a test closes."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def is_closing(self) -> bool:
        """Return whether it was closed."""
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
    """A clock for all that the head's agent does."""
    created = Clock()
    monkeypatch.setattr(leader, "time", created)
    return created


@pytest.fixture
def head(clock: Clock) -> Head:
    """The head's agent."""
    return Head()


def test_a_report_is_answered_with_orders(head: Head) -> None:
    """All of them, each time; what a node has carried out is settled."""
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
    """Empty of what it has nothing of; who is not here cannot be asked."""
    head.lead.tick()
    head.post(servers={"chat": {"state": "stopping"}, "odd": {}})
    head.post(number=2)

    assert head.lead.report("gpu2", "chat") == CHAT
    assert head.lead.report("gpu2", "odd") == NOTHING
    assert head.lead.report("gpu3", "chat") == NOTHING
    assert head.lead.report("gpu1", "chat") == ServerReport(prepared=7)


def test_the_first_answer_tells_only_who_leads(head: Head) -> None:
    """A report from before a restart of the head's agent, and one over again, change nothing."""
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
def test_what_is_refused_changes_nothing(
    head: Head, clock: Clock, extra: dict[str, Any], why: str
) -> None:
    """Reports that are sent again or in another order, to another head, or of another node."""
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
    """It is refused as a whole."""
    report = {"node": "gpu2", "boot": "b", "number": 1, "head_boot": "", "done": 0, "servers": {}}
    with pytest.raises(ValueError, match=f"invalid report: '{field}': "):
        records.parse_record(AgentReport, {**report, **change}, "report")


def test_nobody_else_is_this_node(head: Head) -> None:
    """Not even with its certificate."""
    with pytest.raises(ReportRejected, match="gpu1 is this node itself"):
        head.post("gpu1")


def test_a_report_of_before_a_break_is_refused_after_it(head: Head, clock: Clock) -> None:
    """A node that is gone is remembered."""
    head.post(number=7)
    clock.now += 61.0
    head.lead.tick()
    with pytest.raises(ReportRejected, match="gpu2 sent report 7 after report 7"):
        head.post(number=7)

    assert not head.lead.is_connected("gpu2")


def test_starts_that_are_remembered_are_bounded(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is in the hands of others must not fill the head's memory."""
    monkeypatch.setattr(leader, "_MAX_BOOTS", 3)
    for at in range(9):
        head.post(boot=f"b{at}")

    assert list(head.lead._boots["gpu2"]) == ["b6", "b7", "b8"]


def test_an_agent_that_is_cut_off_has_time_to_come_back(head: Head, clock: Clock) -> None:
    """It is not here at once, and gone only after a while; one that is back has the boot that it
    had, and carries its orders out anew.
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


def test_another_connection_takes_the_place_of_one_that_broke(head: Head) -> None:
    """Before anybody noticed that it had."""
    head.post()
    old = head.connections.pop("gpu2")
    head.post(number=2)
    old.closed = True
    head.lead.tick()

    assert head.lead.is_connected("gpu2")


def test_an_agent_that_is_silent_is_gone_after_a_minute(head: Head, clock: Clock) -> None:
    """Its connection stands, as behind a network that swallows everything; long before, its word is
    not fresh any more.
    """
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


def test_an_agent_that_was_started_anew(head: Head) -> None:
    """It takes the place of itself; reports that the old one has sent come too late."""
    head.post(number=9)
    head.post(boot="b2", servers={})

    assert (head.lead.boot_of("gpu2"), head.lead.report("gpu2", "chat")) == ("b2", NOTHING)
    with pytest.raises(ReportRejected, match="earlier start"):
        head.post(number=10)


@mutate.examples(60)
@given(chance=mutate.chances)
def test_whatever_is_reported(clock: Clock, chance: mutate.Chance) -> None:
    """By a node that has a certificate; somebody else is heard all the same."""
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
