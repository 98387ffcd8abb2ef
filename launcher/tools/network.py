"""What we say to `payload/network.py`, the probe that runs in the containers that will serve, and
how its reports are read.

One probe a node; each starts one rank per GPU (or CPU slot). All ranks meet at a store on the head.
Pairs of nodes are measured first, round by round, so that a pair that hangs spares the others; then
all ranks reduce together.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from launcher.errors import UnreadableAnswer
from launcher.model import Answer, Argv
from launcher.tools import untrusted
from launcher.tools.inside import Inside

Backend = Literal["nccl", "gloo"]
_Noun = TypeVar("_Noun")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Send and receive from one rank to the same local rank of another node, as the receiver
    measured it.

    `latency` is seconds one way (half of an 8-byte round trip, median), `bandwidth` bytes a second
    at `size` bytes; `correct` is whether every byte that came was the one sent; `error` is why
    there are no figures.
    """

    source: str
    target: str
    local_rank: int
    latency: float | None = None
    bandwidth: float | None = None
    size: int = 0
    correct: bool = True
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """all_reduce over all ranks as one rank saw it: `latency` in seconds at 8 bytes, algorithm and
    bus bandwidth in bytes/s.

    Bus bandwidth is algorithm bandwidth × 2(n-1)/n (nccl-tests, doc/PERFORMANCE.md).
    """

    ranks: int
    latency: float | None = None
    size: int = 0
    algbw: float | None = None
    busbw: float | None = None
    correct: bool = True
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """How far one rank came.

    `phase` is the last it entered, in words; `exit` its exit code, `None` while it runs; `ended`
    means it did all it was asked; `tail` is the end of what it printed.
    """

    rank: int
    local_rank: int
    phase: str
    ended: bool
    exit: int | None = None
    error: str = ""
    tail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one node's probe says.

    `log` is what NCCL wrote there, its telling lines only; `env` its network variables; `inside` is
    what it saw of its container: memlock, capabilities, /dev/infiniband, libibverbs (see
    `tools.inside`); `rdma` are the active RDMA ports there (`mlx5_0:1`); `pair_logs` is, by peer,
    what NCCL wrote as that pair was measured.
    """

    node: str
    backend: str
    ranks: tuple[RankReport, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    collective: Collective | None = None
    log: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    gpu: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    inside: Inside | None = None
    rdma: tuple[str, ...] = ()
    pair_logs: Mapping[str, str] = field(default_factory=dict)


def probe(
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
    window: float = 30.0,
    pair_timeout: float = 20.0,
    max_bytes: int = 0,
    running: bool = False,
) -> Argv:
    """Build the probe's command line for one node; started on all nodes at the same time, its
    standard input held open.

    `nodes` are addresses by name in the order of their ranks, the head first: all ranks meet at
    `master`, its address. `deadline`, `window` (how long to wait for the others to come) and
    `pair_timeout` are seconds; `max_bytes` 0 leaves the size to the probe; `running` says that the
    container is the one that serves.
    """
    return (
        "python3",
        "-B",
        "/opt/vlaunch/network.py",
        "--node",
        node,
        "--node-rank",
        str(node_rank),
        "--nodes",
        ",".join(f"{name}={ip}" for name, ip in nodes.items()),
        "--ranks-per-node",
        str(ranks_per_node),
        "--master",
        master,
        "--port",
        str(port),
        "--backend",
        backend,
        "--deadline",
        f"{deadline:g}",
        "--window",
        f"{window:g}",
        "--pair-timeout",
        f"{pair_timeout:g}",
        "--max-bytes",
        str(max_bytes),
        "--nonce",
        nonce,
        *(("--running",) if running else ()),
    )


def parse_report(answer: Answer) -> Report:
    """Read the one JSON object that a probe prints, whatever became of it.

    Its `error` is what the probe says of itself; each rank and transfer has its own. Raises
    UnreadableAnswer when there is no such object: the program did not start, or was killed before
    it could speak.
    """
    line = answer.out.strip().rpartition("\n")[2]
    try:
        said = untrusted.loads(line)
    except ValueError:
        raise _unreadable(answer, answer.tail or "(it printed nothing)") from None
    try:
        return _report(said)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(answer, f"{error}: {line[:300]}") from None


def _unreadable(answer: Answer, evidence: str) -> UnreadableAnswer:
    what = (
        "did not end in time"
        if answer.timed_out
        else f"ended with exit code {answer.code} and no report that can be read"
    )
    return UnreadableAnswer(f"{answer.node}: the network probe {what}", evidence=evidence)


def _report(said: object) -> Report:
    raw = _mapping(said)
    ranks, transfers = raw.pop("ranks", []), raw.pop("transfers", [])
    collective, inside = raw.pop("collective", None), raw.pop("inside", None)
    plain = _noun(Report, raw)
    return Report(
        **{each.name: getattr(plain, each.name) for each in fields(Report) if each.name in raw},
        ranks=tuple(_noun(RankReport, each) for each in _sequence(ranks)),
        transfers=tuple(_noun(Transfer, each) for each in _sequence(transfers)),
        collective=None if collective is None else _noun(Collective, collective),
        inside=None if inside is None else _noun(Inside, inside),
    )


def _noun(kind: type[_Noun], said: object) -> _Noun:
    """Make a dataclass of a JSON object; raises TypeError for a value of another kind and a field
    too few or too many.
    """
    hints = get_type_hints(kind)
    return kind(
        **{key: _value(key, hints.get(key), value) for key, value in _mapping(said).items()}
    )


def _value(key: str, hint: Any, value: object) -> object:
    """Check a JSON value against a field's type, turning arrays into tuples; only the types that
    the shapes above use.
    """
    origin = get_origin(hint)
    if isinstance(hint, types.UnionType) or origin is Union:
        return None if value is None else _value(key, _required(hint), value)
    if origin is not None:
        return _collection(key, origin, value)
    if hint is float and _is_number(value):
        return float(value)
    if type(value) is hint:
        return untrusted.cut(value) if isinstance(value, str) else value
    raise _misfit(key, value)


def _required(hint: Any) -> Any:
    """Return the type that an optional field has when it is there."""
    return next(each for each in get_args(hint) if each is not type(None))


def _collection(key: str, kind: type, value: object) -> object:
    """Check a JSON array or object of texts."""
    if kind is tuple and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    if issubclass(kind, Mapping) and isinstance(value, dict):
        return {name: untrusted.cut(str(each)) for name, each in value.items()}
    raise _misfit(key, value)


def _misfit(key: str, value: object) -> TypeError:
    return TypeError(f"`{key}` cannot be {value!r:.80}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _mapping(said: object) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise TypeError(f"not an object: {said!r:.80}")
    return dict(said)


def _sequence(said: object) -> list[object]:
    if not isinstance(said, list):
        raise TypeError(f"not an array: {said!r:.80}")
    return said
