"""The connection probe on loopback: addresses in 127.0.0.0/8 act as hosts."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import launcher
from launcher.core.domain import Answer
from launcher.core.errors import UnreadableAnswer
from launcher.hosts import pairs
from launcher.hosts.pairs import Peer, PortProbe

pytestmark = pytest.mark.processes

HIGH = 27311
PORTS = (16379, 18265)
# Unique per process: concurrent test runs use the same ports.
NET = f"127.{os.getpid() // 250 % 250 + 1}.{os.getpid() % 250 + 1}"
IPS = {"a": f"{NET}.2", "b": f"{NET}.3", "c": f"{NET}.4"}
Process = subprocess.Popen[str]


@contextmanager
def probe(
    name: str,
    peers: str,
    *,
    deadline: float = 60.0,
    patience: float = 0.5,
    nonce: str = "n",
    **changed: object,
) -> Iterator[Process]:
    """Start the probe of one node; stop it with the block."""
    others = [Peer(name=peer, ip=IPS[peer], ports=PORTS) for peer in peers]
    argv = pairs.probe_argv(
        node=name,
        ip=str(changed.get("ip", IPS[name])),
        peers=others,
        listen=PORTS,
        high=HIGH,
        mtu=int(str(changed.get("mtu", 9000))),
        nonce=nonce,
        deadline=deadline,
        patience=patience,
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        (sys.executable, *argv[1:]), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def probes(name: str, process: Process) -> dict[str, PortProbe]:
    """Return a probe's parsed answer."""
    out, err = process.communicate(timeout=60)

    assert err == ""
    assert process.returncode == 0
    return {probe.target: probe for probe in pairs.parse_probes(Answer(node=name, code=0, out=out))}


def test_three_nodes_reach_all_peers() -> None:
    """All ports, the megabyte and the full packet, long before any deadline."""
    began = time.monotonic()
    with ExitStack() as stack:
        started = {name: stack.enter_context(probe(name, "abc".replace(name, ""))) for name in IPS}
        reports = [
            report for name, process in started.items() for report in probes(name, process).values()
        ]

    assert len(reports) == 6
    for report in reports:
        assert report.ports == {16379: "open", 18265: "open", HIGH: "open"}
        assert (report.bulk, report.largest, report.mtu, report.heard, report.errors) == (
            True,
            9000,
            9000,
            True,
            {},
        )
    assert time.monotonic() - began < 60


def test_all_ports_are_free_afterwards() -> None:
    """Servers without SO_REUSEADDR would fail on a port in TIME_WAIT."""
    with probe("a", "b") as a, probe("b", "a") as b:
        probes("a", a), probes("b", b)
    for ip in (IPS["a"], IPS["b"]):
        for port in PORTS:
            with socket.socket() as sock:
                sock.bind((ip, port))


def test_a_late_peer_is_awaited() -> None:
    """Sessions do not start simultaneously."""
    with probe("a", "b") as a:
        time.sleep(0.7)
        with probe("b", "a") as b:
            assert probes("b", b)["a"].bulk is True
            assert set(probes("a", a)["b"].ports.values()) == {"open"}


def test_a_missing_peer_is_refused_at_the_deadline() -> None:
    """Without any data from it."""
    with probe("a", "b", deadline=2) as a:
        report = probes("a", a)["b"]

    assert set(report.ports.values()) == {"refused"}
    assert (report.bulk, report.largest, report.heard) == (None, None, False)
    assert report.errors[HIGH] == os.strerror(111)


def test_a_port_in_use_is_skipped() -> None:
    """An accepted connection there is sufficient."""
    with socket.create_server((IPS["b"], 16379)), probe("a", "b") as a, probe("b", "a") as b:
        assert probes("a", a)["b"].ports[16379] == "open"
        assert probes("b", b)["a"].ports[16379] == "open"


