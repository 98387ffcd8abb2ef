"""One model to N nodes over limited links, against one copy at the link's goodput in the same run.

    python -m benchmarks.spread [--nodes 2,4,8] [--rate 100] [--rounds 3] [--only chain,kill,…]

Needs root: each node is a network namespace, a bridge in one more joins them, and both ends of each
link carry so many Mbit/s (tbf). The files lie in memory, and are as large as a link carries in 17
seconds. The programs are the nodes' own, run by `launcher.distribute.coordinator`; only SSH is left
out. After each run every file is compared byte by byte. Tools of others are taken along where they
are there: rsync, and libtorrent's module. Beside each figure stands how busy the machine was.
"""

from __future__ import annotations

import argparse
import filecmp
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import spread_tools
from benchmarks.spread_network import (
    MB,
    RECEIVE,
    SEND,
    SWITCH,
    Busy,
    address,
    begin,
    goodput,
    inside,
    ip,
    network,
    unlimit,
)
from launcher.app import certificates
from launcher.core.domain import Inventory
from launcher.core.events import Event
from launcher.core.transport import Command
from launcher.distribute import chain
from launcher.distribute.coordinator import Connections, CopyResult, MemberSpec, coordinate_copy
from launcher.distribute.copy_session import STREAMS as STREAMS_OF_COPIES
from launcher.distribute.model_plan import choose_chunk_size
from launcher.distribute.node.files import CopyManifest, ManifestFile
from launcher.ssh.fleet import Fleet

# A large shard, a smaller one, and what lies beside them.
SIZES = (157_286_400, 41_943_040, 9_437_184, 1_048_576, 700, 0)
CHUNK, STREAMS = 512 * 1024, 2  # scaled to 200 MB: 400 chunks, as 100 GB have 24,000 of 4 MiB
RATE = 100.0  # Mbit/s, for which these are
PORT = 29570
NOTHING = Inventory(path=Path("x"), cluster="bench", image="none", nodes=())
CASES = ("chain", "tools", "kill", "cable", "again", "nothing", "cpu")
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


@dataclass
class Bench:
    """The nodes' folders, and how a copy to some of them is run."""

    base: Path
    memory: int = 0  # KiB, of the largest program
    cpu: list[float] = field(default_factory=list)  # seconds a GB, of nodes in the middle
    encrypt: bool = False
    chunk: int = CHUNK
    streams: int = STREAMS
    rate: float = RATE

    def root(self, node: int) -> Path:
        return self.base / f"n{node}" / "m"

    def make(self, sizes: Sequence[int]) -> CopyManifest:
        """Write the source's files, and return their list."""
        root = self.root(0)
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for number, size in enumerate(sizes):
            (root / f"file-{number}").write_bytes(os.urandom(size))
        return self.listed(root)

    def listed(self, root: Path) -> CopyManifest:
        names = sorted(each.name for each in root.iterdir() if each.is_file())
        stats = [(name, (root / name).stat()) for name in names]
        return CopyManifest(
            [ManifestFile(name, now.st_size, now.st_mtime_ns) for name, now in stats], self.chunk
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
        self, manifest: CopyManifest, count: int, at: Callable[[Event], None] = lambda event: None
    ) -> CopyResult:
        """Copy from node 0 to the others, in their order; `at` is called with each event."""
        ours = certificates.make_certificate("bench")
        parts = [self._part(node, manifest, ours) for node in range(count)]
        with Fleet(NOTHING) as fleet:
            connections = Connections(start=fleet.hold_local, tunnel=lambda name, port: port)
            run = coordinate_copy(parts, connections, total=manifest.total_bytes)
            while True:
                try:
                    event = next(run)
                except StopIteration as ended:
                    # The second node receives and passes on.
                    middle = ended.value.members["n1"]
                    if count > 2 and middle.received:
                        self.cpu.append(
                            (middle.cpu - middle.start_cpu) / manifest.total_bytes * 1e9
                        )
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

    def _part(self, node: int, manifest: CopyManifest, ours: str) -> MemberSpec:
        request = chain.copy_request(
            node=f"n{node}",
            root=str(self.root(node)),
            manifest=manifest,
            certificate=ours,
            encrypt=self.encrypt,
            streams=self.streams,
            listen=(address(node), PORT),
            source=node == 0,
            label="files",
        )
        words = (sys.executable, *chain.node_runtime(NOTHING).argv[1:])
        noted = 'echo $$ > "$1"; shift; exec "$@"'
        argv = inside(node, "sh", "-c", noted, "sh", f"{self.base}/n{node}.pid", *words)
        command = Command(
            node=f"n{node}",
            argv=argv,
            timeout=900,
            stdin=lambda: chain.program_input(request),
            hold_stdin=True,
            interactive=True,
        )
        return MemberSpec(name=f"n{node}", command=command, host=address(node))

    def check(self, nodes: Sequence[int]) -> None:
        """Raise AssertionError when a copy is not the source byte by byte."""
        names = [each.name for each in self.root(0).iterdir() if each.is_file()]
        for node in nodes:
            same, _, _ = filecmp.cmpfiles(self.root(0), self.root(node), names, shallow=False)
            assert sorted(same) == sorted(names), f"n{node} differs"


