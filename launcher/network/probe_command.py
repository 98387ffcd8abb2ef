"""Command line and reports of `network/probe/network.py`, the probe that runs in the containers
that will serve.

One probe a node; each starts one rank per GPU (or CPU slot). All ranks meet at a store on the head.
Pairs of nodes are measured first, round by round, so that a pair that hangs spares the others; then
all ranks reduce together.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from launcher.core import decode
from launcher.core.decode import Text
from launcher.core.domain import Answer, Argv, Secret
from launcher.core.errors import UnreadableAnswer

Backend = Literal["nccl", "gloo"]

_NOT_TRIED = "not tried: "  # as `network/probe/network_rank.py` begins the error
# Seconds until a probe must have come to the head's (at most a third of the deadline, so that the
# others can go on), until all ranks must have torch, and after that until all must have met.
REACH, TORCH, WINDOW = 60.0, 180.0, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Transfer from one rank to the same local rank of another node, as measured by the receiver.

    `latency` is seconds one way (half of an 8-byte round trip, median), `bandwidth` bytes a second
    at `size` bytes; `correct` is whether every byte that came was the one sent; `error` is why
    there are no figures.
    """

    source: Text
    target: Text
    local_rank: int
    latency: float | None = None
    bandwidth: float | None = None
    size: int = 0
    correct: bool = True
    error: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """all_reduce over all ranks as one rank saw it: `latency` in seconds at 8 bytes, algorithm and
    bus bandwidth in bytes/s; `error` is why there are no figures.

    Bus bandwidth is algorithm bandwidth × 2(n-1)/n (nccl-tests, doc/PERFORMANCE.md).
    """

    ranks: int
    latency: float | None = None
    size: int = 0
    algbw: float | None = None
    busbw: float | None = None
    correct: bool = True
    error: Text = ""

    @property
    def tried(self) -> bool:
        """False if pairs failed before, so that no all_reduce was started."""
        return not self.error.startswith(_NOT_TRIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Progress of one rank.

    `phase` is the last phase as text; `exit` the exit code, `None` while it runs; `ended` means
    that it finished all its work; `tail` is the end of its output. `torch` and `meeting` are the
    seconds for the first use of torch and its backend, and for the rendezvous after the last rank
    was ready.
    """

    rank: int
    local_rank: int
    phase: Text
    ended: bool
    exit: int | None = None
    error: Text = ""
    tail: Text = ""
    torch: float | None = None
    meeting: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report of one node's probe.

    `log` has the relevant lines of NCCL's log, `env` its network variables; `infiniband` lists the
    container's /dev/infiniband (None: unknown), `memlock` is the lockable memory in bytes (None:
    unlimited or unknown); `rdma` are the active RDMA ports (`mlx5_0:1`), `shared_switch` tells
    whether a GPU and an RDMA device share a PCIe switch (None: unknown); `pair_logs` has NCCL's
    lines of each pair's measurement, by peer.
    """

    node: Text
    backend: Text
    ranks: tuple[RankReport, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    collective: Collective | None = None
    log: Text = ""
    env: Mapping[str, Text] = field(default_factory=dict)
    gpu: Text = ""
    versions: Mapping[str, Text] = field(default_factory=dict)
    seconds: float = 0.0
    error: Text = ""
    infiniband: tuple[Text, ...] | None = None
    memlock: int | None = None
    rdma: tuple[str, ...] = ()
    shared_switch: bool | None = None
    pair_logs: Mapping[str, Text] = field(default_factory=dict)


def probe_argv(
    *,
    node: str,
    node_rank: int,
    nodes: Mapping[str, str],
    ranks_per_node: int,
    master: str,
    port: int,
    backend: Backend,
    nonce: str,
    deadline: float = 120.0,
    pair_timeout: float = 20.0,
) -> Argv:
    """Build the probe's command line for one node; all nodes start it at the same time and keep its
    standard input open.

    `nodes` are addresses by name in the order of their ranks, the head first: all ranks meet at
    `master`, its address. `deadline` and `pair_timeout` are seconds.
    """
    options = {
        "node": node,
        "node-rank": node_rank,
        "nodes": ",".join(f"{name}={ip}" for name, ip in nodes.items()),
        "ranks-per-node": ranks_per_node,
        "master": master,
        "port": port,
        "backend": backend,
        "deadline": f"{deadline:g}",
        "reach": f"{min(REACH, deadline / 3):g}",
        "torch": f"{TORCH:g}",
        "window": f"{WINDOW:g}",
        "pair-timeout": f"{pair_timeout:g}",
        "nonce": nonce,
    }
    flags = (argument for name, value in options.items() for argument in (f"--{name}", str(value)))
    return ("python3", "-B", "/opt/vlaunch/network.pyz", *flags)


def program_input(certificate: Secret) -> bytes:
    """Return the first line of a probe's standard input."""
    return json.dumps({"certificate": certificate.reveal()}).encode() + b"\n"


def parse_report(answer: Answer) -> Report:
    """Parse the JSON object that a probe prints, whatever its outcome.

    Its `error` is the probe's own; each rank and transfer has one, too. Raises UnreadableAnswer
    without such an object: the program did not start, or was killed too early.
    """
    line = answer.out.strip().rpartition("\n")[2]
    try:
        return decode.parse_json(Report, line, "the report", forbid_unknown=True)
    except UnreadableAnswer as error:
        outcome = (
            "did not finish in time"
            if answer.timed_out
            else f"exited with code {answer.code} without a readable report"
        )
        evidence = f"{error}: {error.evidence}" if line.startswith("{") else answer.tail
        raise UnreadableAnswer(
            f"{answer.node}: the network probe {outcome}",
            evidence=evidence or "(it printed nothing)",
        ) from None
