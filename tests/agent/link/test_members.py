"""Connections between agents, over real sockets, and attacks on them."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from launcher.agent import records
from launcher.agent.front.haproxy import Front, Rotation
from launcher.agent.link import leader, members, server
from launcher.agent.link.certificates import Certificates
from launcher.agent.link.leader import Leader
from launcher.agent.link.members import Member, ReportReply
from launcher.agent.link.server import HttpServer
from launcher.agent.processes.node import KEEP, RUN, Order, ServerReport
from tests.agent.authority import Authority
from tests.agent.stage import Clock
from tests.agent.waits import until
from tests.hostile import mutate
from tests.relay import Relay

ORDER = Order(generation=1, phase=RUN, argv=("true",))
OTHER = Order(generation=2, phase=RUN, argv=("false",))
SERVERS = {"chat": {"state": "idle", "last": 0, "prepared": 1}}
CHAT = ServerReport(prepared=1)


class Node:
    """A node that starts nothing."""

    def __init__(self) -> None:
        self.orders: Any = {}
        self.reports = {"chat": CHAT}
        self.changing = False
        self.front = Front("")

    def tick(self) -> None:
        """Do nothing."""

    def report(self) -> dict[str, ServerReport]:
        """Return the test's report."""
        return self.reports


class World:
    """The head's agent gpu1 behind its site, and agents that connect to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, Authority()
        self.authority.deliver(folder / "gpu1", "gpu1")
        self.lead = Leader("gpu1", Node())  # type: ignore[arg-type]
        self.followers: list[Member] = []
        self.clients: list[Client] = []
        self.woken, self.lock = threading.Event(), threading.RLock()
        self.server: HttpServer | None = None

    @property
    def port(self) -> int:
        """The port of the head's agent."""
        if self.server is None:
            own = Certificates(server=True, folder=str(self.folder / "gpu1"))
            self.server = HttpServer(leader.members_site(self.lead, self.lock, own, "127.0.0.1", 0))
            self.server.start()
            until(lambda: self.server and self.server.bound, "it listens")
        return self.server.bound["the agents of other nodes"]

    def follower(self, node: str = "gpu2", port: int = 0) -> Member:
        """Start another agent."""
        if not (self.folder / node).exists():
            self.authority.deliver(self.folder / node, node)
        own = Certificates(server=False, folder=str(self.folder / node))
        created: Any = Node()
        address = "127.0.0.1", port or self.port
        self.followers.append(Member(node, created, *address, own, self.woken.set))
        self.followers[-1].start()
        return self.followers[-1]

    def order(self, node: str, *orders: Order) -> None:
        """Set an order."""
        self.lead.orders[node] = {f"server{at}": item for at, item in enumerate(orders)}
        self.lead.tick()

    def client(
        self, node: str = "gpu2", authority: Authority | None = None, **fields: Any
    ) -> Client:
        """Return a connection with a certificate of a node."""
        (authority or self.authority).deliver(self.folder / "stranger", node, **fields)
        (self.folder / "stranger" / "AGENT_CA").write_bytes(self.authority.certificate())
        own = Certificates(server=False, folder=str(self.folder / "stranger"))
        return self.connect(own.context())

    def connect(self, context: ssl.SSLContext | None) -> Client:
        """Return a raw connection."""
        self.clients.append(Client(self.port, context))
        return self.clients[-1]

    def report(self, node: str = "gpu2", number: int = 1, **fields: Any) -> dict[str, Any]:
        """Return a valid report."""
        return {
            "node": node,
            "boot": "b1",
            "number": number,
            "head_boot": self.lead.boot,
            "done": 0,
            "servers": SERVERS,
            **fields,
        }

    def close(self) -> None:
        """Stop all agents."""
        for follower in self.followers:
            follower.close()
        for client in self.clients:
            client.connection.close()
        if self.server is not None:
            self.server.close()