@dataclass
class Row:
    """One line of the table: what was measured, in each round, and how busy the machine was."""

    name: str
    goal: str = ""
    values: list[float] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)

    def add(self, value: float, busy: Busy) -> None:
        self.values.append(value)
        self.busy.append(busy.said())
        print(f"  {self.name}: {value:.3f} ({self.busy[-1]})", file=sys.stderr, flush=True)


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


def moved(came: CopyResult) -> float:
    """Return the seconds until the last node that lives had everything."""
    return max(each.seconds for each in came.members.values() if not each.failed)


def interrupted(bench: Bench, manifest: CopyManifest, count: int) -> float:
    """Return the seconds of both parts of a copy that is stopped halfway."""

    def stop() -> None:
        raise KeyboardInterrupt

    began = 0.0

    def watch(event: Event) -> None:
        nonlocal began
        # What programs take until they listen is no part of a copy.
        if not began and event.data.get("rate"):
            began = time.monotonic() - event.data["bytes"] / event.data["rate"]
        halfway(event)

    halfway = when(0.5, stop)
    with suppress(KeyboardInterrupt):
        bench.run(manifest, count, watch)
    return time.monotonic() - began + moved(bench.run(manifest, count))


def plain(bench: Bench, manifest: CopyManifest, count: int) -> float:
    came = bench.run(manifest, count)
    assert not came.failed
    assert came.members["n0"].sent <= 1.02 * manifest.total_bytes, came.members["n0"].sent
    return moved(came)


