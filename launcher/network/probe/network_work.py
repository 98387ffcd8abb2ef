"""Group work of a probe's rank, which may hang: one pair of ranks, or all of them.

Imported by `network_rank.py`. Hung work stays behind in its thread; the process exits without
waiting for it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import network_lanes

if TYPE_CHECKING:
    from network_rank import ProbeRank

T = TypeVar("T")
SLACK = 5.0  # additional seconds of a wait for others


class RankError(Exception):
    """This rank cannot continue; the text has the reason."""


class GroupWork:
    """Work in a group of its own that may hang: it runs in a thread, and is ended from outside."""

    def __init__(self, rank: ProbeRank) -> None:
        self.owner, self.step = rank, "meeting"
        self.lane: network_lanes.Lane | None = None

    def open(self, prefix: str, rank: int, size: int) -> network_lanes.Lane:
        self.step = "connecting"
        owner, self.store = self.owner, self.owner.connect_store(prefix)
        # torch's own timeout comes first: its message is better
        seconds = max(1.0, owner.args.pair_timeout - 1)
        self.store.set_timeout(datetime.timedelta(seconds=seconds))
        if owner.args.backend == "nccl":
            owner.torch.cuda.set_device(owner.local)  # a thread begins with the first GPU
        lane = network_lanes.LANES[owner.args.backend]
        self.lane = lane(
            owner.torch, self.store, rank, size, seconds, owner.ips[owner.args.node_rank]
        )
        return self.lane

    def end(self) -> None:
        """Release the group; ending a hung one may hang, too, and is then left behind."""
        if self.lane is not None:
            run_bounded(self.lane.abort, SLACK / 2)


class PairWork(GroupWork):
    """Two ranks.

    Each first announces whether it can measure, and its memory limit, so that the other does not
    wait in vain.
    """

    def __init__(self, rank: ProbeRank, low: int, high: int, peer: int) -> None:
        super().__init__(rank)
        self.low, self.high, self.peer = low, high, peer

    def run(self) -> dict[str, object]:
        owner = self.owner
        side, key = (
            int(owner.args.node_rank == self.high),
            f"pair/{self.low}-{self.high}/{owner.local}",
        )
        board = owner.connect_store(f"{key}/board")
        board.set_timeout(datetime.timedelta(seconds=owner.args.pair_timeout))
        problem = ""
        if owner.args.backend == "gloo":
            try:
                network_lanes.gloo_devices(owner.ips[owner.args.node_rank])
            except ValueError as error:
                problem = shorten_error(error)
        board.set(f"ready/{side}", json.dumps({"error": problem, "most": owner.most}))
        if problem:
            raise RankError(problem)
        theirs = json.loads(board.get(f"ready/{1 - side}"))
        if theirs["error"]:
            raise RankError(f"{owner.format_ranks([self.peer])}: {theirs['error']}")
        lane, ranks = self.open(key, side, 2), sorted((owner.rank, self.peer))
        measured = network_lanes.measure_pair(
            owner.torch, lane, side, tuple(ranks), min(owner.most, theirs["most"]), self.set_step
        )
        self.step = "closing"
        # Neither side ends its connections before the other has all that is under way.
        board.set(f"over/{side}", "1")
        with contextlib.suppress(Exception):
            board.wait([f"over/{1 - side}"], datetime.timedelta(seconds=SLACK))
        return measured

    def set_step(self, step: str) -> None:
        self.step = step

    def describe_error(self, error: object) -> str:
        """Return the error with the step and the other side."""
        if isinstance(error, RankError):
            return str(error)
        waited = f"not finished after {self.owner.args.pair_timeout:.0f} s"
        return (
            f"{self.step}, {self.owner.format_ranks([self.peer])} on the other side:"
            f" {shorten_error(error) if error else waited}"
        )


class CollectiveWork(GroupWork):
    """All ranks."""

    def run(self) -> dict[str, object]:
        owner = self.owner
        board = owner.connect_store("all/board")
        board.set_timeout(datetime.timedelta(seconds=owner.args.pair_timeout))
        most = min(int(owner.store.get(f"most/{other}")) for other in range(owner.world))

        def agree(name: str, value: str) -> str:
            if owner.rank == 0:
                board.set(name, value)
            return board.get(name).decode()

        lane = self.open("all", owner.rank, owner.world)
        measured = network_lanes.measure_all_reduce(
            owner.torch, lane, owner.rank, owner.world, most, agree
        )
        board.set(f"over/{owner.rank}", "1")
        with contextlib.suppress(Exception):
            board.wait(
                [f"over/{other}" for other in range(owner.world)], datetime.timedelta(seconds=SLACK)
            )
        return measured


def run_bounded(call: Callable[[], T], seconds: float) -> tuple[bool, T | None, Exception | None]:
    """Run a call in a thread; return whether it ended in time, its result, and its exception.

    A hung call is left behind: the process exits without waiting for it.
    """
    box: dict[str, Any] = {}

    def run() -> None:
        try:
            box["value"] = call()
        except Exception as error:
            box["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive(), box.get("value"), box.get("error")


def shorten_error(error: object) -> str:
    """Return the first relevant line of an exception, without its position in the source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    last = next((i for i, line in enumerate(lines) if line == "Last error:"), None)
    first_line = lines[last + 1] if last is not None and last + 1 < len(lines) else lines[0]
    first_line = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h|hpp):\d+\]\s*", "", first_line)
    return (
        first_line.partition(" This is typically caused")[0]
        .partition(" This may indicate")[0]
        .strip()
        .rstrip(".")[:400]
    )