class Client:
    """A connection to the head's agent for arbitrary messages."""

    def __init__(self, port: int, context: ssl.SSLContext | None) -> None:
        self.connection = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=10, context=context
        )

    def post(self, report: object, **headers: str) -> tuple[int, dict[str, Any]]:
        """Return status and text of the answer; 0 without one."""
        body = report if isinstance(report, bytes) else json.dumps(report).encode()
        try:
            self.connection.request("POST", "/report", body, headers)
            answer = self.connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if answer.status == 200 else {"error": text}
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            return 0, {"error": str(error)}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A cluster that is closed after the test."""
    monkeypatch.setattr(members, "EVERY", 0.02)
    monkeypatch.setattr(members, "_QUICK", 0.02)
    created = World(tmp_path)
    yield created
    created.close()


class Lines:
    """The output so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys, self.text = capsys, ""

    def has(self, text: str) -> bool:
        """Return whether a text was printed."""
        self.text += self.capsys.readouterr().out
        return text in self.text

    def wait(self, text: str) -> None:
        """Wait for a text."""
        until(lambda: self.has(text), f"it says {text!r}", lambda: self.text)


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    """The output of all agents of the test."""
    return Lines(capsys)


def turns(follower: Member) -> Callable[[], bool]:
    """Return a function that runs an agent's turn, and returns true."""

    def turn() -> bool:
        follower.tick()
        return True

    return turn


# ---- what agents do ------------------------------------------------------------------------------