def killed(bench: Bench, manifest: CopyManifest, count: int) -> float:
    came = bench.run(manifest, count, when(0.4, lambda: bench.kill(count // 2)))
    assert list(came.failed) == [f"n{count // 2}"]
    return moved(came)


def cut(bench: Bench, manifest: CopyManifest, count: int) -> float:
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


def nothing(bench: Bench, count: int) -> float:
    """Return the seconds of a copy of 10,000 files that all nodes have, programs' start included:
    `vlaunch model copy --compare` does that; without it names, sizes and times are compared.
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

    last = begin(2, RECEIVE, address(2), str(count))
    middle = begin(1, _BARE, address(1), address(2), str(count), path)
    subprocess.run(
        inside(0, sys.executable, "-c", SEND, address(1), str(count)),
        check=True,
        capture_output=True,
    )
    said = middle.communicate(timeout=120)[0]
    last.communicate(timeout=60)
    Path(path).unlink()
    return float(said) / count * 1e9


def work(bench: Bench, rounds: int) -> Iterator[Row]:
    """Yield the CPU seconds a GB of a node that receives, checks, writes and passes on, over links
    without a limit, in the clear and encrypted, in the chunks and streams of large models; the
    start of its program is not counted. They take turns.
    """
    for node in range(3):
        unlimit(node)
    bench.chunk, bench.streams = choose_chunk_size(2**40), STREAMS_OF_COPIES
    manifest = bench.make([200 * MB] * 3)
    ways = {"in the clear": False, "encrypted": True}
    alone = Row("CPU seconds a GB of receiving, SHA-256, writing and passing on alone")
    rows = {
        name: Row(f"CPU seconds a GB of a node in the middle, {name}", "" if encrypt else "≤ 1.5")
        for name, encrypt in ways.items()
    }
    busy = Busy()
    for _ in range(rounds):
        alone.add(bare(bench, 600 * MB), busy)
        for name, row in rows.items():
            bench.encrypt, bench.cpu = ways[name], []
            bench.forget(3)
            bench.run(manifest, 3)
            row.add(bench.cpu[0], busy)
    yield from (alone, *rows.values())


Run = Callable[[Bench, CopyManifest, int], float]


@dataclass(frozen=True)
class Case:
    """A measurement with `count` nodes: `run` returns its seconds."""

    kind: str
    name: str
    count: int
    goal: str
    run: Run


def usual(counts: Sequence[int]) -> int:
    """Return with how many nodes things go wrong."""
    return 4 if 4 in counts else max(counts)


def cases(
    counts: Sequence[int], tools: Callable[[int], Sequence[tuple[str, spread_tools.Tool]]]
) -> list[Case]:
    """Return what is measured."""
    goals = {4: "≤ 1.05", 8: "≤ 1.08", 16: "≤ 1.12"}
    middle = usual(counts)

    def case(kind: str, name: str, goal: str, run: Run) -> Case:
        return Case(kind, f"{name}, N = {middle}", middle, goal, run)

    return [
        *(Case("chain", f"N = {count}", count, goals.get(count, ""), plain) for count in counts),
        case("kill", "a node killed at 40 %: the others", "+ 0.1", killed),
        case("cable", "its cable pulled instead: the others", "+ 6 s", cut),
        case("again", "stopped at half, started again: both", "≤ 1.1", interrupted),
        *(
            Case("tools", f"{name}, N = {count}", count, "", by_tool(tool))
            for count in counts
            for name, tool in tools(count)
        ),
    ]


def by_tool(tool: spread_tools.Tool) -> Run:
    def run(bench: Bench, manifest: CopyManifest, count: int) -> float:
        seconds = tool([bench.root(node) for node in range(count)], manifest.chunk_size)
        bench.check(range(1, count))
        return seconds

    return run


def measure(bench: Bench, asked: argparse.Namespace) -> list[Row]:
    """Run the cases in turn, round by round."""
    counts = [int(each) for each in asked.nodes.split(",")]
    wanted = asked.only.split(",") if asked.only else CASES
    chosen = [each for each in cases(counts, spread_tools.there) if each.kind in wanted]
    rows = {each.name: Row(each.name, each.goal) for each in chosen}
    busy = Busy()
    for _ in range(asked.rounds):
        one_round(bench, chosen, rows, busy)
    if "nothing" in wanted:
        count = usual(counts)
        name = f"10,000 files that all have, compared by their digests, N = {count}: seconds"
        rows[name] = Row(name, "≤ 3 s")
        rows[name].add(nothing(bench, count), busy)
    more = work(bench, asked.rounds) if "cpu" in wanted and counts[-1] > 2 else ()
    return [*rows.values(), *more]


def one_round(bench: Bench, chosen: Sequence[Case], rows: Mapping[str, Row], busy: Busy) -> None:
    """Run each case once, against one copy of now."""
    scale = bench.rate / RATE
    manifest = bench.make([int(size * scale) for size in SIZES])
    one = manifest.total_bytes / goodput(int(40 * MB * scale))
    print(f"  one copy: {one:.1f} s ({busy.said()})", file=sys.stderr, flush=True)
    for case in chosen:
        bench.forget(case.count)
        value = case.run(bench, manifest, case.count)
        bench.check([n for n in range(1, case.count) if (bench.root(n) / "file-0").exists()])
        rows[case.name].add(value / one, busy)


def table(rows: Sequence[Row]) -> str:
    """Return the results as Markdown: the median, all values, and how busy the machine was."""
    lines = ["| what | × one copy (median) | all | goal | the machine |", "|---|---|---|---|---|"]
    for row in rows:
        median, every = (
            statistics.median(row.values),
            ", ".join(f"{each:.3f}" for each in row.values),
        )
        busy = "; ".join(row.busy)
        lines.append(f"| {row.name} | **{median:.3f}** | {every} | {row.goal} | {busy} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="2,4,8", help="how many nodes, the source included")
    parser.add_argument("--rate", type=float, default=RATE, help="Mbit/s of each link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help=f"some of {', '.join(CASES)}")
    asked = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="spread-", dir="/dev/shm"))
    most = max(int(each) for each in asked.nodes.split(","))
    size = 2 ** round(math.log2(CHUNK * asked.rate / RATE))
    try:
        bench = Bench(base, rate=asked.rate, chunk=size)
        with network(most, asked.rate):
            rows = measure(bench, asked)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print(table(rows))
    print(f"\nA program took {bench.memory / 1024:.0f} MiB at the most.")


if __name__ == "__main__":
    main()
