"""One rank of the network probe: meets the others at a store on the head, measures with one peer
per round, then with all.

Runs as `network.py --child`; imports torch. Its results go to its parent as JSON lines on the
descriptor `--events`.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import glob
import json
import os
import re
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, TextIO

import network_lanes
from network_work import SLACK, CollectiveWork, PairWork, RankError, run_bounded, shorten_error

if TYPE_CHECKING:
    from torch.distributed import Store

TICK = 1.0  # seconds between two checks of rank 0 for exited ranks


def main(args: Namespace) -> int:
    """Run one rank and report to the parent; return the exit code."""
    die_with_parent(args.parent)
    events = EventPipe(args.events)
    try:
        rank = ProbeRank(args, events)
        rank.start()
        rank.run_rounds()
        rank.measure_collective()
    except Exception as error:
        events.send(error=shorten_error(error))
        return 1
    events.send(phase="done", done=True)
    return 0


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process with its parent (prctl(2), PR_SET_PDEATHSIG)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class EventPipe:
    """Pipe to the parent: one JSON object per line."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.lock = descriptor, threading.Lock()

    def send(self, **fields: object) -> None:
        with self.lock:
            os.write(self.descriptor, json.dumps(fields).encode() + b"\n")


class ProbeRank:
    """State of one rank: its position among all, its store, and the lost ranks."""

    def __init__(self, args: Namespace, events: EventPipe) -> None:
        self.args, self.events = args, events
        self.names = [entry.partition("=")[0] for entry in args.nodes.split(",")]
        self.ips = [entry.partition("=")[2] for entry in args.nodes.split(",")]
        self.local, self.per_node = args.child, args.ranks_per_node
        self.rank, self.world = (
            args.node_rank * self.per_node + self.local,
            len(self.names) * self.per_node,
        )
        self.lost: list[int] = []
        self.dead: set[int] = set()  # ranks that ended between the release and the rendezvous
        self.met = False
        self.since = 0.0  # end of the last meeting

    def start(self) -> None:
        """Import torch, report its facts, wait until all ranks have done so, and meet the others.

        Raises RankError.
        """
        self.events.send(phase="importing torch")
        began = time.monotonic()
        self.torch = load_torch(self.args.backend, self.local)
        self.events.send(facts=torch_facts(self.torch, self.args.backend, self.local))
        free = free_memory(self.torch, self.args.backend)
        self.most = network_lanes.max_transfer(self.args.backend, free, self.per_node)
        where = f"rendezvous at {self.args.master}:{self.args.port}"
        self.events.send(phase=f"first use of {self.args.backend} on this node")
        self.warm_up(max(SLACK, began + self.args.torch - 2 * SLACK - time.monotonic()))
        took = round(time.monotonic() - began, 3)
        phase = f"{where}: waiting until all ranks have torch"
        self.events.send(phase=phase, ready=True, took={"torch": took})
        self.await_release(sys.stdin)
        threading.Thread(target=self.follow_parent, args=(sys.stdin,), daemon=True).start()
        self.events.send(phase=where)
        began = self.since = time.monotonic()
        self.store = self.open_store()
        self.meet("rendezvous", self.args.window)
        self.met = True
        self.events.send(took={"meeting": round(time.monotonic() - began, 3)})

    def warm_up(self, seconds: float) -> None:
        """Use the backend once without any other rank, so that no pair pays for the first use.

        NCCL compiles its kernels on a GPU without binaries, which takes up to a minute
        (NVIDIA/nccl#1646). A failure here is ignored: the first pair reports it.
        """

        def use() -> None:
            if self.args.backend == "nccl":
                self.torch.cuda.set_device(self.local)  # a thread begins with the first GPU
            lane = network_lanes.LANES[self.args.backend](
                self.torch,
                self.torch.distributed.HashStore(),
                0,
                1,
                seconds,
                self.ips[self.args.node_rank],
            )
            lane.reduce(self.torch.ones(1, device=lane.device))
            lane.settle()
            lane.abort()

        run_bounded(use, seconds)

    def await_release(self, orders: TextIO) -> None:
        """Wait for the parent's order: `go`, on the head with the missing nodes, or `no` with a
        reason. Raises RankError.
        """
        verb, _, argument = orders.readline().rstrip("\n").partition(" ")
        if verb != "go":
            raise RankError(argument or "its probe ended")
        self.lost = [rank for name in argument.split(",") if name for rank in self.ranks_of(name)]
        if self.lost:
            self.events.send(note=f"at rendezvous: {self.format_ranks(self.lost)} did not arrive")

    def follow_parent(self, orders: TextIO) -> None:
        """Process the parent's lines until the ranks have met: `lost NODE` for a node whose ranks
        will not come, `no REASON` if none will.
        """
        for line in orders:
            verb, _, argument = line.rstrip("\n").partition(" ")
            if self.met:
                return
            if verb == "lost":
                self.dead.update(self.ranks_of(argument))
            elif verb == "no":
                self.events.send(error=argument)
                exit_now(1)

    def open_store(self) -> Store:
        """Open the store (as its owner on rank 0) and verify by the nonce that it belongs to this
        run.

        Raises RankError.
        """
        where, master = f"{self.args.master}:{self.args.port}", self.rank == 0
        # In a thread: a stranger that accepts and never answers holds the constructor beyond its
        # own timeout.
        done, store, error = run_bounded(self.connect_store, self.args.window + SLACK)
        if not done:
            raise RankError(f"something else answers at {where}: it is not this run's store")
        if store is None:
            raise RankError(f"{where}: {shorten_error(error)}")
        if master:
            store.set("hello", "here")
        else:
            try:
                store.wait(["hello"], datetime.timedelta(seconds=self.args.window))
            except Exception:
                raise RankError(
                    f"something else answers at {where}: a store, but not this run's"
                ) from None
        return store

    def connect_store(self, prefix: str = "") -> Store:
        """Return a separate connection to the store: a waiting call blocks its connection."""
        dist, first = self.torch.distributed, not prefix and self.rank == 0
        store = dist.TCPStore(
            self.args.master,
            self.args.port,
            None,
            first,
            timeout=datetime.timedelta(seconds=self.args.window),
            wait_for_workers=False,
            **(
                {"master_listen_fd": self.args.listener}
                if first and self.args.listener >= 0
                else {}
            ),
        )
        prefixed: Store = dist.PrefixStore(
            self.args.nonce + (f"/{prefix}" if prefix else ""), store
        )
        return prefixed

    def meet(self, name: str, seconds: float) -> None:
        """Wait until all ranks that are not lost have arrived, at most `seconds` after the last
        meeting.

        Rank 0 decides which ranks are lost, so that all agree. Raises RankError if this rank is
        lost, or the store is gone.
        """
        remaining = max(1.0, self.since + seconds - time.monotonic())
        arrived = {rank: f"arrived/{name}/{rank}" for rank in self.ranks_without(self.lost)}
        try:
            self.store.set(arrived[self.rank], "1")
            if self.rank == 0:
                self.count_arrived(name, arrived, remaining)
            self.store.wait([f"over/{name}"], datetime.timedelta(seconds=remaining + SLACK))
            lost = json.loads(self.store.get(f"over/{name}"))
        except Exception as error:
            raise RankError(
                f"waiting for all ranks at {name}: {self.explain_wait(error, remaining)}"
            ) from None
        if self.rank in lost:
            raise RankError(f"the others continued without this rank: it was too late for {name}")
        if len(lost) > len(self.lost):
            present = self.ranks_without(lost)
            new = [other for other in lost if other not in self.lost]
            late, on_time = self.format_ranks(new), self.format_ranks(present)
            self.events.send(note=f"at {name}: {late} did not arrive, {on_time} did")
        self.lost, self.since = lost, time.monotonic()

    def ranks_of(self, node: str) -> range:
        """Return all ranks of a node."""
        first = self.names.index(node) * self.per_node
        return range(first, first + self.per_node)

    def ranks_without(self, lost: Iterable[int]) -> list[int]:
        """Return all ranks but the lost ones."""
        return [rank for rank in range(self.world) if rank not in lost]

    def count_arrived(self, name: str, arrived: dict[int, str], seconds: float) -> None:
        """Publish the lost ranks, once all living ones have arrived or the time is over."""
        deadline, complete = time.monotonic() + seconds, False
        while not complete and (remaining := deadline - time.monotonic()) > 0:
            keys = [key for rank, key in arrived.items() if rank not in self.dead]
            try:
                self.store.wait(keys, datetime.timedelta(seconds=min(remaining, TICK)))
                complete = True
            except Exception as error:
                if not timed_out(error):
                    break
        doubtful = self.dead & arrived.keys() if complete else arrived
        missing = [rank for rank in doubtful if not self.store.check([arrived[rank]])]
        self.store.set(f"over/{name}", json.dumps(sorted({*self.lost, *missing})))

    def explain_wait(self, error: Exception, seconds: float) -> str:
        """Explain a failed wait: the head never answered, or the store is gone."""
        if timed_out(error):
            return f"{self.format_ranks([0])} sent nothing for {seconds + SLACK:.0f} s"
        return f"the store is gone: {self.format_ranks([0])} ended ({shorten_error(error)})"

    def format_ranks(self, ranks: Iterable[int]) -> str:
        """Format ranks with their nodes."""
        listing = ", ".join(f"rank {rank} ({self.names[rank // self.per_node]})" for rank in ranks)
        return listing or "no rank"

    def run_rounds(self) -> None:
        """Measure with one node per round, in as many parallel pairs as possible."""
        mine = self.args.node_rank
        for number, pairs in enumerate(tournament(len(self.names)), 1):
            for low, high in pairs:
                if mine in (low, high):
                    self.measure_pair(low, high)
            self.meet(f"round {number}", self.args.pair_timeout + SLACK)

    def measure_pair(self, low: int, high: int) -> None:
        """Measure with the same local rank of another node, and report the received data."""
        peer_node = high if self.args.node_rank == low else low
        peer = peer_node * self.per_node + self.local
        self.events.send(phase=f"pair {self.names[low]} ↔ {self.names[high]}")
        transfer: dict[str, object] = {
            "source": self.names[peer_node],
            "target": self.args.node,
            "local_rank": self.local,
        }
        if peer in self.lost:
            transfer["error"] = f"{self.format_ranks([peer])} did not arrive"
        else:
            work, start = PairWork(self, low, high, peer), log_size()
            done, measured, error = run_bounded(work.run, self.args.pair_timeout)
            work.end()
            self.events.send(log={"peer": self.names[peer_node], "start": start, "end": log_size()})
            if done and measured is not None:
                transfer.update(measured)
            else:
                transfer["error"] = work.describe_error(error)
        if transfer.get("error") or not transfer.get("correct", True):
            self.store.set(f"bad/{low}-{high}", "1")
        self.events.send(transfer=transfer)

    def measure_collective(self) -> None:
        """Reduce over all ranks if every pair passed; the store's owner leaves last."""
        self.events.send(phase="all_reduce")
        self.store.set(f"most/{self.rank}", str(self.most))
        self.meet("all_reduce", SLACK)
        self.events.send(collective={"ranks": self.world, **self.run_collective()})
        # Set last: rank 0 keeps the store open until all ranks have set it.
        self.store.set(f"arrived/done/{self.rank}", "1")
        if self.rank == 0:
            keys = [f"arrived/done/{rank}" for rank in self.ranks_without(self.lost)]
            with contextlib.suppress(Exception):
                self.store.wait(
                    keys, datetime.timedelta(seconds=2 * SLACK + self.args.pair_timeout)
                )

    def run_collective(self) -> dict[str, object]:
        bad = [
            (low, high)
            for low in range(len(self.names))
            for high in range(low + 1, len(self.names))
            if self.store.check([f"bad/{low}-{high}"])
        ]
        if self.lost or bad:
            why = (
                f"{len(bad)} pair{'s' * (len(bad) != 1)} failed"
                if bad
                else f"{self.format_ranks(self.lost)} did not arrive"
            )
            return {"error": f"not tried: {why}"}
        work = CollectiveWork(self)
        done, measured, error = run_bounded(work.run, self.args.pair_timeout)
        work.end()
        if done and measured is not None:
            return measured
        return {
            "error": shorten_error(error)
            if error
            else f"not finished after {self.args.pair_timeout:.0f} s"
        }


