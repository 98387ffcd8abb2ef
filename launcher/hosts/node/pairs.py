"""Runs on every node at the same time: listens, knocks at all the other nodes, and prints what
became of it as one JSON object.

Standard library only, for any Python from 3.6 on, because it runs with what the node has. Usage:
pairs.py JSON, with the keys node, ip, port (the high one), listen, mtu, deadline, patience, nonce,
peers ([{name, ip, ports}]).

It ends once all nodes are through, and at its deadline at the latest; it waits until then for a
node that it cannot reach in either direction. If a line comes on standard input, the end of that
input ends it as well. Without such a line its input says nothing (ssh and docker give it none).
"""

import contextlib
import errno
import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import typing

BULK = 1 << 20
STEP = 1 << 16
# SO_LINGER: close with a reset, so that no port is left in TIME_WAIT for the next one to bind
RESET = struct.pack("ii", 1, 0)
SMALL = 256  # bytes of the smallest IP packet tried
# Sizes that networks really have: tunnels, PPPoE, InfiniBand, jumbo frames, less what
# encapsulations take.
USUAL = (
    576,
    1280,
    1380,
    1400,
    1420,
    1450,
    1472,
    1480,
    1492,
    1500,
    2044,
    4092,
    4096,
    8900,
    8950,
    8972,
    9000,
)
HEAD = 28  # bytes of the headers of IPv4 and UDP; an inventory has no IPv6 addresses
# IP_PMTUDISC_PROBE: "do not fragment", whatever the kernel believes about the path (ip(7))
MTU_DISCOVER, PROBE = 10, 3
if typing.TYPE_CHECKING:
    # A connection under way: its port, its start, and where its port goes if it is refused
    Flight = tuple[int, float, dict[int, float] | None]


class Talk:
    """A connection at the high port, of either side: lines in both directions, the bulk being one
    very long line.
    """

    def __init__(self, probe: "Probe", sock: socket.socket, peer: str = "") -> None:
        self.probe, self.sock, self.peer = probe, sock, peer
        self.sending = threading.Lock()
        self.greeted, self.ended, self.arrived = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.stranger = False
        self.progress = time.monotonic()
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # before anything that reading may cause us to say
        self.say(f"vlaunch {probe.nonce} {probe.name}")
        threading.Thread(target=self.read, daemon=True).start()

    def say(self, line: str) -> None:
        """Send a line; not behind a bulk that hangs, because whoever waits for it would hang as
        well.
        """
        if not self.sending.acquire(timeout=1.0):
            return
        try:
            self.sock.sendall(line.encode() + b"\n")
        except OSError:
            pass
        finally:
            self.sending.release()

    def read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.receive()
        self.stranger = not self.greeted.is_set()
        self.ended.set()
        self.greeted.set()
        if self.peer and not self.stranger:
            self.probe.over(self.peer)  # its process has ended, it will not ask for anything

    def receive(self) -> None:
        """Hear line after line, until the other side ends or says what no probe of ours would."""
        buffer, received = b"", 0
        while True:
            data = self.sock.recv(STEP)
            if not data:
                return
            self.progress = time.monotonic()
            lines = (buffer + data).split(b"\n")
            buffer = lines.pop()
            if any(not self.hear(line) for line in lines):
                return
            if self.greeted.is_set() and buffer.startswith(b"bulk"):
                received += len(buffer)
                buffer = b"bulk"
                if received >= STEP:
                    received = 0
                    self.say("some")
            elif len(buffer) > 1000:
                return  # no probe of ours: those greet first, in a short line

    def hear(self, line: bytes) -> bool:
        if not self.greeted.is_set():
            fields = line.decode("utf-8", "replace").split(" ", 2)
            if fields[:2] != ["vlaunch", self.probe.nonce] or (self.peer or fields[2]) != fields[2]:
                return False
            self.peer = fields[2]
            self.probe.met(self)
            self.greeted.set()
        elif line.startswith(b"bulk"):
            self.say("all")
        elif line == b"all":
            self.arrived.set()
        elif line == b"over":
            self.probe.over(self.peer)
        return True

    def bulk(self, patience: float, deadline: float) -> bool:
        """Send a megabyte and tell whether all of it came; given up when nothing moves for
        `patience` seconds.
        """

        def send() -> None:
            with self.sending, contextlib.suppress(OSError):
                self.sock.sendall(b"bulk" + b"x" * (BULK - 5) + b"\n")

        self.progress = time.monotonic()
        threading.Thread(target=send, daemon=True).start()
        while not self.arrived.wait(0.05):
            now = time.monotonic()
            if self.ended.is_set() or now > deadline or now - self.progress > patience:
                break
        return self.arrived.is_set()


