"""One model to N nodes over limited links, against one copy at the link's goodput in the same run.

    python -m benchmarks.spread [--nodes 2,4,8] [--rate 100] [--rounds 3] [--only chain,kill,…]

Needs root: each node is a network namespace, a bridge in one more joins them, and both ends of each
link carry so many Mbit/s (tbf). The files lie in memory. The programs are the nodes' own, run by
`launcher.spread`; only SSH is left out. After each run every file is compared byte by byte.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from launcher.cli.model_copying import STREAMS as STREAMS_OF_COPIES
from launcher.events import Event
from launcher.model import Inventory
from launcher.payload.chain.files import File, Manifest
from launcher.plan.copying import chunk
from launcher.remote import certificate
from launcher.remote.fleet import Fleet
from launcher.spread import Connections, Part, Spread, spread
from launcher.tools import chain
from launcher.transport import Command

MB = 10**6
# A large shard, a smaller one, and what lies beside them.
SIZES = (157_286_400, 41_943_040, 9_437_184, 1_048_576, 700, 0)
CHUNK, STREAMS = 512 * 1024, 2  # scaled to 200 MB: 400 chunks, as 100 GB have 24,000 of 4 MiB
PORT = 29570
SWITCH = "spread-switch"
NOTHING = Inventory(path=Path("x"), cluster="bench", image="none", nodes=())
CASES = ("chain", "kill", "cable", "slow", "again", "nothing", "cpu")
# One copy as a program without any of ours would make it.
_RECEIVE = """
import socket, sys
door = socket.create_server((sys.argv[1], 29571)); print("ready", flush=True)
sock = door.accept()[0]; left = int(sys.argv[2]); buffer = bytearray(1 << 20)
while left: left -= sock.recv_into(buffer)
sock.sendall(b"x")
"""
_SEND = """
import socket, sys, time
sock = socket.create_connection((sys.argv[1], 29571))
left, block = int(sys.argv[2]), bytes(1 << 20)
began = time.monotonic()
while left: left -= sock.send(block[:left])
sock.recv(1); print(time.monotonic() - began)
"""
# What a node in the middle cannot do without: receive, take the SHA-256, write, pass on.
_BARE = """
import hashlib, os, socket, sys, time
here, there, left, path = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
door = socket.create_server((here, 29571)); print("ready", flush=True)
sock, after = door.accept()[0], socket.create_connection((there, 29571))
file, buffer, at = os.open(path, os.O_RDWR | os.O_CREAT), memoryview(bytearray(1 << 20)), 0
began = time.process_time()
while at < left:
    view = buffer[:left - at]; got = 0
    while got < len(view): got += sock.recv_into(view[got:])
    hashlib.sha256(view).digest(); os.pwrite(file, view, at); end = at + got
    while at < end: at += os.sendfile(after.fileno(), file, at, end - at)