def timed_out(error: Exception) -> bool:
    """True if a wait at the store timed out, rather than failed."""
    return "timeout" in str(error).lower() or "timed out" in str(error)


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which every pair of `count` nodes meets once, and each node at most once per
    round (circle method).
    """
    ring: list[int] = [*range(count), *([-1] if count % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1 if count > 1 else 0):
        met = [sorted((ring[i], ring[-1 - i])) for i in range(len(ring) // 2)]
        rounds.append([(low, high) for low, high in met if low >= 0])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def load_torch(backend: str, local: int) -> ModuleType:
    """Import torch and select this rank's GPU. Raises RankError."""
    # Our own clock ends what hangs; torch must neither block in `wait` nor end the process for it.
    os.environ.update(
        {
            "TORCH_NCCL_BLOCKING_WAIT": "0",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
    )
    try:
        import torch
        import torch.distributed
    except Exception as error:
        raise RankError(f"cannot import torch: {shorten_error(error)}") from None
    if not torch.distributed.is_available():
        raise RankError("torch was built without torch.distributed")
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise RankError("torch sees no GPU in this container")
        if local >= torch.cuda.device_count():
            raise RankError(
                f"torch sees {torch.cuda.device_count()} GPUs; this is local rank {local}"
            )
        if not torch.distributed.is_nccl_available():
            raise RankError("torch was built without NCCL")
        torch.cuda.set_device(local)
    else:
        # threads that wait for each other on a busy CPU cost more than they bring
        torch.set_num_threads(1)
    return torch


def torch_facts(torch: ModuleType, backend: str, local: int) -> dict[str, object]:
    """Return versions, and the GPU's name."""
    versions = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": getattr(torch.version, "hip", None) or "",
    }
    gpu = ""
    if backend == "nccl":
        gpu = torch.cuda.get_device_name(local)
        versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return {"gpu": gpu, "versions": {key: str(value) for key, value in versions.items() if value}}


def free_memory(torch: ModuleType, backend: str) -> int:
    """Return the free bytes for tensors; on a CPU, of the whole node."""
    if backend == "nccl":
        return int(torch.cuda.mem_get_info()[0])
    with open("/proc/meminfo", encoding="ascii") as file:
        match = re.search(r"^MemAvailable:\s*(\d+) kB", file.read(), re.M)
    return int(match[1]) * 1024 if match else 1 << 30


def log_size() -> int:
    """Return the size of this process's NCCL log, to find the lines of a pair's measurement."""
    folder = os.path.dirname(os.environ.get("NCCL_DEBUG_FILE", ""))
    return (
        sum(
            os.path.getsize(path)
            for path in glob.glob(os.path.join(folder, f"nccl.*.{os.getpid()}.log"))
        )
        if folder
        else 0
    )


def exit_now(code: int) -> None:
    """Exit at once, without waiting for left-over threads and torch's destructors."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