class Probe:
    """One node: what it holds open, whom it met, and what it saw of each peer."""

    def __init__(self, request: "dict[str, typing.Any]") -> None:
        self.name, self.ip, self.port, self.nonce = (
            request["node"],
            request["ip"],
            request["port"],
            request["nonce"],
        )
        self.mtu: int = request["mtu"]
        self.patience: float = request["patience"]
        self.end = time.monotonic() + request["deadline"]
        self.peers: list[dict[str, typing.Any]] = request["peers"]
        self.state = threading.Condition()
        self.talks: dict[str, list[Talk]] = {}
        self.finished: set[str] = set()
        self.through = 0
        self.seen: dict[str, dict[str, typing.Any]] = {
            peer["name"]: {"ports": {}, "errors": {}, "bulk": None, "largest": None}
            for peer in self.peers
        }
        self.heard: set[str] = set()
        self.doors = selectors.DefaultSelector()
        for port in request["listen"]:
            # In use is fine: a connection to whoever has it proves as much.
            with contextlib.suppress(OSError):
                self.listen(port, "door")
        self.datagrams = self.bind_socket(socket.SOCK_DGRAM, self.port)
        self.datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self.listen(self.port, "high")  # last: who is greeted there may rely on the other ports

    def bind_socket(self, kind: int, port: int = 0) -> socket.socket:
        sock = socket.socket(socket.AF_INET, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((self.ip, port))
        return sock

    def listen(self, port: int, kind: str) -> None:
        sock = self.bind_socket(socket.SOCK_STREAM, port)
        sock.listen(1024)
        sock.setblocking(False)
        self.doors.register(sock, selectors.EVENT_READ, kind)

    def keep_doors(self) -> None:
        """Accept connections.

        Those at plain ports stay until the other side has closed them, which it does with a reset.
        """
        while True:
            for key, _ in self.doors.select():
                sock: typing.Any = key.fileobj
                try:
                    if key.data == "guest":
                        self.doors.unregister(sock)
                        sock.close()
                        continue
                    client = sock.accept()[0]
                    if key.data == "high":
                        Talk(self, client)
                    else:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                        self.doors.register(client, selectors.EVENT_READ, "guest")
                except OSError:
                    # too many open files, or a guest that has gone: never a busy loop
                    time.sleep(0.01)

    def answer_datagrams(self) -> None:
        while True:
            try:
                data, sender = self.datagrams.recvfrom(1 << 16)
                nonce, name, size = data.split(b"|", 3)[:3]
                if nonce.decode() == self.nonce:
                    self.heard.add(name.decode())
                    self.datagrams.sendto(nonce + b"|" + size, sender)
            except (OSError, ValueError):
                continue

    def met(self, connection: Talk) -> None:
        with self.state:
            self.talks.setdefault(connection.peer, []).append(connection)
            completed = self.through == len(self.peers)
        if completed:
            connection.say("over")

    def over(self, name: str) -> None:
        with self.state:
            self.finished.add(name)
            self.state.notify_all()

    def knock(self, peer: "dict[str, typing.Any]") -> None:
        result = self.seen[peer["name"]]
        # Datagrams come after the connections and need two seconds at most; their time is kept
        # free.
        deadline = max(self.end - 2.5, time.monotonic() + 0.5)
        connection = None
        try:
            connection = self.connect(peer, result, deadline)
            if connection is not None:
                result["bulk"] = connection.bulk(self.patience, deadline)
            result["largest"] = self.largest(peer["ip"])
        except OSError as error:
            result["errors"]["0"] = error.strerror or str(error)
        with self.state:
            self.through += 1
            completed = self.through == len(self.peers)
            connections = [
                connection for talks in self.talks.values() for connection in talks if completed
            ]
            self.state.notify_all()
        for connection in connections:
            connection.say("over")

    def connect(
        self, peer: "dict[str, typing.Any]", result: "dict[str, typing.Any]", deadline: float
    ) -> "Talk | None":
        """Try all ports at once until each has its answer; return the talk at the high port, if
        there is one.
        """
        remaining = dict.fromkeys([self.port, *peer["ports"]], 0.0)
        pending: dict[socket.socket, Flight] = {}
        connection = None
        while (remaining or pending) and time.monotonic() < deadline:
            now = time.monotonic()
            # Refused may only mean that the peer had not begun: unless we had met it before we
            # knocked, we come again.
            retry = None if peer["name"] in self.talks else remaining
            for port in due(remaining, now):
                del remaining[port]
                sock, code = self.dial(peer["ip"], port)
                if code in (0, errno.EINPROGRESS):
                    pending[sock] = (port, now, retry)
                else:
                    self.landed(result, port, code, retry)
                    sock.close()
            for sock in ready(list(pending), 0.02):
                connection = self.answered(peer, result, sock, pending.pop(sock)) or connection
            self.drop_slow(pending, result)
        for sock, (port, _, _) in pending.items():
            result["ports"].setdefault(str(port), "timed out")
            sock.close()
        return connection

    def dial(self, ip: str, port: int) -> "tuple[socket.socket, int]":
        """Begin a connection; return its socket, and how far it came as an error number."""
        sock = self.bind_socket(socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        return sock, sock.connect_ex((ip, port))

    def answered(
        self,
        peer: "dict[str, typing.Any]",
        result: "dict[str, typing.Any]",
        sock: socket.socket,
        pending: "Flight",
    ) -> "Talk | None":
        """Note what became of a connection that was begun; return the talk, where it stands at the
        high port.
        """
        port, _, retry = pending
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.landed(result, port, code, retry)
        if port == self.port and not code:
            return self.greet(peer, result, sock)
        sock.close()
        return None

    def drop_slow(
        self, pending: "dict[socket.socket, Flight]", result: "dict[str, typing.Any]"
    ) -> None:
        """Give up those connections that have had no answer for as long as we are patient."""
        for sock, (port, started, _) in list(pending.items()):
            if time.monotonic() - started > self.patience:
                del pending[sock]
                result["ports"][str(port)] = "timed out"
                sock.close()

    def landed(
        self,
        result: "dict[str, typing.Any]",
        port: int,
        code: int,
        retry: "dict[int, float] | None",
    ) -> None:
        """Note what became of a connection; `again` takes the port of one that was refused, if it
        may be tried once more.
        """
        result["errors"].pop(str(port), None)
        if code in (0, errno.ECONNRESET):  # a reset comes after the connection stood
            result["ports"][str(port)] = "open"
            return
        result["errors"][str(port)] = os.strerror(code)
        states = {errno.ECONNREFUSED: "refused", errno.ETIMEDOUT: "timed out"}
        routes = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
        result["ports"][str(port)] = states.get(code, "no route" if code in routes else "error")
        if code == errno.ECONNREFUSED and retry is not None:
            retry[port] = time.monotonic() + 0.05

    def greet(
        self, peer: "dict[str, typing.Any]", result: "dict[str, typing.Any]", sock: socket.socket
    ) -> "Talk | None":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        connection = Talk(self, sock, peer["name"])
        if connection.greeted.wait(self.patience) and not connection.stranger:
            return connection
        result["ports"][str(self.port)] = "error"
        result["errors"][str(self.port)] = (
            "something else answers there"
            if connection.stranger
            else "connected, but the probe there did not answer"
        )
        return None

    def largest(self, ip: str) -> "int | None":
        """Return the size of the largest IP packet that comes through in one piece, at most the
        MTU; None when none does.
        """
        with self.bind_socket(socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.IPPROTO_IP, MTU_DISCOVER, PROBE)
            if self.passed(sock, ip, [self.mtu]):
                return self.mtu
            below = self.largest_below(sock, ip)
            # A loaded node may have lost all three of the first: nothing is called broken that
            # passes now.
            if below is not None and self.passed(sock, ip, [self.mtu]):
                return self.mtu
            return below

    def largest_below(self, sock: socket.socket, ip: str) -> "int | None":
        """Return the largest size below the MTU that passes: a usual one first, then sixteen
        between it and the next at a time. None when not even a small one does.
        """
        low, high = 0, self.mtu
        sizes = [SMALL] + [size for size in USUAL if SMALL < size < self.mtu]
        while high - low > 1 and time.monotonic() < self.end:
            acknowledged = self.passed(sock, ip, sizes)
            if not acknowledged and not low:
                return None
            low = max([*acknowledged, low])
            high = min([size for size in sizes if size > low] + [high])
            sizes = sorted(
                {low + max(1, (high - low) * part // 17) for part in range(1, 17)} - {low, high}
            )
        return low

    def passed(self, sock: socket.socket, ip: str, sizes: "list[int]") -> "list[int]":
        """Send a datagram of each size, up to three times, and return those that were
        acknowledged.
        """
        missing, deadline = set(sizes), time.monotonic()
        for wait in (0.1, 0.2, 0.4):
            for size in sorted(missing):
                packet = f"{self.nonce}|{self.name}|{size}|".encode()
                # EMSGSIZE: our own interface is smaller; refused: an earlier one was
                with contextlib.suppress(OSError):
                    sock.sendto(packet.ljust(size - HEAD, b"."), (ip, self.port))
                if len(missing) > 1:
                    # a burst of large ones would overflow the other side's buffer
                    time.sleep(0.001)
            deadline += wait
            self.hear_back(sock, missing, deadline)
            if not missing:
                break
        return [size for size in sizes if size not in missing]

    def hear_back(self, sock: socket.socket, missing: "set[int]", deadline: float) -> None:
        """Take the sizes that are acknowledged out of `missing`, as long as there are some."""
        while missing and ready_to_read(sock, deadline - time.monotonic()):
            try:
                nonce, size = sock.recv(1 << 16).split(b"|")
            except (OSError, ValueError):
                continue
            if nonce.decode() == self.nonce:
                missing.discard(int(size))

    def run(self) -> "dict[str, object]":
        for loop in (self.keep_doors, self.answer_datagrams):
            threading.Thread(target=loop, daemon=True).start()
        for peer in self.peers:
            threading.Thread(target=self.knock, args=(peer,), daemon=True).start()
        with self.state:
            self.wait_for_all()
        for name, result in self.seen.items():
            result["heard"] = name in self.heard or name in self.talks
        return {"node": self.name, "mtu": self.mtu, "peers": self.seen}

    def wait_for_all(self) -> None:
        """Wait until we and all peers are through, or the time is over; `state` is held."""
        names = {peer["name"] for peer in self.peers}
        while self.through < len(self.peers) or not names <= self.finished:
            remaining = self.end - time.monotonic()
            if remaining <= 0:
                return
            # In short turns: a signal's handler runs only while this thread does.
            self.state.wait(min(remaining, 0.2))


def due(times: "dict[int, float]", now: float) -> "list[int]":
    """Return the keys whose time has come, as a list: `times` may change meanwhile."""
    return [key for key, time_due in times.items() if time_due <= now]


def ready(socks: "list[socket.socket]", seconds: float) -> "list[socket.socket]":
    """Return those that are connected or failed."""
    poll = select.poll()
    by_number = {sock.fileno(): sock for sock in socks}
    for number in by_number:
        poll.register(number, select.POLLOUT)
    return [by_number[number] for number, _ in poll.poll(seconds * 1000)]


def ready_to_read(sock: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(seconds, 0) * 1000))


def end_with_input() -> None:
    """Leave when the input ends after a line; input without any line says nothing."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stdin.readline():
            while sys.stdin.readline():
                pass
            os._exit(1)


def main() -> None:
    request = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    threading.Thread(target=end_with_input, daemon=True).start()
    try:
        report = Probe(request).run()
    except OSError as error:
        report = {
            "node": request["node"],
            "error": f"cannot listen at {request['ip']}: {error.strerror or error}",
        }
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads that wait for the network do not keep the process


if __name__ == "__main__":
    main()
