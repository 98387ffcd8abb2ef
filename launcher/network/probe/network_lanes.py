"""Measurements of the network probe: lanes over torch's process groups, verifiable data, sizes that
fit the link.

The rank passes `torch` in (see `network_rank.py`); this file imports the standard library only.
"""

from __future__ import annotations

import datetime
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.cuda import Event
    from torch.distributed import ProcessGroup, Store

MIB = 1 << 20
LONG_ENOUGH = 0.15  # seconds: one transfer of this length is measured well
ROUND_TRIPS, WARM_UP, REPEATS = 50, 10, 3
LIMITS = {"nccl": 256 * MIB, "gloo": 64 * MIB}


class Lane(Protocol):
    """Operations over one of torch's process groups; a mark is a moment."""

    device: str
    limit: float
    group: ProcessGroup

    def send(self, tensor: Tensor, peer: int) -> None:
        self.group.send([tensor], peer, 0).wait()

    def recv(self, tensor: Tensor, peer: int) -> None:
        self.group.recv([tensor], peer, 0).wait()

    def reduce(self, tensor: Tensor) -> None:
        self.group.allreduce([tensor]).wait()

    def abort(self) -> None:
        self.group.abort()

    def mark(self) -> Any: ...

    def elapsed(self, start: Any, end: Any) -> float: ...

    def settle(self) -> None: ...


class Gloo(Lane):
    """A group over TCP on the CPU: calls block until their bytes are sent; a mark is a clock
    reading.
    """

    def __init__(
        self, torch: ModuleType, store: Store, rank: int, size: int, seconds: float, ip: str
    ) -> None:
        dist = torch.distributed
        options = getattr(dist.ProcessGroupGloo, "_Options", None) or dist.ProcessGroupGloo.Options
        options = options()
        options._devices = [
            dist.ProcessGroupGloo.create_device(**where) for where in gloo_devices(ip)
        ]
        options._timeout = datetime.timedelta(seconds=seconds)
        self.torch, self.device, self.limit = torch, "cpu", seconds
        self.group = dist.ProcessGroupGloo(store, rank, size, options)

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        """Do nothing: calls have finished when they return."""


class Nccl(Lane):
    """A group over NCCL: calls are queued on the GPU, so marks are CUDA events and `settle` waits
    for the queue.

    `wait()` of a NCCL work only orders streams while TORCH_NCCL_BLOCKING_WAIT is off; a hang is
    therefore detected with an event, and ended by `abort` (torch.distributed documentation,
    ProcessGroupNCCL).
    """

    def __init__(
        self, torch: ModuleType, store: Store, rank: int, size: int, seconds: float, ip: str
    ) -> None:
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=seconds)
        self.torch, self.device, self.limit = torch, "cuda", seconds
        self.group = torch.distributed.ProcessGroupNCCL(store, rank, size, options)

    def mark(self) -> Event:
        event: Event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, start: Event, end: Event) -> float:
        return start.elapsed_time(end) / 1000

    def settle(self) -> None:
        event, deadline = self.mark(), time.monotonic() + self.limit
        while not event.query():
            if failure := self.failure():
                raise ConnectionError(f"NCCL lost the other side ({failure})")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the GPU waited {self.limit:.0f} s for the other side")
            time.sleep(0.0002)

    def failure(self) -> str:
        """Return NCCL's current error, such as COMM_ERROR; empty without one, and with torch before
        2.7, which does not report it.
        """
        name = self.group.get_error().name if hasattr(self.group, "get_error") else "SUCCESS"
        return "" if name == "SUCCESS" else name


LANES: dict[str, type[Gloo | Nccl]] = {"gloo": Gloo, "nccl": Nccl}


def gloo_devices(ip: str) -> list[dict[str, str]]:
    """Return the arguments of Gloo's devices: the interfaces of GLOO_SOCKET_IFNAME, else the one
    with the node's address.

    Gloo's default resolves the hostname, which may be 127.0.1.1. Raises ValueError for an unknown
    interface.
    """
    requested = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    existing = [name for _, name in socket.if_nameindex()]
    missing = [name for name in requested if name not in existing]
    if missing:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, which is not here: there are"
            f" {', '.join(existing)}"
        )
    return [{"interface": name} for name in requested] or [{"hostname": ip}]


