"""Connection probe: listens, connects to all other nodes and prints the results as one JSON object.

Standard library only, Python 3.6 or newer: it runs on the node. Usage: pairs.py JSON, with the keys
node, ip, port (the high one), listen, mtu, deadline, patience, nonce, peers ([{name, ip, ports}]).

It exits when all nodes are done, or at its deadline, until which it waits for unreachable nodes. If
a line arrives on standard input, the end of that input ends it too; without a line, input is
ignored (ssh and docker provide none).
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

BULK_BYTES = 1 << 20
CHUNK_BYTES = 1 << 16
# SO_LINGER: close with a reset, to leave no port in TIME_WAIT for the next bind
RESET = struct.pack("ii", 1, 0)
MIN_PACKET = 256  # bytes of the smallest IP packet to try
# Common packet sizes: tunnels, PPPoE, InfiniBand and jumbo frames, minus encapsulation.
COMMON_SIZES = (
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
HEADER_BYTES = 28  # IPv4 and UDP; inventories have no IPv6 addresses
# IP_PMTUDISC_PROBE: "do not fragment", ignoring the known path MTU (ip(7))
MTU_DISCOVER, PROBE = 10, 3
if typing.TYPE_CHECKING:
    # A pending connection: its port, its start, and the ports to retry after a refusal
    PendingConnection = tuple[int, float, dict[int, float] | None]


class PeerConnection:
    """A connection at the high port, from either side; the bulk transfer is one very long line."""

    def __init__(self, probe: "PortProber", sock: socket.socket, peer: str = "") -> None:
        self.probe, self.sock, self.peer = probe, sock, peer
        self.send_lock = threading.Lock()
        self.greeted, self.closed, self.bulk_received = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.is_foreign = False
        self.last_progress = time.monotonic()
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # before reading, which may send replies
        self.send_line(f"vlaunch {probe.nonce} {probe.name}")
        threading.Thread(target=self.run, daemon=True).start()

    def send_line(self, line: str) -> None:
        """Send a line, unless a stalled bulk transfer blocks the socket."""
        if not self.send_lock.acquire(timeout=1.0):
            return
        try:
            self.sock.sendall(line.encode() + b"\n")
        except OSError:
            pass
        finally:
            self.send_lock.release()

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.read_lines()
        self.is_foreign = not self.greeted.is_set()
        self.closed.set()
        self.greeted.set()
        if self.peer and not self.is_foreign:
            self.probe.mark_finished(self.peer)  # its process has exited and needs nothing more

    def read_lines(self) -> None:
        """Handle lines until the peer closes or violates the protocol."""
        buffer, received = b"", 0
        while True:
            data = self.sock.recv(CHUNK_BYTES)
            if not data:
                return
            self.last_progress = time.monotonic()
            lines = (buffer + data).split(b"\n")
            buffer = lines.pop()
            if any(not self.handle_line(line) for line in lines):
                return
            if self.greeted.is_set() and buffer.startswith(b"bulk"):
                received += len(buffer)
                buffer = b"bulk"
                if received >= CHUNK_BYTES:
                    received = 0
                    self.send_line("some")
            elif len(buffer) > 1000:
                return  # not our probe, which greets with a short line first

    def handle_line(self, line: bytes) -> bool:
        if not self.greeted.is_set():
            fields = line.decode("utf-8", "replace").split(" ", 2)
            if fields[:2] != ["vlaunch", self.probe.nonce] or (self.peer or fields[2]) != fields[2]:
                return False
            self.peer = fields[2]
            self.probe.add_connection(self)
            self.greeted.set()
        elif line.startswith(b"bulk"):
            self.send_line("all")
        elif line == b"all":
            self.bulk_received.set()
        elif line == b"over":
            self.probe.mark_finished(self.peer)
        return True

    def send_bulk(self, patience: float, deadline: float) -> bool:
        """Send a megabyte and return its arrival; give up after `patience` seconds of silence."""

        def send() -> None:
            with self.send_lock, contextlib.suppress(OSError):
                self.sock.sendall(b"bulk" + b"x" * (BULK_BYTES - 5) + b"\n")

        self.last_progress = time.monotonic()
        threading.Thread(target=send, daemon=True).start()
        while not self.bulk_received.wait(0.05):
            now = time.monotonic()
            if self.closed.is_set() or now > deadline or now - self.last_progress > patience:
                break
        return self.bulk_received.is_set()


class PortProber:
    """State of one node: listeners, connections and results by peer."""

    def __init__(self, request: "dict[str, typing.Any]") -> None:
        self.name, self.ip, self.port, self.nonce = (
            request["node"],
            request["ip"],
            request["port"],
            request["nonce"],
        )
        self.mtu: int = request["mtu"]
        self.patience: float = request["patience"]
        self.deadline = time.monotonic() + request["deadline"]
        self.peers: list[dict[str, typing.Any]] = request["peers"]
        self.state = threading.Condition()
        self.connections: dict[str, list[PeerConnection]] = {}
        self.finished: set[str] = set()
        self.completed = 0
        self.results: dict[str, dict[str, typing.Any]] = {
            peer["name"]: {"ports": {}, "errors": {}, "bulk": None, "largest": None}
            for peer in self.peers
        }
        self.senders: set[str] = set()
        self.listeners = selectors.DefaultSelector()
        for port in request["listen"]:
            # A port in use is fine: its listener accepts connections as well.
            with contextlib.suppress(OSError):
                self.listen(port, "door")
        self.datagrams = self.bind_socket(socket.SOCK_DGRAM, self.port)
        self.datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self.listen(self.port, "high")  # last: a greeting implies that the other ports are open

    def bind_socket(self, kind: int, port: int = 0) -> socket.socket:
        sock = socket.socket(socket.AF_INET, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((self.ip, port))
        return sock

    def listen(self, port: int, kind: str) -> None:
        sock = self.bind_socket(socket.SOCK_STREAM, port)
        sock.listen(1024)
        sock.setblocking(False)
        self.listeners.register(sock, selectors.EVENT_READ, kind)

    def accept_connections(self) -> None:
        """Accept connections; at plain ports they stay open until the peer resets them."""
        while True:
            for key, _ in self.listeners.select():
                sock: typing.Any = key.fileobj
                try:
                    if key.data == "guest":
                        self.listeners.unregister(sock)
                        sock.close()
                        continue
                    client = sock.accept()[0]
                    if key.data == "high":
                        PeerConnection(self, client)
                    else:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                        self.listeners.register(client, selectors.EVENT_READ, "guest")
                except OSError:
                    # too many open files, or the client has gone: avoid a busy loop
                    time.sleep(0.01)

    def answer_datagrams(self) -> None:
        while True:
            try:
                data, sender = self.datagrams.recvfrom(1 << 16)
                nonce, name, size = data.split(b"|", 3)[:3]
                if nonce.decode() == self.nonce:
                    self.senders.add(name.decode())
                    self.datagrams.sendto(nonce + b"|" + size, sender)
            except (OSError, ValueError):
                continue

    def add_connection(self, connection: PeerConnection) -> None:
        with self.state:
            self.connections.setdefault(connection.peer, []).append(connection)
            completed = self.completed == len(self.peers)
        if completed:
            connection.send_line("over")

    def mark_finished(self, name: str) -> None:
        with self.state:
            self.finished.add(name)
            self.state.notify_all()

    def probe_peer(self, peer: "dict[str, typing.Any]") -> None:
        result = self.results[peer["name"]]
        # Reserve time for the datagrams, which need two seconds at most.
        deadline = max(self.deadline - 2.5, time.monotonic() + 0.5)
        connection = None
        try:
            connection = self.probe_ports(peer, result, deadline)
            if connection is not None:
                result["bulk"] = connection.send_bulk(self.patience, deadline)
            result["largest"] = self.largest_packet(peer["ip"])
        except OSError as error:
            result["errors"]["0"] = error.strerror or str(error)
        with self.state:
            self.completed += 1
            completed = self.completed == len(self.peers)
            connections = [
                connection
                for talks in self.connections.values()
                for connection in talks
                if completed
            ]
            self.state.notify_all()
        for connection in connections:
            connection.send_line("over")

    def probe_ports(
        self, peer: "dict[str, typing.Any]", result: "dict[str, typing.Any]", deadline: float
    ) -> "PeerConnection | None":
        """Connect to all ports until each has a result; return the high port's connection."""
        remaining = dict.fromkeys([self.port, *peer["ports"]], 0.0)
        pending: dict[socket.socket, PendingConnection] = {}
        connection = None
        while (remaining or pending) and time.monotonic() < deadline:
            now = time.monotonic()
            # Retry a refusal, which may precede the peer's start, unless the peer has connected.
            retry = None if peer["name"] in self.connections else remaining
            for port in due_ports(remaining, now):
                del remaining[port]
                sock, code = self.start_connection(peer["ip"], port)
                if code in (0, errno.EINPROGRESS):
                    pending[sock] = (port, now, retry)
                else:
                    self.record_result(result, port, code, retry)
                    sock.close()
            for sock in ready_sockets(list(pending), 0.02):
                connection = (
                    self.finish_connection(peer, result, sock, pending.pop(sock)) or connection
                )
            self.drop_timed_out(pending, result)
        for sock, (port, _, _) in pending.items():
            result["ports"].setdefault(str(port), "timed out")
            sock.close()
        return connection

    def start_connection(self, ip: str, port: int) -> "tuple[socket.socket, int]":
        """Start a connection; return its socket and its error number."""
        sock = self.bind_socket(socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        return sock, sock.connect_ex((ip, port))

    def finish_connection(
        self,
        peer: "dict[str, typing.Any]",
        result: "dict[str, typing.Any]",
        sock: socket.socket,
        pending: "PendingConnection",
    ) -> "PeerConnection | None":
        """Record the result of an attempt; return the connection if at the high port."""
        port, _, retry = pending
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.record_result(result, port, code, retry)
        if port == self.port and not code:
            return self.exchange_greetings(peer, result, sock)
        sock.close()
        return None

    def drop_timed_out(
        self, pending: "dict[socket.socket, PendingConnection]", result: "dict[str, typing.Any]"
    ) -> None:
        """Drop connections without an answer for `patience` seconds."""
        for sock, (port, started, _) in list(pending.items()):
            if time.monotonic() - started > self.patience:
                del pending[sock]
                result["ports"][str(port)] = "timed out"
                sock.close()

    def record_result(
        self,
        result: "dict[str, typing.Any]",
        port: int,
        code: int,
        retry: "dict[int, float] | None",
    ) -> None:
        """Record the result of a connection; `retry` collects refused ports to try again."""
        result["errors"].pop(str(port), None)
        if code in (0, errno.ECONNRESET):  # a reset follows an established connection
            result["ports"][str(port)] = "open"
            return
        result["errors"][str(port)] = os.strerror(code)
        states = {errno.ECONNREFUSED: "refused", errno.ETIMEDOUT: "timed out"}
        routes = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
        result["ports"][str(port)] = states.get(code, "no route" if code in routes else "error")
        if code == errno.ECONNREFUSED and retry is not None:
            retry[port] = time.monotonic() + 0.05

    def exchange_greetings(
        self, peer: "dict[str, typing.Any]", result: "dict[str, typing.Any]", sock: socket.socket
    ) -> "PeerConnection | None":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        connection = PeerConnection(self, sock, peer["name"])
        if connection.greeted.wait(self.patience) and not connection.is_foreign:
            return connection
        result["ports"][str(self.port)] = "error"
        result["errors"][str(self.port)] = (
            "another program answers"
            if connection.is_foreign
            else "connected, but the probe did not answer"
        )
        return None

    def largest_packet(self, ip: str) -> "int | None":
        """Return the largest unfragmented IP packet up to the MTU; None if none arrives."""
        with self.bind_socket(socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.IPPROTO_IP, MTU_DISCOVER, PROBE)
            if self.acknowledged_sizes(sock, ip, [self.mtu]):
                return self.mtu
            below = self.largest_below(sock, ip)
            # A loaded node may have dropped the first three: try the MTU again.
            if below is not None and self.acknowledged_sizes(sock, ip, [self.mtu]):
                return self.mtu
            return below

    def largest_below(self, sock: socket.socket, ip: str) -> "int | None":
        """Return the largest passing size below the MTU: try common sizes, then sixteen at a time
        between two of them. None if even the smallest fails.
        """
        low, high = 0, self.mtu
        sizes = [MIN_PACKET] + [size for size in COMMON_SIZES if MIN_PACKET < size < self.mtu]
        while high - low > 1 and time.monotonic() < self.deadline:
            acknowledged = self.acknowledged_sizes(sock, ip, sizes)
            if not acknowledged and not low:
                return None
            low = max([*acknowledged, low])
            high = min([size for size in sizes if size > low] + [high])
            sizes = sorted(
                {low + max(1, (high - low) * part // 17) for part in range(1, 17)} - {low, high}
            )
        return low

    def acknowledged_sizes(self, sock: socket.socket, ip: str, sizes: "list[int]") -> "list[int]":
        """Send a datagram of each size up to three times; return the acknowledged sizes."""
        missing, deadline = set(sizes), time.monotonic()
        for wait in (0.1, 0.2, 0.4):
            for size in sorted(missing):
                packet = f"{self.nonce}|{self.name}|{size}|".encode()
                # EMSGSIZE: larger than our interface's MTU; refused: by an earlier datagram
                with contextlib.suppress(OSError):
                    sock.sendto(packet.ljust(size - HEADER_BYTES, b"."), (ip, self.port))
                if len(missing) > 1:
                    # a burst of large packets would overflow the peer's buffer
                    time.sleep(0.001)
            deadline += wait
            self.collect_acks(sock, missing, deadline)
            if not missing:
                break
        return [size for size in sizes if size not in missing]

    def collect_acks(self, sock: socket.socket, missing: "set[int]", deadline: float) -> None:
        """Remove acknowledged sizes from `missing` until the deadline."""
        while missing and is_readable(sock, deadline - time.monotonic()):
            try:
                nonce, size = sock.recv(1 << 16).split(b"|")
            except (OSError, ValueError):
                continue
            if nonce.decode() == self.nonce:
                missing.discard(int(size))

    def run(self) -> "dict[str, object]":
        for loop in (self.accept_connections, self.answer_datagrams):
            threading.Thread(target=loop, daemon=True).start()
        for peer in self.peers:
            threading.Thread(target=self.probe_peer, args=(peer,), daemon=True).start()
        with self.state:
            self.wait_for_all()
        for name, result in self.results.items():
            result["heard"] = name in self.senders or name in self.connections
        return {"node": self.name, "mtu": self.mtu, "peers": self.results}

    def wait_for_all(self) -> None:
        """Wait until this node and all peers are done, or for the deadline; requires `state`."""
        names = {peer["name"] for peer in self.peers}
        while self.completed < len(self.peers) or not names <= self.finished:
            remaining = self.deadline - time.monotonic()
            if remaining <= 0:
                return
            # Wait briefly: signal handlers run only while this thread does.
            self.state.wait(min(remaining, 0.2))


def due_ports(times: "dict[int, float]", now: float) -> "list[int]":
    """Return the keys with an expired time, as a list: `times` may change meanwhile."""
    return [key for key, time_due in times.items() if time_due <= now]


def ready_sockets(socks: "list[socket.socket]", seconds: float) -> "list[socket.socket]":
    """Return the sockets that are connected or failed."""
    poll = select.poll()
    by_number = {sock.fileno(): sock for sock in socks}
    for number in by_number:
        poll.register(number, select.POLLOUT)
    return [by_number[number] for number, _ in poll.poll(seconds * 1000)]


def is_readable(sock: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(seconds, 0) * 1000))


def exit_on_input_end() -> None:
    """Exit when standard input ends after at least one line."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stdin.readline():
            while sys.stdin.readline():
                pass
            os._exit(1)


def main() -> None:
    request = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    threading.Thread(target=exit_on_input_end, daemon=True).start()
    try:
        report = PortProber(request).run()
    except OSError as error:
        report = {
            "node": request["node"],
            "error": f"cannot listen at {request['ip']}: {error.strerror or error}",
        }
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    os._exit(0)  # waiting threads must not delay the exit


if __name__ == "__main__":
    main()
