"""Copies of a model to N nodes over limited links, against one copy at the link's goodput.

    python -m benchmarks.spread [--nodes 2,4,8] [--rate 100] [--rounds 3] [--only chain,kill,…]

Needs root: each node is a network namespace, a bridge in one more joins them, and both ends of each
link are limited to `--rate` Mbit/s (tbf). The files are in memory, and as large as a link carries
in 17 seconds. The programs are the nodes' own, run by `launcher.distribute.coordinator`; only SSH
is absent. After each run every file is compared byte by byte. Other tools, if installed, are
compared: rsync, and libtorrent's module. The table shows the machine's load beside each figure.
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
    MachineLoad,
    address,
    ip,
    measure_goodput,
    network,
    node_argv,
    start_program,
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

# A large shard, a smaller one, and small files.
SIZES = (157_286_400, 41_943_040, 9_437_184, 1_048_576, 700, 0)
CHUNK, STREAMS = 512 * 1024, 2  # scaled to 200 MB: 400 chunks; 100 GB have 24,000 of 4 MiB
RATE = 100.0  # Mbit/s, of these sizes
PORT = 29570
NOTHING = Inventory(path=Path("x"), cluster="bench", image="none", nodes=())
CASES = ("chain", "tools", "kill", "cable", "again", "nothing", "cpu")
# The bare steps of a node in the middle: receive, take the SHA-256, write, forward.
_BARE = """
import hashlib, os, socket, sys, time
own, peer, total, path = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
listener = socket.create_server((own, 29571)); print("ready", flush=True)
source, target = listener.accept()[0], socket.create_connection((peer, 29571))
file, buffer, offset = os.open(path, os.O_RDWR | os.O_CREAT), memoryview(bytearray(1 << 20)), 0
began = time.process_time()
while offset < total:
    view = buffer[:total - offset]; size = 0
    while size < len(view): size += source.recv_into(view[size:])
    hashlib.sha256(view).digest(); os.pwrite(file, view, offset); end = offset + size
    while offset < end: offset += os.sendfile(target.fileno(), file, offset, end - offset)