def max_transfer(backend: str, free: int, ranks: int) -> int:
    """Return the largest transfer in bytes, a power of two within LIMITS and the memory."""
    most = min(LIMITS[backend], free // 8 // ranks)
    return 1 << max(3, most.bit_length() - 1)


def larger_size(size: int, seconds: float, most: int) -> int:
    """Return the next size; 0 if a transfer took long enough, or the next is too large."""
    return 0 if seconds >= LONG_ENOUGH or size * 2 > most else size * 2


def next_size(size: int, times: list[float], most: int) -> int:
    """Return the next size after these times: larger, the same, or 0 after enough times."""
    larger = larger_size(size, times[-1], most) if len(times) == 1 else 0
    if larger:
        return larger
    return 0 if len(times) >= REPEATS or times[-1] > 1 else size


def fill(torch: ModuleType, tensor: Tensor, source: int, sequence: int) -> None:
    """Write bytes that depend on sender, sequence number and position."""
    for part, expected in _pieces(torch, tensor, source, sequence):
        part.copy_(expected)


def matches(torch: ModuleType, tensor: Tensor, source: int, sequence: int) -> bool:
    """True if every byte is the one that `fill` wrote."""
    return all(
        bool(torch.equal(part, expected))
        for part, expected in _pieces(torch, tensor, source, sequence)
    )


def _pieces(
    torch: ModuleType, tensor: Tensor, source: int, sequence: int
) -> Iterator[tuple[Tensor, Tensor]]:
    count = min(tensor.numel(), MIB)
    positions = torch.arange(count, dtype=torch.int64, device=tensor.device)
    # Knuth's multiplicative hash: neighbours differ, and so do blocks.
    base = (
        ((positions * 2654435761 >> 15) + source * 101 + sequence * 17)
        .bitwise_and(255)
        .to(torch.uint8)
    )
    for index in range(0, tensor.numel(), count):
        part = tensor[index : index + count]
        yield part, base[: part.numel()] + (index // count * 5) % 256


def measure_pair(
    torch: ModuleType,
    lane: Lane,
    rank: int,
    sources: tuple[int, int],
    most: int,
    step: Callable[[str], None],
) -> dict[str, object]:
    """Measure with the other member of a group of two: latency, then one direction after the other.

    `rank` is 0 or 1; `sources` are the global ranks of both; `step(text)` reports the next phase.
    Returns the receiving side's latency (s), bandwidth (bytes/s) at size (bytes), and whether all
    data was correct.
    """
    step("connecting")
    _measure_latency(torch, lane, rank == 0, 1)
    step("measuring latency")
    latency = _measure_latency(torch, lane, rank == 0, WARM_UP + ROUND_TRIPS)
    answer: dict[str, object] = {"latency": latency}
    for source in (0, 1):
        step("sending" if source == rank else "receiving")
        if source == rank:
            _send_requested(torch, lane, 1 - rank, sources[rank], most)
        else:
            answer.update(_measure_bandwidth(torch, lane, source, sources[source], most, latency))
    return answer


def _measure_latency(torch: ModuleType, lane: Lane, first: bool, trips: int) -> float:
    """Return half the median round trip of eight bytes, as measured by the initiator."""
    out, back = (torch.zeros(8, dtype=torch.uint8, device=lane.device) for _ in range(2))
    peer, marks = lane.group.rank() ^ 1, []
    for _ in range(trips):
        start = lane.mark()
        if first:
            lane.send(out, peer)
            lane.recv(back, peer)
        else:
            lane.recv(back, peer)
            lane.send(out, peer)
        marks.append((start, lane.mark()))
    lane.settle()
    latency = torch.zeros(1, dtype=torch.float64, device=lane.device)
    if first:
        latency[0] = (
            statistics.median(lane.elapsed(*interval) for interval in marks[WARM_UP:] or marks) / 2
        )
        lane.send(latency, peer)
    else:
        lane.recv(latency, peer)
    lane.settle()
    return float(latency.item())


def _send_requested(torch: ModuleType, lane: Lane, peer: int, source: int, most: int) -> None:
    """Send the sizes that the receiver requests, until it requests none."""
    buffer = torch.empty(most, dtype=torch.uint8, device=lane.device)
    order = torch.zeros(2, dtype=torch.int64, device=lane.device)
    signal = torch.zeros(1, dtype=torch.uint8, device=lane.device)
    while True:
        lane.recv(order, peer)
        lane.settle()
        size, sequence = order.tolist()
        if size == 0:
            return
        fill(torch, buffer[:size], source, sequence)
        lane.settle()
        lane.send(signal, peer)  # ready
        lane.recv(signal, peer)  # go
        lane.send(buffer[:size], peer)
        lane.settle()


def _measure_bandwidth(
    torch: ModuleType, lane: Lane, peer: int, source: int, most: int, latency: float
) -> dict[str, object]:
    """Request growing sizes; return the last one's bandwidth, and whether data was correct."""
    buffer = torch.empty(most, dtype=torch.uint8, device=lane.device)
    signal = torch.zeros(1, dtype=torch.uint8, device=lane.device)
    size, sequence, correct, times = min(MIB, most), 0, True, []
    began = time.monotonic()
    while True:
        lane.send(torch.tensor([size, sequence], dtype=torch.int64, device=lane.device), peer)
        lane.recv(signal, peer)
        lane.settle()
        start = lane.mark()
        lane.send(signal, peer)
        lane.recv(buffer[:size], peer)
        end = lane.mark()
        lane.settle()
        # The signal `go` travels, too; at least half of the time is the transfer's own.
        elapsed = lane.elapsed(start, end)
        times.append(max(elapsed - latency, elapsed / 2, 1e-9))
        correct = matches(torch, buffer[:size], source, sequence) and correct
        sequence += 1
        if time.monotonic() - began > lane.limit / 5:
            break  # a busy machine: leave time for the other direction
        next_bytes = next_size(size, times, most)
        if not next_bytes:
            break
        if next_bytes != size:
            size, times = next_bytes, []
    lane.send(torch.zeros(2, dtype=torch.int64, device=lane.device), peer)
    lane.settle()
    return {"bandwidth": size / statistics.median(times), "size": size, "correct": correct}


def measure_all_reduce(
    torch: ModuleType,
    lane: Lane,
    rank: int,
    ranks: int,
    most: int,
    agree: Callable[[str, str], str],
) -> dict[str, object]:
    """Measure all_reduce over a group: latency at 8 bytes, then growing sizes.

    `agree(name, value)` gives all ranks rank 0's value.
    """
    latency = _reduce_latency(torch, lane)
    pattern = (torch.arange(min(MIB, most) // 4, device=lane.device) % 997).to(torch.float32)
    size, step, correct, times = pattern.numel() * 4, 0, True, []
    began = time.monotonic()
    while size:
        tensor = pattern.repeat(size // 4 // pattern.numel())
        tensor += rank
        lane.settle()
        start = lane.mark()
        lane.reduce(tensor)
        end = lane.mark()
        lane.settle()
        times.append(max(lane.elapsed(start, end), 1e-9))
        # Whole numbers far below 2**24: their sum is exact in 32-bit floats.
        expected = pattern * ranks + ranks * (ranks - 1) / 2
        correct = (
            all(bool(torch.equal(part, expected)) for part in tensor.split(pattern.numel()))
            and correct
        )
        is_late = time.monotonic() - began > lane.limit / 3
        next_bytes = 0 if is_late else next_size(size, times, most)
        done, size = size, int(agree(str(step), str(next_bytes)))
        times, step = (times if size in (0, done) else []), step + 1
    algbw = done / statistics.median(times)
    return {
        "ranks": ranks,
        "latency": latency,
        "size": done,
        "algbw": algbw,
        "busbw": algbw * 2 * (ranks - 1) / ranks,
        "correct": correct,
    }


def _reduce_latency(torch: ModuleType, lane: Lane) -> float:
    """Return the median time of an all_reduce of eight bytes."""
    small, marks = torch.zeros(2, dtype=torch.float32, device=lane.device), []
    for _ in range(WARM_UP + ROUND_TRIPS):
        start = lane.mark()
        lane.reduce(small)
        marks.append((start, lane.mark()))
    lane.settle()
    return statistics.median(lane.elapsed(*interval) for interval in marks[WARM_UP:])