def test_a_refused_port_is_final_once_the_peer_was_met() -> None:
    """The peer opens its ports before its greeting, so the probe ends at once."""
    with socket.socket() as used, probe("a", "b") as a:
        # bound but not listening: no other process can use it
        used.bind((IPS["b"], 16379))
        with probe("b", "a") as b:
            began = time.monotonic()
            report = probes("a", a)["b"]
            probes("b", b)

    assert (report.ports[16379], report.ports[18265], report.ports[HIGH]) == (
        "refused",
        "open",
        "open",
    )
    assert time.monotonic() - began < 60


def test_a_refusal_before_the_peers_start_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer starts and connects while a refusal is on its way."""
    monkeypatch.syspath_prepend(str(Path(launcher.__file__).parent / "hosts" / "node"))
    program = importlib.import_module("pairs")
    peer = {"name": "b", "ip": IPS["b"], "ports": []}
    with socket.socket() as listener:
        listener.bind((IPS["b"], HIGH + 1))

        class Late(program.PortProber):  # type: ignore[misc]
            def __init__(self) -> None:
                self.ip, self.port, self.patience, self.connections = (
                    IPS["a"],
                    HIGH + 1,
                    0.5,
                    dict[str, object](),
                )

            def record_result(self, *args: object) -> None:
                listener.listen()
                self.connections["b"] = ["met"]
                super().record_result(*args)

            def exchange_greetings(self, _: object, __: object, sock: socket.socket) -> str:
                sock.close()
                return "connection"

        result: dict[str, dict[str, str]] = {"ports": {}, "errors": {}}
        connection = Late().probe_ports(peer, result, time.monotonic() + 5)

    assert (connection, result) == ("connection", {"ports": {str(HIGH + 1): "open"}, "errors": {}})


def test_a_foreign_listener_at_the_high_port_is_recognised() -> None:
    """Another run's probe does not know the nonce."""
    with probe("b", "a", nonce="other"):
        while not _listens(IPS["b"], HIGH):
            time.sleep(0.02)
        with probe("a", "b", deadline=2) as a:
            report = probes("a", a)["b"]

    assert (report.ports[HIGH], report.bulk, report.largest) == ("error", None, None)
    assert report.errors[HIGH] == "another program answers"


def test_a_silent_listener_is_no_peer() -> None:
    """A connection alone proves nothing at the high port."""
    with socket.create_server((IPS["b"], HIGH)), probe("a", "b", deadline=2) as a:
        report = probes("a", a)["b"]

    assert report.ports[HIGH] == "error"
    assert "did not answer" in report.errors[HIGH]


def test_the_largest_packet_is_exact() -> None:
    """Loopback transports 65535 bytes at most."""
    with probe("a", "b", mtu=65600, patience=10) as a, probe("b", "a") as b:
        report = probes("a", a)["b"]
        assert probes("b", b)["a"].largest == 9000

    assert (report.largest, report.mtu) == (65535, 65600)


def test_an_address_of_another_machine_fails() -> None:
    """With the node's own error, at once."""
    with probe("a", "b", ip="192.0.2.77") as a:
        out, _ = a.communicate(timeout=60)
    with pytest.raises(UnreadableAnswer, match=r"cannot listen at 192\.0\.2\.77: Cannot assign"):
        pairs.parse_probes(Answer(node="a", code=0, out=out))


def test_the_end_of_input_stops_the_probe() -> None:
    """The launcher has exited; without any input the probe continues (see the test with a late
    peer).
    """
    with probe("a", "b", deadline=60) as a:
        assert a.stdin is not None
        a.stdin.write(pairs.HOLD.decode())
        a.stdin.close()

        assert a.wait(timeout=60) == 1


def test_sigterm_stops_the_probe() -> None:
    """From `timeout` and `docker stop`."""
    with probe("a", "b", deadline=60) as a:
        while not _listens(IPS["a"], HIGH):
            time.sleep(0.02)
        a.send_signal(signal.SIGTERM)

        assert a.wait(timeout=60) == 143


def test_its_answer_is_a_line_of_json() -> None:
    """Without peers it exits at once."""
    with probe("a", "") as a:
        out, _ = a.communicate(timeout=60)

    assert json.loads(out) == {"node": "a", "mtu": 9000, "peers": {}}


def _listens(ip: str, port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((ip, port)) == 0