print(time.process_time() - began)
target.recv(1); source.sendall(b"x")
"""


@dataclass
class Bench:
    """The nodes' folders, and the settings of a copy."""

    base: Path
    memory: int = 0  # KiB, of the largest program
    cpu: list[float] = field(default_factory=list)  # seconds per GB, of nodes in the middle
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
        return self.list_files(root)

    def list_files(self, root: Path) -> CopyManifest:
        names = sorted(path.name for path in root.iterdir() if path.is_file())
        stats = [(name, (root / name).stat()) for name in names]
        return CopyManifest(
            [ManifestFile(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats], self.chunk
        )

    def remove_copies(self, count: int) -> None:
        """Remove all copies, and the source's own records."""
        for node in range(1, count):
            shutil.rmtree(self.root(node), ignore_errors=True)
            self.root(node).parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.root(0) / ".vlaunch", ignore_errors=True)

    def kill(self, node: int, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(int((self.base / f"n{node}.pid").read_text()), how)

    def run(
        self,
        manifest: CopyManifest,
        count: int,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> CopyResult:
        """Copy from node 0 to the others, in their order; call `on_event` with each event."""
        certificate = certificates.make_certificate("bench")
        members = [self._member(node, manifest, certificate) for node in range(count)]
        with Fleet(NOTHING) as fleet:
            connections = Connections(start=fleet.hold_local, tunnel=lambda name, port: port)
            run = coordinate_copy(members, connections, total=manifest.total_bytes)
            while True:
                try:
                    event = next(run)
                except StopIteration as stop:
                    # The second node receives and forwards.
                    middle = stop.value.members["n1"]
                    if count > 2 and middle.received:
                        self.cpu.append(
                            (middle.cpu - middle.start_cpu) / manifest.total_bytes * 1e9
                        )
                    return stop.value  # type: ignore[no-any-return]
                on_event(event)
                if event.data.get("total"):
                    self._record_memory(count)

    def _record_memory(self, count: int) -> None:
        """Record the peak memory of the programs."""
        for node in range(count):
            with suppress(OSError, ValueError, IndexError):
                pid = (self.base / f"n{node}.pid").read_text().strip()
                status = Path(f"/proc/{pid}/status").read_text()
                self.memory = max(self.memory, int(status.partition("VmHWM:")[2].split()[0]))

    def _member(self, node: int, manifest: CopyManifest, certificate: str) -> MemberSpec:
        request = chain.copy_request(
            node=f"n{node}",
            root=str(self.root(node)),
            manifest=manifest,
            certificate=certificate,
            encrypt=self.encrypt,
            streams=self.streams,
            listen=(address(node), PORT),
            source=node == 0,
            label="files",
        )
        program = (sys.executable, *chain.node_runtime(NOTHING).argv[1:])
        record_pid = 'echo $$ > "$1"; shift; exec "$@"'
        argv = node_argv(node, "sh", "-c", record_pid, "sh", f"{self.base}/n{node}.pid", *program)
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
        """Raise AssertionError when a copy differs from the source."""
        names = [path.name for path in self.root(0).iterdir() if path.is_file()]
        for node in nodes:
            same, _, _ = filecmp.cmpfiles(self.root(0), self.root(node), names, shallow=False)
            assert sorted(same) == sorted(names), f"n{node} differs"


@dataclass
class Row:
    """One line of the table: the measurement of each round, and the machine's load."""

    name: str
    goal: str = ""
    values: list[float] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)

    def add(self, value: float, busy: MachineLoad) -> None:
        self.values.append(value)
        self.busy.append(busy.describe())
        print(f"  {self.name}: {value:.3f} ({self.busy[-1]})", file=sys.stderr, flush=True)


def at_share(share: float, act: Callable[[], None]) -> Callable[[Event], None]:
    """Call a function once, when the slowest node has this share."""
    done: list[bool] = []

    def at(event: Event) -> None:
        data = event.data
        late = event.kind == "wait" and data.get("total")
        if late and not done and data["bytes"] >= share * data["total"]:
            done.append(True)
            act()

    return at


def copy_seconds(result: CopyResult) -> float:
    """Return the seconds until the last healthy node had everything."""
    return max(member.seconds for member in result.members.values() if not member.failed)


def run_interrupted(bench: Bench, manifest: CopyManifest, count: int) -> float:
    """Return the seconds of both parts of a copy that is interrupted halfway."""

    def stop() -> None:
        raise KeyboardInterrupt

    began = 0.0

    def watch(event: Event) -> None:
        nonlocal began
        # The start of the programs is not part of a copy.
        if not began and event.data.get("rate"):
            began = time.monotonic() - event.data["bytes"] / event.data["rate"]
        halfway(event)

    halfway = at_share(0.5, stop)
    with suppress(KeyboardInterrupt):
        bench.run(manifest, count, watch)
    return time.monotonic() - began + copy_seconds(bench.run(manifest, count))


def run_plain(bench: Bench, manifest: CopyManifest, count: int) -> float:
    result = bench.run(manifest, count)
    assert not result.failed
    assert result.members["n0"].sent <= 1.02 * manifest.total_bytes, result.members["n0"].sent
    return copy_seconds(result)


def run_killed(bench: Bench, manifest: CopyManifest, count: int) -> float:
    result = bench.run(manifest, count, at_share(0.4, lambda: bench.kill(count // 2)))
    assert list(result.failed) == [f"n{count // 2}"]
    return copy_seconds(result)


def run_cut(bench: Bench, manifest: CopyManifest, count: int) -> float:
    """Pull a cable, which sends no reset; the launcher loses contact with that node too."""
    victim = count // 2

    def pull() -> None:
        ip("-n", SWITCH, "link", "set", f"p{victim}", "down")
        bench.kill(victim, signal.SIGSTOP)

    try:
        result = bench.run(manifest, count, at_share(0.4, pull))
    finally:
        ip("-n", SWITCH, "link", "set", f"p{victim}", "up")
    assert list(result.failed) == [f"n{victim}"]
    return copy_seconds(result)


def run_nothing(bench: Bench, count: int) -> float:
    """Return the seconds of a copy of 10,000 files that all nodes have, with the start of the
    programs.

    `vlaunch model copy --compare` does that; without it, names, sizes and times are compared.
    """
    root = bench.root(0)
    shutil.rmtree(root)
    root.mkdir()
    for number in range(10_000):
        (root / f"file-{number}").write_bytes(b"%d" % number)
    manifest = bench.list_files(root)
    bench.remove_copies(count)
    bench.run(manifest, count)
    began = time.monotonic()
    result = bench.run(manifest, count)
    assert sum(member.received for member in result.members.values()) == 0
    return time.monotonic() - began


def measure_bare(bench: Bench, count: int) -> float:
    """Return the CPU seconds per GB of the bare steps, between the same three nodes."""
    bench.remove_copies(3)
    path = str(bench.root(1).parent / "bare")

    last = start_program(2, RECEIVE, address(2), str(count))
    middle = start_program(1, _BARE, address(1), address(2), str(count), path)
    subprocess.run(
        node_argv(0, sys.executable, "-c", SEND, address(1), str(count)),
        check=True,
        capture_output=True,
    )
    output = middle.communicate(timeout=120)[0]
    last.communicate(timeout=60)
    Path(path).unlink()
    return float(output) / count * 1e9


def measure_cpu(bench: Bench, rounds: int) -> Iterator[Row]:
    """Yield the CPU seconds per GB of a node that receives, checks, writes and forwards.

    The links have no limit; plain and encrypted copies take turns, with the chunks and streams of
    large models. The start of the program does not count.
    """
    for node in range(3):
        unlimit(node)
    bench.chunk, bench.streams = choose_chunk_size(2**40), STREAMS_OF_COPIES
    manifest = bench.make([200 * MB] * 3)
    encryption = {"in the clear": False, "encrypted": True}
    baseline = Row("CPU seconds a GB of receiving, SHA-256, writing and passing on alone")
    rows = {
        name: Row(f"CPU seconds a GB of a node in the middle, {name}", "" if encrypt else "≤ 1.5")
        for name, encrypt in encryption.items()
    }
    busy = MachineLoad()
    for _ in range(rounds):
        baseline.add(measure_bare(bench, 600 * MB), busy)
        for name, row in rows.items():
            bench.encrypt, bench.cpu = encryption[name], []
            bench.remove_copies(3)
            bench.run(manifest, 3)
            row.add(bench.cpu[0], busy)
    yield from (baseline, *rows.values())


Run = Callable[[Bench, CopyManifest, int], float]


@dataclass(frozen=True)
class Case:
    """A measurement with `count` nodes: `run` returns its seconds."""

    kind: str
    name: str
    count: int
    goal: str
    run: Run


def fault_node_count(counts: Sequence[int]) -> int:
    """Return the number of nodes of the cases with faults."""
    return 4 if 4 in counts else max(counts)


def cases(
    counts: Sequence[int], tools: Callable[[int], Sequence[tuple[str, spread_tools.Tool]]]
) -> list[Case]:
    """Return the cases."""
    goals = {4: "≤ 1.05", 8: "≤ 1.08", 16: "≤ 1.12"}
    middle = fault_node_count(counts)

    def case(kind: str, name: str, goal: str, run: Run) -> Case:
        return Case(kind, f"{name}, N = {middle}", middle, goal, run)

    return [
        *(
            Case("chain", f"N = {count}", count, goals.get(count, ""), run_plain)
            for count in counts
        ),
        case("kill", "a node killed at 40 %: the others", "+ 0.1", run_killed),
        case("cable", "its cable pulled instead: the others", "+ 6 s", run_cut),
        case("again", "stopped at half, started again: both", "≤ 1.1", run_interrupted),
        *(
            Case("tools", f"{name}, N = {count}", count, "", tool_run(tool))
            for count in counts
            for name, tool in tools(count)
        ),
    ]


def tool_run(tool: spread_tools.Tool) -> Run:
    def run(bench: Bench, manifest: CopyManifest, count: int) -> float:
        seconds = tool([bench.root(node) for node in range(count)], manifest.chunk_size)
        bench.check(range(1, count))
        return seconds

    return run


def measure(bench: Bench, options: argparse.Namespace) -> list[Row]:
    """Run the cases in turn, round by round."""
    counts = [int(size) for size in options.nodes.split(",")]
    kinds = options.only.split(",") if options.only else CASES
    selected = [case for case in cases(counts, spread_tools.installed_tools) if case.kind in kinds]
    rows = {case.name: Row(case.name, case.goal) for case in selected}
    busy = MachineLoad()
    for _ in range(options.rounds):
        run_round(bench, selected, rows, busy)
    if "nothing" in kinds:
        count = fault_node_count(counts)
        name = f"10,000 files that all have, compared by their digests, N = {count}: seconds"
        rows[name] = Row(name, "≤ 3 s")
        rows[name].add(run_nothing(bench, count), busy)
    cpu_rows = measure_cpu(bench, options.rounds) if "cpu" in kinds and counts[-1] > 2 else ()
    return [*rows.values(), *cpu_rows]


def run_round(
    bench: Bench, chosen: Sequence[Case], rows: Mapping[str, Row], busy: MachineLoad
) -> None:
    """Run each case once, against one copy of this moment."""
    scale = bench.rate / RATE
    manifest = bench.make([int(size * scale) for size in SIZES])
    reference = manifest.total_bytes / measure_goodput(int(40 * MB * scale))
    print(f"  one copy: {reference:.1f} s ({busy.describe()})", file=sys.stderr, flush=True)
    for case in chosen:
        bench.remove_copies(case.count)
        value = case.run(bench, manifest, case.count)
        bench.check([n for n in range(1, case.count) if (bench.root(n) / "file-0").exists()])
        rows[case.name].add(value / reference, busy)


def table(rows: Sequence[Row]) -> str:
    """Return the results as Markdown: the median, all values, and the machine's load."""
    lines = ["| what | × one copy (median) | all | goal | the machine |", "|---|---|---|---|---|"]
    for row in rows:
        median, values = (
            statistics.median(row.values),
            ", ".join(f"{value:.3f}" for value in row.values),
        )
        busy = "; ".join(row.busy)
        lines.append(f"| {row.name} | **{median:.3f}** | {values} | {row.goal} | {busy} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="2,4,8", help="how many nodes, the source included")
    parser.add_argument("--rate", type=float, default=RATE, help="Mbit/s of each link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help=f"some of {', '.join(CASES)}")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="spread-", dir="/dev/shm"))
    largest = max(int(count) for count in options.nodes.split(","))
    size = 2 ** round(math.log2(CHUNK * options.rate / RATE))
    try:
        bench = Bench(base, rate=options.rate, chunk=size)
        with network(largest, options.rate):
            rows = measure(bench, options)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print(table(rows))
    print(f"\nA program took {bench.memory / 1024:.0f} MiB at the most.")


if __name__ == "__main__":
    main()