print(time.process_time() - began)
after.recv(1); sock.sendall(b"x")
"""


def address(node: int) -> str:
    return f"10.99.7.{10 + node}"


def space(node: int) -> str:
    return f"spread-{node}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def tc(where: str, device: str, rate: float, how: str = "add") -> None:
    words = f"qdisc {how} dev {device} root tbf rate {rate}mbit burst 128k latency 30ms"
    subprocess.run(["tc", "-n", where, *words.split()], check=True)


@contextmanager
def network(count: int, rate: float) -> Iterator[None]:
    """So many namespaces on a bridge, each link limited both ways; gone afterwards."""
    names = [SWITCH, *(space(node) for node in range(count))]
    _remove(names)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", SWITCH, "link", "add", "br0", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "br0", "up")
        for node in range(count):
            own, port = space(node), f"p{node}"
            ip(*f"-n {own} link add eth0 type veth peer name {port} netns {SWITCH}".split())
            ip("-n", own, "addr", "add", f"{address(node)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", own, "link", "set", device, "up")
            ip("-n", SWITCH, "link", "set", port, "master", "br0", "up")
            tc(own, "eth0", rate)
            tc(SWITCH, port, rate)
        yield
    finally:
        _remove(names)


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def inside(node: int, *words: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", space(node), *words)


def goodput(count: int) -> float:
    """Return bytes a second of one plain TCP stream from the first node to the second."""
    hears = subprocess.Popen(
        inside(1, sys.executable, "-c", _RECEIVE, address(1), str(count)),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert hears.stdout is not None
    hears.stdout.readline()
    said = subprocess.run(
        inside(0, sys.executable, "-c", _SEND, address(1), str(count)),
        check=True,
        capture_output=True,
        text=True,
    )
    hears.wait(10)
    return count / float(said.stdout)


@dataclass
class Bench:
    """The nodes' folders, and how a copy to some of them is run."""

    base: Path
    memory: int = 0  # KiB, of the largest program
    cpu: list[float] = field(default_factory=list)  # seconds a GB, of nodes in the middle
    cipher: dict[str, str] = field(default_factory=dict)  # of encrypted copies
    chunk: int = CHUNK
    streams: int = STREAMS

    def root(self, node: int) -> Path:
        return self.base / f"n{node}" / "m"

    def make(self, sizes: Sequence[int] = SIZES) -> Manifest:
        """Write the source's files, and return their list."""
        root = self.root(0)
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for number, size in enumerate(sizes):
            (root / f"file-{number}").write_bytes(os.urandom(size))
        return self.listed(root)

    def listed(self, root: Path) -> Manifest:
        names = sorted(each.name for each in root.iterdir() if each.is_file())
        stats = [(name, (root / name).stat()) for name in names]
        return Manifest(
            [File(name, now.st_size, now.st_mtime_ns) for name, now in stats], self.chunk
        )

    def forget(self, count: int) -> None:
        """Have the source alone have anything, and nothing written down of it."""
        for node in range(1, count):
            shutil.rmtree(self.root(node), ignore_errors=True)
            self.root(node).parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.root(0) / ".vlaunch", ignore_errors=True)

    def kill(self, node: int, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(int((self.base / f"n{node}.pid").read_text()), how)

    def run(
        self, manifest: Manifest, count: int, at: Callable[[Event], None] = lambda event: None
    ) -> Spread:
        """Copy from node 0 to the others, in their order; `at` is called with each event."""
        key = os.urandom(32).hex()
        parts = [self._part(node, manifest, key) for node in range(count)]
        with Fleet(NOTHING) as fleet:
            connections = Connections(hold=fleet.hold_here, tunnel=lambda name, port: port)
            fill = self.streams * self.chunk
            run = spread(parts, connections, total=manifest.bytes, fill=fill)
            while True:
                try:
                    event = next(run)
                except StopIteration as ended:
                    # The second node receives and passes on.
                    middle = ended.value.members["n1"]
                    if count > 2 and middle.received:
                        self.cpu.append((middle.cpu - middle.start) / manifest.bytes * 1e9)
                    return ended.value  # type: ignore[no-any-return]
                at(event)
                if event.data.get("total"):
                    self._look(count)

    def _look(self, count: int) -> None:
        """Note how much memory programs take."""
        for node in range(count):
            with suppress(OSError, ValueError, IndexError):
                pid = (self.base / f"n{node}.pid").read_text().strip()
                status = Path(f"/proc/{pid}/status").read_text()
                self.memory = max(self.memory, int(status.partition("VmHWM:")[2].split()[0]))

    def _part(self, node: int, manifest: Manifest, key: str) -> Part:
        request = chain.copy(
            node=f"n{node}",
            root=str(self.root(node)),
            manifest=manifest,
            key=key,
            streams=self.streams,
            listen=(address(node), PORT),
            source=node == 0,
            label="files",
            cipher=self.cipher,
        )
        words = (sys.executable, *chain.on_node(NOTHING).argv[1:])
        begin = 'echo $$ > "$1"; shift; exec "$@"'
        argv = inside(node, "sh", "-c", begin, "sh", f"{self.base}/n{node}.pid", *words)
        command = Command(
            node=f"n{node}",
            argv=argv,
            timeout=900,
            stdin=lambda: chain.program(request),
            hold_stdin=True,
            talk=True,
        )
        return Part(name=f"n{node}", command=command, host=address(node))

    def check(self, nodes: Sequence[int]) -> None:
        """Raise AssertionError when a copy is not the source byte by byte."""
        names = [each.name for each in self.root(0).iterdir() if each.is_file()]
        for node in nodes:
            same, _, _ = filecmp.cmpfiles(self.root(0), self.root(node), names, shallow=False)
            assert sorted(same) == sorted(names), f"n{node} differs"


def when(share: float, act: Callable[[], None]) -> Callable[[Event], None]:
    """Do something once, when the slowest node has this share."""
    done: list[bool] = []

    def at(event: Event) -> None:
        data = event.data
        late = event.kind == "wait" and data.get("total")
        if late and not done and data["bytes"] >= share * data["total"]:
            done.append(True)
            act()

    return at


def moved(came: Spread) -> float:
    """Return the seconds until the last node that lives had everything."""
    return max(each.seconds for each in came.members.values() if not each.failed)


def interrupted(bench: Bench, manifest: Manifest, count: int) -> float:
    """Return the seconds of both parts of a copy that is stopped halfway."""

    def stop() -> None:
        raise KeyboardInterrupt

    began = 0.0

    def watch(event: Event) -> None:
        nonlocal began
        # What programs take until they listen is no part of a copy.
        began = began or (time.monotonic() if event.data.get("total") else 0.0)
        halfway(event)

    halfway = when(0.5, stop)
    with suppress(KeyboardInterrupt):
        bench.run(manifest, count, watch)
    return time.monotonic() - began + moved(bench.run(manifest, count))


def plain(bench: Bench, manifest: Manifest, count: int) -> float:
    came = bench.run(manifest, count)
    assert not came.failed
    assert came.members["n0"].sent <= 1.02 * manifest.bytes, came.members["n0"].sent
    return moved(came)


def killed(bench: Bench, manifest: Manifest, count: int) -> float:
    came = bench.run(manifest, count, when(0.4, lambda: bench.kill(count // 2)))
    assert list(came.failed) == [f"n{count // 2}"]
    return moved(came)


def cut(bench: Bench, manifest: Manifest, count: int) -> float:
    """A cable that is pulled gives no reset; the launcher hears no more of that node, either."""
    victim = count // 2

    def pull() -> None:
        ip("-n", SWITCH, "link", "set", f"p{victim}", "down")
        bench.kill(victim, signal.SIGSTOP)

    try:
        came = bench.run(manifest, count, when(0.4, pull))
    finally:
        ip("-n", SWITCH, "link", "set", f"p{victim}", "up")
    assert list(came.failed) == [f"n{victim}"]
    return moved(came)


def slow(bench: Bench, manifest: Manifest, count: int, rate: float) -> float:
    victim = count // 2
    for where, device in ((space(victim), "eth0"), (SWITCH, f"p{victim}")):
        tc(where, device, rate / 4, "change")
    try:
        came = bench.run(manifest, count)
    finally:
        for where, device in ((space(victim), "eth0"), (SWITCH, f"p{victim}")):
            tc(where, device, rate, "change")
    return max(each.seconds for name, each in came.members.items() if name != f"n{victim}")


def nothing(bench: Bench, count: int) -> float:
    """Return the seconds of a copy of 10,000 files that all nodes have, programs' start included:
    `vlaunch model push --compare` does that; without it names, sizes and times are compared.
    """
    root = bench.root(0)
    shutil.rmtree(root)
    root.mkdir()
    for number in range(10_000):
        (root / f"file-{number}").write_bytes(b"%d" % number)
    manifest = bench.listed(root)
    bench.forget(count)
    bench.run(manifest, count)
    began = time.monotonic()
    came = bench.run(manifest, count)
    assert sum(each.received for each in came.members.values()) == 0
    return time.monotonic() - began


def bare(bench: Bench, count: int) -> float:
    """Return the CPU seconds a GB of those steps alone, between the same three nodes."""
    bench.forget(3)
    path = str(bench.root(1).parent / "bare")

    def begin(node: int, program: str, *words: str) -> subprocess.Popen[str]:
        argv = inside(node, sys.executable, "-c", program, *words)
        return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

    last = begin(2, _RECEIVE, address(2), str(count))
    middle = begin(1, _BARE, address(1), address(2), str(count), path)
    for each in (last, middle):
        assert each.stdout is not None
        each.stdout.readline()
    first = begin(0, _SEND, address(1), str(count))
    said = middle.communicate(timeout=120)[0]
    for each in (first, last):
        each.communicate(timeout=60)
    Path(path).unlink()
    return float(said) / count * 1e9


def work(bench: Bench, rounds: int) -> Iterator[tuple[str, list[float], str]]:
    """Yield the CPU seconds a GB of a node that receives, checks, writes and passes on, over links
    without a limit, in the clear and encrypted, in the chunks and streams of large models; the
    start of its program is not counted.
    """
    for node in range(3):
        for where, device in ((space(node), "eth0"), (SWITCH, f"p{node}")):
            subprocess.run(["tc", "-n", where, "qdisc", "del", "dev", device, "root"], check=True)
    shaped, bench.chunk, bench.streams = bench.cpu, chunk(2**40), STREAMS_OF_COPIES
    manifest = bench.make([200 * MB] * 3)
    alone = [bare(bench, 600 * MB) for _ in range(rounds)]
    yield "CPU seconds a GB of receiving, SHA-256, writing and passing on alone", alone, ""
    for name, cipher in (("in the clear", {}), ("encrypted", certificate.make())):
        bench.cipher, bench.cpu = cipher, []
        for _ in range(rounds):
            bench.forget(3)
            bench.run(manifest, 3)
        goal = "" if cipher else "≤ 1.5"
        yield f"CPU seconds a GB of a node in the middle, {name}", bench.cpu, goal
    bench.cipher, bench.cpu, bench.chunk, bench.streams = {}, shaped, CHUNK, STREAMS


Run = Callable[[Bench, Manifest, int], float]


def cases(counts: Sequence[int], rate: float) -> list[tuple[str, str, int, str, Run]]:
    """Return what is measured: its kind, its name, how many nodes, its goal, and how."""
    goals = {4: "≤ 1.05", 8: "≤ 1.08", 16: "≤ 1.12"}
    middle = 4 if 4 in counts else max(counts)
    rows: list[tuple[str, str, int, str, Run]] = [
        ("chain", f"N = {count}", count, goals.get(count, ""), plain) for count in counts
    ]

    def slowed(bench: Bench, manifest: Manifest, count: int) -> float:
        return slow(bench, manifest, count, rate)

    return [
        *rows,
        ("kill", "a node killed at 40 %: the others", middle, "+ 0.1", killed),
        ("cable", "its cable pulled instead: the others", middle, "+ 6 s", cut),
        ("slow", "a node at a quarter of the rate: the others", middle, "≤ 1.25", slowed),
        ("again", "stopped at half, started again: both", middle, "≤ 1.1", interrupted),
    ]


def measure(bench: Bench, asked: argparse.Namespace) -> list[tuple[str, list[float], str]]:
    """Run the cases in turn, round by round; returns name, ratios (or seconds), and goal."""
    counts = [int(each) for each in asked.nodes.split(",")]
    wanted = asked.only.split(",") if asked.only else CASES
    found: dict[str, tuple[list[float], str]] = {}
    manifest = bench.make()
    for _ in range(asked.rounds):
        one = manifest.bytes / goodput(40 * MB)
        for kind, name, count, goal, run in cases(counts, asked.rate):
            if kind not in wanted:
                continue
            bench.forget(count)
            ratio = run(bench, manifest, count) / one
            bench.check([n for n in range(1, count) if (bench.root(n) / "file-0").exists()])
            called = name if kind == "chain" else f"{name}, N = {count}"
            found.setdefault(called, ([], goal))[0].append(ratio)
            print(f"  {called}: {ratio:.3f} × {one:.1f} s", file=sys.stderr, flush=True)
    if "nothing" in wanted:
        seconds = nothing(bench, counts[-1])
        name = f"10,000 files that all have, compared by their digests, N = {counts[-1]}: seconds"
        found[name] = ([seconds], "≤ 3 s")
    rows = [(name, values, goal) for name, (values, goal) in found.items()]
    return [*rows, *(work(bench, asked.rounds) if "cpu" in wanted and counts[-1] > 2 else ())]


def table(rows: Sequence[tuple[str, Sequence[float], str]]) -> str:
    """Return the results as Markdown: the median and all values."""
    lines = ["| what | × one copy (median) | all | goal |", "|---|---|---|---|"]
    for name, values, goal in rows:
        every = ", ".join(f"{each:.3f}" for each in values)
        lines.append(f"| {name} | **{statistics.median(values):.3f}** | {every} | {goal} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="2,4,8", help="how many nodes, the source included")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of each link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help=f"some of {', '.join(CASES)}")
    asked = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="spread-", dir="/dev/shm"))
    most = max(int(each) for each in asked.nodes.split(","))
    try:
        bench = Bench(base)
        with network(most, asked.rate):
            rows = measure(bench, asked)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print(table(rows))
    cpu = statistics.median(bench.cpu) if bench.cpu else 0.0
    print(
        f"\nA program took {bench.memory / 1024:.0f} MiB at the most; one that receives and passes"
        f" on {cpu:.1f} CPU seconds a GB."
    )


if __name__ == "__main__":
    main()