def test_reports_and_orders(world: World, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change is reported at once; the answer has new orders, and done ones are settled."""
    follower = world.follower()
    turn, lead = turns(follower), world.lead
    until(lambda: turn() and lead.orders_done("gpu2"), "it has its orders", lambda: lines.text)
    assert (lead.report("gpu2", "chat"), lead.boot_of("gpu2")) == (CHAT, follower.boot)
    for orders in ([ORDER], [ORDER, OTHER], []):
        world.woken.clear()
        world.order("gpu2", *orders)
        assert not lead.orders_done("gpu2")
        until(lambda: turn() and world.woken.is_set(), "new orders wake it")
        follower.tick()
        assert list(follower.node.orders.values()) == orders
        until(lambda: lead.orders_done("gpu2"), "it reports that it has carried them out")
    monkeypatch.setattr(members, "EVERY", 600.0)
    monkeypatch.setattr(members, "_QUICK", 600.0)
    follower.node.reports = {"chat": ServerReport(state="running")}  # type: ignore[attr-defined]
    follower.tick()
    until(lambda: lead.report("gpu2", "chat").state == "running", "it reports the new state")


@pytest.mark.parametrize(
    ("changing", "age", "pause"), [(False, 10.0, 1.0), (True, 10.0, 0.2), (False, 2.0, 0.2)]
)
def test_reports_are_frequent_while_orders_are_likely(
    world: World, monkeypatch: pytest.MonkeyPatch, changing: bool, age: float, pause: float
) -> None:
    """Otherwise one per second."""
    clock = Clock()
    monkeypatch.setattr(members, "time", clock)
    monkeypatch.setattr(members, "EVERY", 1.0)
    monkeypatch.setattr(members, "_QUICK", 0.2)
    own: Any = Node()
    own.changing = changing
    certificates = Certificates(server=False, folder=str(world.folder))
    follower = Member("gpu2", own, "127.0.0.1", 1, certificates, world.woken.set)
    follower.tick()
    assert follower._due.is_set()
    clock.now += age
    follower.tick()
    for seconds, due in ((0.0, False), (pause - 0.01, False), (0.02, True)):
        follower._due.clear()
        clock.now += seconds
        follower.tick()
        assert follower._due.is_set() is due


def test_an_exited_agent(world: World, lines: Lines) -> None:
    """The closed connection is noticed at once."""
    follower = world.follower()
    turn = turns(follower)
    until(lambda: turn() and world.lead.is_connected("gpu2"), "it is here")
    world.followers.pop().close()
    until(lambda: world.lead.tick() or not world.lead.is_connected("gpu2"), "it is gone")
    lines.wait("agent of gpu2 disconnected: its connection closed")


def test_a_hanging_main_loop_delays_reports_only(
    world: World, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender and the log report it; other requests are answered."""
    monkeypatch.setattr(leader, "_HANGS", 1.0)
    read, arrived = records.parse_record, threading.Event()
    monkeypatch.setattr(records, "parse_record", lambda *args: arrived.set() or read(*args))
    client, other = world.client(), world.client("gpu3").connection
    answers: list[tuple[int, Any]] = []
    with world.lock:
        thread = threading.Thread(target=lambda: answers.append(client.post(world.report())))
        thread.start()
        assert arrived.wait(60)
        other.request("GET", "/")
        status, early = other.getresponse().status, list(answers)
        thread.join(60)

    assert (status, early) == (404, [])
    assert answers == [(403, {"error": "the main loop of the head's agent hangs"})]
    lines.wait("the main loop of the head's agent hangs")
    assert client.post(world.report())[0] == 200


def test_a_restarted_head(world: World, lines: Lines) -> None:
    """Its orders are numbered from one; the old ones apply until they arrive."""
    follower = world.follower(port=world.port)
    turn, port = turns(follower), world.port
    world.order("gpu2", ORDER)
    world.order("gpu2", ORDER, OTHER)
    until(lambda: turn() and len(follower.node.orders) == 2, "it has orders")
    before = world.server
    assert before is not None
    before.close()
    until(lambda: turn() and lines.has("local processes keep running"), "it says so")
    assert len(follower.node.orders) == 2

    again = Leader("gpu1", Node())  # type: ignore[arg-type]
    again.orders = {"gpu2": {"server0": OTHER}}
    own = Certificates(server=True, folder=str(world.folder / "gpu1"))
    world.server = HttpServer(leader.members_site(again, threading.RLock(), own, "127.0.0.1", port))
    world.server.start()
    until(
        lambda: turn() and again.orders_done("gpu2"), "it follows the new one", lambda: lines.text
    )
    assert follower.node.orders == {"server0": OTHER}
    assert lines.text.count("Connection refused") <= 1


def test_an_unreachable_head(world: World, lines: Lines) -> None:
    """It is logged once, and tried again."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    follower = world.follower(port=port)
    turn = turns(follower)
    until(
        lambda: turn() and lines.has("Connection refused; local processes keep running"),
        "it says so",
    )
    until(lambda: turn() and follower._count == 0 and not follower._due.is_set(), "again")
    assert not lines.has("cannot")
    assert lines.text.count("Connection refused") == 1


# ---- access --------------------------------------------------------------------------------------


def test_a_valid_report_is_accepted(world: World) -> None:
    """Otherwise the tests below could fail for another reason."""
    client = world.client()
    assert client.post(world.report(head_boot="")) == (
        200,
        {"head_boot": world.lead.boot, "number": 0, "orders": {}, "ray": "", "front": {}},
    )
    status, answer = client.post(world.report())
    assert (status, answer["orders"], world.lead.is_connected("gpu2")) == (200, {}, True)


TOKEN = "Bearer the-token-that-Ray-sends-in-the-clear"


@pytest.mark.parametrize("headers", [{}, {"Authorization": TOKEN, "X-Ray-Authorization": TOKEN}])
def test_a_client_without_a_certificate(
    world: World, lines: Lines, headers: dict[str, str]
) -> None:
    """It is rejected; Ray's token does not help."""
    context = ssl.create_default_context(cadata=world.authority.certificate().decode())
    client = world.connect(context)
    assert client.post(world.report(), **headers)[0] == 0
    lines.wait("refused a connection from 127.0.0.1: TLS failed: peer did not return a certificate")
    assert world.lead.members == {}


def test_a_client_without_tls(world: World, lines: Lines) -> None:
    """Neither plain HTTP nor garbage gets an answer."""
    for text in (
        b"POST /report HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
        b"\x00\xff" * 100,
        b"x" * (1 << 20),
    ):
        with (
            socket.create_connection(("127.0.0.1", world.port), 10) as stranger,
            contextlib.suppress(ConnectionError),
        ):
            stranger.sendall(text)
            while stranger.recv(1 << 16):
                continue
    lines.wait("refused a connection from 127.0.0.1: TLS failed: http request")
    lines.wait("refused a connection from 127.0.0.1: TLS failed: wrong version number")
    assert world.client().post(world.report())[0] == 200


def test_an_older_tls(world: World, lines: Lines) -> None:
    """It is rejected, even with a certificate."""
    client = world.client()
    context = client.connection._context  # type: ignore[attr-defined]
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert client.post(world.report())[0] == 0
    lines.wait("refused a connection from 127.0.0.1: TLS failed: unsupported protocol")


def test_a_certificate_of_another_cluster(world: World, lines: Lines) -> None:
    """It is rejected, for any name."""
    assert world.client(authority=Authority()).post(world.report())[0] == 0
    lines.wait("refused a connection from 127.0.0.1: the certificate is not accepted")
    assert world.lead.members == {}


def test_an_expired_certificate(world: World, lines: Lines) -> None:
    """It is rejected, as is one that expires during a connection."""
    assert world.client(days=-1).post(world.report())[0] == 0
    lines.wait(
        "refused a connection from 127.0.0.1: the certificate is not accepted: certificate has"
        " expired"
    )
    assert world.lead.members == {}


@pytest.mark.parametrize(
    ("extra", "why", "head"),
    [
        (
            {"days": -1},
            "the certificate is not accepted: certificate has expired",
            "certificate expired",
        ),
        (
            {"ip": "127.0.0.9"},
            "the certificate is not accepted: IP address mismatch",
            "bad certificate",
        ),
    ],
    ids=["expired", "address"],
)
def test_an_untrusted_head(
    world: World, lines: Lines, extra: dict[str, Any], why: str, head: str
) -> None:
    """Its certificate has expired or is another node's: none of its orders is carried out."""
    world.authority.deliver(world.folder / "gpu1", "gpu1", **extra)
    world.lead.orders = {"gpu2": {"server0": ORDER}}
    follower = world.follower()
    turn = turns(follower)
    until(lambda: turn() and lines.has(why), "it says why", lambda: lines.text)
    lines.wait(f"refused a connection from 127.0.0.1: TLS failed: sslv3 alert {head}")
    assert (follower.node.orders, world.lead.members) == ({}, {})


def test_a_head_of_another_cluster(world: World, lines: Lines) -> None:
    """None of its orders is carried out."""
    Authority().deliver(world.folder / "gpu1", "gpu1")
    follower = world.follower()
    turn = turns(follower)
    until(lambda: turn() and lines.has("the certificate is not accepted"), "it says why")
    lines.wait("refused a connection from 127.0.0.1: TLS failed: tlsv1 alert")
    assert follower.node.orders == {}


@pytest.mark.parametrize(
    ("certificate", "extra", "why"),
    [
        ("gpu3", {}, "the certificate of gpu3 came with a report of gpu2"),
        ("gpu1", {"node": "gpu1"}, "gpu1 is this node itself"),
        ("gpu2", {"number": 5}, "gpu2 sent report 5 after report 5"),
        ("gpu2", {"number": 3}, "gpu2 sent report 3 after report 5"),
        ("gpu2", {"head_boot": "earlier"}, "gpu2 reports to another start of the head's agent"),
    ],
    ids=["another node", "the head", "again", "late", "another head"],
)
def test_forbidden_reports(
    world: World, lines: Lines, certificate: str, extra: dict[str, Any], why: str
) -> None:
    """For another node, or repeated: rejected in spite of a valid certificate."""
    assert world.client().post(world.report(number=5))[0] == 200
    status, answer = world.client(certificate).post(world.report(**{"servers": {}, **extra}))

    assert (status, answer) == (403, {"error": why})
    lines.wait(f"refused a report from 127.0.0.1: {why}")
    assert (list(world.lead.members), world.lead.report("gpu2", "chat")) == (
        ["gpu2"],
        CHAT,
    )


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 403),
        (b"\x00\xff", 403),
        (b"[1]", 403),
        (b"[" * 60_000, 403),
        (b'{"node": ' + b"9" * 5000 + b"}", 403),
        (b'{"node": "gpu2", "odd": "\\ud800"}', 403),
        (b" " * (5 << 20), 413),
    ],
    ids=["nothing", "garbage", "list", "deep", "number", "surrogate", "large"],
)
def test_invalid_reports(world: World, body: bytes, status: int) -> None:
    """Other nodes are unaffected."""
    assert world.client("gpu3").post(world.report("gpu3"))[0] == 200
    connection = world.client()
    with contextlib.suppress(ValueError):
        assert connection.post(body)[0] in (status, 0)
    assert world.client("gpu3").post(world.report("gpu3", 2))[0] == 200
    assert list(world.lead.members) == ["gpu3"]


