"""Spec of a server: `vlaunch serve` writes it to the head, and the supervisor acts on it.

Launcher and agent share this class. The file is `desired.json` in the server's folder (`state.py`),
replaced atomically, and removed to stop the server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import records

VERSION = 2


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process of an engine: the only one (`ray`), or one per node (`mp`).

    `gpus` are indices of the container's GPUs (None: all); `replicas` are its first data-parallel
    replica and their number.
    """

    node: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[int, ...] | None = None
    replicas: tuple[int, int] = (0, 1)

    @property
    def has_api(self) -> bool:
        """True if it has an API; `--headless` in vLLM's command means that it has none."""
        return "--headless" not in self.argv


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Ray's part of a server: the ports of its dashboard and node managers, and how many GPUs the
    server takes.

    With `reserve`, the server's ranks run outside Ray (`mp`), and its GPUs are reserved in Ray;
    with `partial` it takes only some of a node's GPUs, and Ray must name them before the start.
    """

    dashboard: int
    node_manager: int
    gpus: int
    reserve: bool = False
    partial: bool = False


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Rules of supervision. All times are seconds.

    `canary` is the interval of canaries, `stuck` the time without a step after which a hung engine
    is stopped, `restarts` the limit of restarts within `window` (None: unlimited), `start_timeout`
    the least time limit of a restart, `drain` the limit of waiting for requests before a planned
    stop, `grace` the time for an engine to exit politely. With `restarts` of 0 nothing is ever
    stopped or restarted.
    """

    canary: float = 5.0
    stuck: float = 360.0
    restarts: int | None = None
    window: float = 3600.0
    start_timeout: float = 1800.0
    grace: float = 5.0
    drain: float = 60.0
    pause: float = 5.0
    longest_pause: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Desired:
    """Spec of a server: its processes, address, resources and supervision.

    `host` is the address of its API, empty for each node's own.
    `id` is equal exactly for equal servers; `asked` (seconds since 1970) distinguishes two requests
    for one. `places` has its number of GPUs on each node, `addresses` the address of every node of
    the cluster, `memory_share` its share of a GPU's memory (None: not checked), `visible` the
    variable that names a process's visible GPUs. `asked_for` has the user's options, for `vlaunch
    rollback`.
    """

    name: str
    id: str
    model: str
    backend: str
    processes: tuple[ProcessSpec, ...]
    host: str
    port: int
    places: Mapping[str, int]
    addresses: Mapping[str, str] = field(default_factory=dict)
    asked: float = 0.0
    replicas: int = 1
    tp: int = 1
    visible: str = ""
    memory_share: float | None = None
    ray: Ray | None = None
    policy: Policy = field(default_factory=Policy)
    asked_for: Mapping[str, Any] = field(default_factory=dict)
    image: str = ""
    version: int = VERSION

    def as_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return dataclasses.asdict(self)

    def api_host(self, node: str) -> str:
        """Return the address under which vLLM's API on a node answers on that node."""
        if self.listens_everywhere:
            return "127.0.0.1"
        return self.host or self.addresses.get(node, "")

    @property
    def only_host(self) -> str:
        """The only address on which it listens; empty if it listens on those of its nodes."""
        return "" if self.listens_everywhere else self.host

    @property
    def listens_everywhere(self) -> bool:
        """True if it listens on all addresses of its node."""
        return self.host in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound

    @property
    def apis(self) -> tuple[ProcessSpec, ...]:
        """Processes with an API: one that balances requests over all replicas, or each one (hybrid
        and external load balancing).
        """
        return tuple(process for process in self.processes if process.has_api) or self.processes[:1]

    @property
    def api_node(self) -> str:
        """Node of the first process with an API."""
        return self.apis[0].node

    def replicas_behind(self, process: ProcessSpec) -> range:
        """Return the replicas behind the API of a process; none if the server has only one."""
        if self.replicas == 1:
            return range(0)
        first, count = (0, self.replicas) if len(self.apis) == 1 else process.replicas
        return range(first, first + count)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes whose agents a start needs: those of the processes, then of the ranks."""
        return tuple(dict.fromkeys((*(process.node for process in self.processes), *self.places)))

    @property
    def possible_nodes(self) -> tuple[str, ...]:
        """Nodes on which parts of it may run: Ray may place ranks on any."""
        ray_nodes = self.addresses if self.backend == "ray" else ()
        return tuple(dict.fromkeys((*self.nodes, *ray_nodes)))


def parse_spec(data: Any) -> Desired:
    """Parse plain data; raise ValueError if it is no server of this version."""
    version = data.get("version", VERSION) if isinstance(data, Mapping) else VERSION
    if version != VERSION:
        raise ValueError(f"unknown version of a server spec: {version!r:.80}")
    spec = records.parse_record(Desired, data, "server", complete=True)
    if not spec.processes:
        raise ValueError("a server without a process")
    return spec
