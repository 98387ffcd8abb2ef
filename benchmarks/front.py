"""The front against direct access, and its users during attacks, on loopback with a real HAProxy.

Behind the front is a stand-in of a server, which answers short requests at once. A round of the
first part measures all candidates in alternation; a round of the second one measures a user's short
requests before and during each attack. Attackers share this machine's cores with the front.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from launcher.app.certificates import make_certificate
from launcher.core.domain import FrontSettings, TlsSettings
from launcher.front.configuration import FrontServer, Replica
from tests.front.running import OFF, Running, wait_for
from tests.ports import free_port

STREAMS, PARTS, GAP = 200, 8, 0.5
FIRST = 0.01  # seconds until the first event of a stream: as fast as small models on fast GPUs
SPREAD = 4.0  # seconds in which all streams start; each takes PARTS × GAP seconds
RATE = 25  # requests per second of the user during an attack
IDLE = 10_000
_ANSWER = json.dumps({"choices": [{"message": {"content": "x" * 200}}]}).encode()
_TICKS = 100  # of CPU time per second in /proc


async def serve(port: int) -> None:
    """Answer requests as a server does, without a model; with `stream`, PARTS events."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            closing = False
            while not closing:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1]) if length else 0)
                closing = b"stream" in body or b"connection: close" in head.lower()
                if b"stream" not in body:
                    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(_ANSWER)
                    writer.write(head + _ANSWER)
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
                    writer.write(b"Connection: close\r\n\r\n")
                    await asyncio.sleep(FIRST)
                    for _ in range(PARTS):
                        writer.write(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
                        await asyncio.sleep(GAP)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


@dataclass(frozen=True, kw_only=True)
class Target:
    """A way to the server: its port, with TLS or without, and a key."""

    name: str
    port: int
    path: str = "/chat/v1/completions"
    key: str = ""
    tls: ssl.SSLContext | None = None

    def request(self, body: bytes = b"{}") -> bytes:
        """Return the bytes of a request."""
        lines = (
            f"POST {self.path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Authorization: Bearer {self.key}",
            f"Content-Length: {len(body)}",
        )
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def time_requests(self, count: int) -> list[float]:
        """Return the seconds of short requests, one after another on one connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = self.tls.wrap_socket(plain) if self.tls else plain
            times = [self._time_request(client) for _ in range(count)]
            client.close()
        return times

    def _time_request(self, client: socket.socket) -> float:
        began = time.perf_counter()
        client.sendall(self.request())
        received = b""
        while not received.endswith(_ANSWER):
            data = client.recv(65536)
            received += data
            if not data or not received.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"{self.name}: {received[:200]!r}")
        return time.perf_counter() - began

    async def time_stream(self) -> float:
        """Return the seconds until the first event of a stream, which it reads to its end, on a
        connection that had a request before.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.tls)
        writer.write(self.request())
        await reader.readuntil(_ANSWER)
        await asyncio.sleep(random.random() * SPREAD)
        began = time.perf_counter()
        writer.write(self.request(b'{"stream": true}'))
        await reader.readuntil(b"data: ")
        seconds = time.perf_counter() - began
        await reader.read()
        writer.close()
        return seconds


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of all values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def cpu_seconds(front: Running) -> float:
    """Return the CPU time of HAProxy's workers so far."""
    assert front.process is not None
    pids = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(front.process.pid)], check=True, capture_output=True
    ).stdout.split()
    stats = [Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / _TICKS


@contextlib.contextmanager
def start_front(port: int, tls: TlsSettings = OFF) -> Iterator[Running]:
    """Start a front for the server at a port."""
    folder = Path(tempfile.mkdtemp(prefix="front-"))
    folder.chmod(0o755)
    (folder / "tls.pem").write_text(make_certificate("127.0.0.1", ["127.0.0.1"]))
    settings = FrontSettings(bind="127.0.0.1", port=free_port(), metrics=free_port(), tls=tls)
    server = FrontServer(name="chat", replicas=(Replica(name="chat", address=f"127.0.0.1:{port}"),))
    front = Running(folder=folder, settings=settings, servers=(server,))
    try:
        front.start()
        front.add_key("alice")
        front.add_key("mallory")
        yield front
    finally:
        front.stop()
        shutil.rmtree(folder)


@contextlib.contextmanager
def start_program(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run this file with other arguments until the block ends."""
    command = [sys.executable, "-m", "benchmarks.front", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@dataclass(kw_only=True)
class Measurement:
    """Results of one way to the server."""

    short: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def measure_ways(rounds: int, requests: int) -> str:
    """Compare direct access with the front, and return a table."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        stack.enter_context(start_program("--stand-in", port))
        wait_for(lambda: not socket.create_connection(("127.0.0.1", port)).close())
        plain = stack.enter_context(start_front(port))
        secure = stack.enter_context(start_front(port, TlsSettings()))
        context = ssl.create_default_context(cadata=(secure.folder / "tls.pem").read_text())
        context.check_hostname = False
        ways: list[tuple[Target, Running | None]] = [
            (Target(name="direct", port=port), None),
            (Target(name="front, `tls: off`", port=plain.settings.port, key="sk-alice"), plain),
            (
                Target(name="front", port=secure.settings.port, key="sk-alice", tls=context),
                secure,
            ),
        ]
        results = {target.name: Measurement() for target, _ in ways}
        for _ in range(rounds):
            for target, front in random.sample(ways, len(ways)):
                result = results[target.name]
                before = cpu_seconds(front) if front else 0.0
                result.short += target.time_requests(requests + 1)[1:]
                if front:
                    result.cpu.append((cpu_seconds(front) - before) / requests * 1000)
            for target, _ in random.sample(ways, len(ways)):
                results[target.name].first += asyncio.run(_time_streams(target))
    return ways_table(results)


async def _time_streams(target: Target) -> list[float]:
    return await asyncio.gather(*(target.time_stream() for _ in range(STREAMS)))


def ways_table(results: dict[str, Measurement]) -> str:
    """Return a Markdown table; the first way is the one to compare with."""
    direct = next(iter(results.values()))
    lines = [
        "| | short request p50 / p99, ms | added, ms | first token of 200 streams p50 / p99, ms"
        " | ratio | CPU s per 1,000 requests |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        cells = [name]
        for values, base, difference in (
            (result.short, direct.short, True),
            (result.first, direct.first, False),
        ):
            own, other = ([percentile(v, s) * 1000 for s in (0.5, 0.99)] for v in (values, base))
            cells.append(" / ".join(f"{value:.2f}" for value in own))
            compared = (
                [f"{a - b:.2f}" for a, b in zip(own, other, strict=True)]
                if difference
                else [f"{a / b:.2f}×" for a, b in zip(own, other, strict=True)]
            )
            cells.append("" if result is direct else " / ".join(compared))
        cells.append(f"{median(result.cpu):.2f}" if result.cpu else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


class Attack:
    """An attack on a port, with the statuses that the attacker gets."""

    def __init__(self, port: int) -> None:
        self.port, self.statuses, self.opened = port, Counter[str](), 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect from an address other than the user's."""
        connection = await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=("127.0.0.2", 0)
        )
        self.opened += 1
        return connection

    async def send(self, *parts: bytes, pause: float = 0.0) -> None:
        """Send parts of a request, and count the status of the answer."""
        try:
            reader, writer = await self.connect()
        except OSError:
            self.statuses["refused"] += 1
            return
        answer = asyncio.ensure_future(reader.readline())  # before a reset discards it
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                if answer.done():
                    break
                if pause:
                    await asyncio.sleep(pause)
        except OSError:
            pass
        try:
            line = await answer
        except OSError:
            line = b""
        finally:
            writer.close()
        self.statuses[line.split(b" ")[1].decode() if b" " in line else "closed"] += 1

    async def repeat(self, rate: float, *requests: bytes) -> None:
        """Send one of the requests in turn, `rate` times per second."""
        tasks, began = set[asyncio.Task[None]](), time.monotonic()
        for number in range(10**9):
            tasks.add(asyncio.create_task(self.send(requests[number % len(requests)])))
            tasks = {task for task in tasks if not task.done()}
            await asyncio.sleep(max(0.0, began + (number + 1) / rate - time.monotonic()))

    async def hold(self, count: int, *parts: bytes, pause: float = 0.0) -> None:
        """Keep `count` connections open, each of which sends parts, and again when it ends."""

        async def again() -> None:
            while True:
                await self.send(*parts, pause=pause)

        tasks = []
        for number in range(count):
            tasks.append(asyncio.create_task(again()))
            if number % 100 == 99:
                await asyncio.sleep(0.02)
        await asyncio.gather(*tasks)


_HEAD = b"POST /chat/v1/completions HTTP/1.1\r\nHost: x\r\n"
_KEY = b"Authorization: Bearer sk-mallory\r\n"
_GIGABYTE = (_HEAD + _KEY + b"Content-Length: 1000000000\r\n\r\n", *[b"x" * 2**20] * 954)
_BOMB = _HEAD + b"".join(b"X-%d: %s\r\n" % (n, b"y" * 100) for n in range(1000)) + b"\r\n"
_CONFLICT = (
    _HEAD + _KEY + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\nhello",
    _HEAD
    + _KEY
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
)
ATTACKS: dict[str, tuple[str, Callable[[Attack], object]]] = {
    "slow": (
        "500 connections with a header byte per second",
        lambda attack: attack.hold(500, *[bytes([byte]) for byte in _HEAD * 9], pause=1.0),
    ),
    "bodies": ("8 bodies of 1 GB at once, with a key", lambda attack: attack.hold(8, *_GIGABYTE)),
    "idle": (f"{IDLE:,} idle connections", lambda attack: attack.hold(IDLE)),
    "bombs": ("100 header bombs of 107 kB per second", lambda attack: attack.repeat(100, _BOMB)),
    "lengths": (
        "200 requests per second with conflicting lengths",
        lambda attack: attack.repeat(200, *_CONFLICT),
    ),
    "guesses": (
        "1,000 wrong keys per second",
        lambda attack: attack.repeat(1000, _HEAD + b"Authorization: Bearer sk-x\r\n\r\n"),
    ),
}


async def run_attack(name: str, port: int, seconds: float) -> None:
    """Attack a port for a time, then print the number of connections and the statuses."""
    attack = Attack(port)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(ATTACKS[name][1](attack), seconds)  # type: ignore[arg-type]
    print(json.dumps({"opened": attack.opened, "statuses": dict(attack.statuses)}), flush=True)


def time_user(target: Target, seconds: float) -> list[float]:
    """Return the seconds of each of a user's requests at RATE."""
    began, times = time.monotonic(), []
    while time.monotonic() - began < seconds:
        start = time.monotonic()
        target.time_requests(1)
        times.append(time.monotonic() - start)
        time.sleep(max(0.0, began + len(times) / RATE - time.monotonic()))
    return times


@dataclass(kw_only=True)
class Outcome:
    """A user's requests before and during an attack, and what the attacker got."""

    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    opened: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    memory: int = 0


def measure_attacks(rounds: int, seconds: float, names: Sequence[str]) -> str:
    """Measure a user's requests before and during attacks, and return a table."""
    outcomes = {name: Outcome() for name in names}
    with contextlib.ExitStack() as stack:
        port = free_port()
        stack.enter_context(start_program("--stand-in", port))
        wait_for(lambda: not socket.create_connection(("127.0.0.1", port)).close())
        for _ in range(rounds):
            for name, outcome in outcomes.items():
                with start_front(port) as front:
                    target = Target(name="user", port=front.settings.port, key="sk-alice")
                    outcome.before += time_user(target, seconds)
                    arguments = ("--attack", name, front.settings.port, seconds + 3)
                    with start_program(*arguments) as attacker:
                        time.sleep(3)
                        outcome.during += time_user(target, seconds)
                        outcome.memory = max(outcome.memory, _memory(front))
                        result = json.loads(attacker.communicate()[0])
                    outcome.opened += result["opened"]
                    outcome.statuses.update(result["statuses"])
    return attacks_table(outcomes)


def _memory(front: Running) -> int:
    assert front.process is not None
    text = subprocess.run(
        ["ps", "-o", "rss=", "--ppid", str(front.process.pid)], check=True, capture_output=True
    ).stdout
    return max(map(int, text.split()), default=0) // 1024


def attacks_table(outcomes: dict[str, Outcome]) -> str:
    """Return a Markdown table."""
    lines = [
        "| attack | user's p99 before, ms | during | ratio | p50 before | during | connections"
        " | attacker's answers | HAProxy, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, outcome in outcomes.items():
        (p50, p99), (later50, later99) = (
            [percentile(values, share) * 1000 for share in (0.5, 0.99)]
            for values in (outcome.before, outcome.during)
        )
        answers = ", ".join(f"{n:,} × {status}" for status, n in outcome.statuses.most_common())
        lines.append(
            f"| {ATTACKS[name][0]} | {p99:.1f} | {later99:.1f} | {later99 / p99:.1f}× | {p50:.1f} |"
            f" {later50:.1f} | {outcome.opened:,} | {answers or 'none'} | {outcome.memory} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=300, help="short requests per round")
    parser.add_argument("--seconds", type=float, default=10, help="of each attack in a round")
    parser.add_argument("--only", choices=("ways", "attacks", *ATTACKS))
    parser.add_argument("--stand-in", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--attack", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stand_in:
        asyncio.run(serve(options.stand_in))
    if options.attack:
        name, port, seconds = options.attack
        asyncio.run(run_attack(name, int(port), float(seconds)))
        return
    if options.only in (None, "ways"):
        print(measure_ways(options.rounds, options.requests), flush=True)
    if options.only != "ways":
        names = [options.only] if options.only in ATTACKS else [*ATTACKS]
        print(measure_attacks(min(options.rounds, 2), options.seconds, names))
        print(f"\nOpen files: at most {resource.getrlimit(resource.RLIMIT_NOFILE)[1]:,}.")


if __name__ == "__main__":
    main()