def test_silent_connections_do_not_block_others(
    world: World, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many: the oldest are closed first, and others at the deadline."""
    monkeypatch.setattr(server, "_PENDING", 8)
    silent = [socket.create_connection(("127.0.0.1", world.port), 5) for _ in range(20)]
    assert world.client().post(world.report())[0] == 200
    for item in silent[:12]:
        with contextlib.suppress(ConnectionResetError):
            assert item.recv(1) == b""
    for item in silent:
        item.close()
    monkeypatch.setattr(server, "_HANDSHAKE", 0.5)
    with (
        socket.create_connection(("127.0.0.1", world.port), 10) as late,
        contextlib.suppress(ConnectionResetError),
    ):
        assert late.recv(1) == b""
    lines.wait("refused a connection from 127.0.0.1: there was no TLS handshake in time")


# ---- certificates that come, go and change -------------------------------------------------------


@pytest.mark.parametrize("late", ["gpu1", "gpu2"])
def test_late_certificates(world: World, lines: Lines, late: str) -> None:
    """Both agents wait for them, log it once, and continue."""
    folder = world.folder / late
    folder.mkdir(exist_ok=True)
    for name in ("AGENT_CA", "AGENT_CERTIFICATE"):
        (folder / name).write_text("half of")
    follower = world.follower()
    turn = turns(follower)
    until(lambda: turn() and lines.has("run `vlaunch up`"), "it says so", lambda: lines.text)
    assert not world.lead.is_connected("gpu2")
    world.authority.deliver(folder, late)
    until(lambda: turn() and world.lead.is_connected("gpu2"), "it is here", lambda: lines.text)
    assert lines.text.count("run `vlaunch up`") == 1


def test_renewed_certificates(world: World, lines: Lines) -> None:
    """An open connection does not outlive its CA; nothing else changes."""
    follower = world.follower()
    turn, lead = turns(follower), world.lead
    world.order("gpu2", ORDER)
    until(lambda: turn() and lead.orders_done("gpu2"), "it is here")
    thief = world.client("gpu3")
    assert thief.post(world.report("gpu3"))[0] == 200
    world.authority = Authority()
    world.authority.deliver(world.folder / "gpu1", "gpu1")
    status, answer = thief.post(world.report("gpu3", 2))
    assert (status, answer["error"]) == (
        403,
        "its connection is older than this node's certificates",
    )
    assert thief.post(world.report("gpu3", 2))[0] == 0
    first = lead.members["gpu2"].connection
    world.authority.deliver(world.folder / "gpu2", "gpu2")
    until(
        lambda: (
            turn()
            and lead.tick() is None
            and lead.is_connected("gpu2")
            and lead.orders_done("gpu2")
            and lead.members["gpu2"].connection is not first
        ),
        "it is back",
        lambda: lines.text,
    )
    assert (lead.boot_of("gpu2"), follower.node.orders) == (
        follower.boot,
        {"server0": ORDER},
    )


# ---- relays --------------------------------------------------------------------------------------


ANSWER = json.dumps(
    {"head_boot": "x", "number": 9, "orders": {"server0": asdict(OTHER)}, "ray": "", "front": {}}
).encode()
INJECTED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER)


BODY = json.dumps({"node": "gpu2", "number": 1000, "servers": {}}).encode()
REQUEST = b"POST /report HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


class Between:
    """A relay that modifies one message."""

    def __init__(self) -> None:
        self.adds: Callable[[bytes], bytes] | None = None

    def __call__(self, data: bytes) -> bytes:
        """Return the forwarded data."""
        adds, self.adds = self.adds, None
        return data + (adds(data) if adds else b"")


@pytest.mark.parametrize("side", ["answers", "reports"])
@pytest.mark.parametrize("replay", [True, False])
def test_a_tampering_relay(world: World, lines: Lines, replay: bool, side: str) -> None:
    """A repeated message closes the connection with a logged cause; the next one works."""
    answers, sent = Between(), Between()
    with Relay(world.port, answers, sent) as relay:
        follower = world.follower(port=relay.port)
        turn = turns(follower)
        world.order("gpu2", ORDER)
        until(lambda: turn() and world.lead.orders_done("gpu2"), "it has its orders")
        between, own = (answers, INJECTED) if side == "answers" else (sent, REQUEST)
        between.adds = bytes if replay else lambda _: own
        mapping = {
            "answers": f"no connection to the head's agent at 127.0.0.1 port {relay.port}",
            "reports": "refused a connection from 127.0.0.1",
        }
        text = f"{mapping[side]}: TLS failed: "  # the reason depends on how TCP cuts what passes
        until(lambda: turn() and lines.has(text), "it says why", lambda: lines.text)
        world.order("gpu2", ORDER, OTHER)
        until(lambda: turn() and world.lead.orders_done("gpu2"), "the next one works")
        assert list(follower.node.orders.values()) == [ORDER, OTHER]
        assert world.lead.report("gpu2", "chat") == CHAT
    assert not lines.has("Traceback")


# ---- fake heads ----------------------------------------------------------------------------------


class FakeHead:
    """A listener with the head's certificate and a test's answers."""

    def __init__(self, folder: Path) -> None:
        self.answers: list[Any] = []  # the last one repeatedly
        self.requests: list[dict[str, Any]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(handler) -> None:
                body = handler.rfile.read(int(handler.headers["Content-Length"]))
                self.requests.append(json.loads(body))
                text = self.answers.pop(0) if self.answers[1:] else self.answers[0]
                data = text if isinstance(text, bytes) else json.dumps(text).encode()
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(data)))
                handler.end_headers()
                handler.wfile.write(data)

            def do_GET(handler) -> None:
                handler.send_error(404)

            def log_message(handler, *_: object) -> None:
                """Do not log."""

        class Listening(http.server.ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """Do not log."""

        context = Certificates(server=True, folder=str(folder)).context()
        assert context is not None
        self.server = Listening(("127.0.0.1", 0), Handler)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def fake_head(world: World) -> Iterator[FakeHead]:
    """A fake head."""
    created = FakeHead(world.folder / "gpu1")
    yield created
    created.server.shutdown()
    created.server.server_close()


def answer(head_boot: str, number: int, *orders: Order) -> dict[str, Any]:
    """Return an answer with orders."""
    text = {f"server{at}": asdict(item) for at, item in enumerate(orders)}
    return {"head_boot": head_boot, "number": number, "orders": text, "ray": "", "front": {}}


def test_a_head_that_closes_every_connection(
    world: World, fake_head: FakeHead, lines: Lines
) -> None:
    """Every new connection asks for the start of the head's agent first."""
    fake_head.server.RequestHandlerClass.protocol_version = "HTTP/1.0"
    fake_head.answers = [answer("h1", 5, ORDER)]
    follower = world.follower(port=fake_head.port)
    turn = turns(follower)
    until(lambda: turn() and len(fake_head.requests) > 3, "it asks again", lambda: lines.text)
    assert {item["head_boot"] for item in fake_head.requests} == {""}
    assert follower.node.orders == {}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (answer("h0", 9, OTHER), "it was restarted meanwhile"),
        (answer("h1", 4, OTHER), "it sent orders 4 after orders 5"),
        (
            {**answer("h1", 6), "orders": {"chat": {}}},
            "invalid answer: 'orders.chat.generation'",
        ),
        (
            {"head_boot": "h1", "orders": {}, "ray": "", "front": {}},
            "invalid answer: a field is missing",
        ),
        (b"[]", "invalid answer: "),
        (b"[" * 60_000, "invalid answer: "),
        (
            {**answer("h1", 6), "orders": {"../../etc": asdict(OTHER)}},
            "it sent orders for a server with an invalid name",
        ),
        (b"{" + b" " * (1 << 20), "its answer is too long"),
    ],
    ids=["another head", "late", "no order", "no number", "list", "deep", "path", "long"],
)
def test_rejected_answers(
    world: World, fake_head: FakeHead, lines: Lines, bad: Any, why: str
) -> None:
    """Invalid, or of an earlier start of the head's agent: the connection is replaced."""
    good, again = answer("h1", 5, ORDER), answer("h2", 5, ORDER)
    fake_head.answers = [answer("h1", 7, OTHER), good, bad, answer("h2", 0), again]
    follower = world.follower(port=fake_head.port)
    turn = turns(follower)
    until(lambda: turn() and lines.has(why), "it says why", lambda: lines.text)
    assert follower.node.orders == {"server0": ORDER}
    observed = len(fake_head.requests)
    until(lambda: turn() and len(fake_head.requests) > observed + 2, "it is back")
    assert follower.node.orders == {"server0": ORDER}
    assert [item["head_boot"] for item in fake_head.requests[:5]] == ["", "h1", "h1", "", "h2"]
    assert fake_head.requests[4]["done"] == 0  # no order of that start is done
    assert [item["number"] for item in fake_head.requests[:5]] == [1, 2, 3, 4, 5]


# ---- encoded orders ------------------------------------------------------------------------------


ORDERS = {
    "chat": Order(
        generation=3,
        phase=RUN,
        argv=("vllm", "serve"),
        env={"A": "b"},
        api=("127.0.0.1", 8000),
        share=0.9,
        count=1,
        gpus=(1,),
        inspect=True,
    ),
    "embed": Order(generation=1, phase=KEEP, pids=(7, 8)),
}
PLAIN = json.loads(records.as_bytes(ReportReply(head_boot="h1", number=5, orders=ORDERS)))


def read(data: object) -> ReportReply:
    """Parse an answer as an agent does."""
    return records.parse_record(ReportReply, data, "answer", complete=True)


def test_orders_survive_a_round_trip() -> None:
    """With all fields."""
    assert read(PLAIN) == ReportReply(head_boot="h1", number=5, orders=ORDERS)


@pytest.mark.parametrize("orders", [None, 7, [], "x", {"chat": None}, {"chat": {}}, {"chat": []}])
def test_an_invalid_order(orders: object) -> None:
    """The whole answer is rejected."""
    with pytest.raises(ValueError, match="invalid answer"):
        read({**PLAIN, "orders": orders})


@mutate.examples(60)
@given(chance=mutate.chances)
def test_nearly_valid_orders(chance: mutate.Chance) -> None:
    """Rejected, or all parts have their types."""
    try:
        answer = read({**PLAIN, "orders": mutate.value(PLAIN["orders"], chance)})
    except ValueError:
        return

    for order in answer.orders.values():
        assert {type(label) for label in (order.phase, *order.argv, *order.env.values())} <= {str}
        assert {type(number) for number in (order.generation, *order.behind, *order.pids)} <= {int}


def test_a_front_and_its_states_travel(world: World) -> None:
    """A changed state is reported at once, and new states wake the agent."""
    follower = world.follower()
    states = []
    follower.node.front.tick = states.append  # type: ignore[method-assign]
    follower.node.front.report = {"chat": Rotation(state="ready")}
    turn = turns(follower)
    world.lead.front_states = {"chat": "drain"}
    until(lambda: turn() and states[-1] == {"chat": "drain"}, "it has the states")
    assert world.woken.is_set()
    follower.node.front.report = {"chat": Rotation(state="drain", requests=2)}
    expected = {"gpu2": {"chat": Rotation(state="drain", requests=2)}}
    until(lambda: turn() and world.lead.fronts() == expected, "the head knows")
