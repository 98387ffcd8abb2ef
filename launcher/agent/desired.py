"""A server as it is wanted: what `vlaunch serve` writes to the head and the keeper acts on.

One class is the shape for both: the launcher imports this module, the agent ships with it. The file
is `desired.json` in the server's folder (`state.py`), replaced whole, and removed to stop the
server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import records

VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of an engine: the only one (`ray`), or one of several nodes' (`mp`).

    `gpus` are indices of the container's GPUs, or None where the process may see all; `replicas`
    are the first data-parallel replica that it runs and how many.
    """

    node: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[int, ...] | None = None
    replicas: tuple[int, int] = (0, 1)

    @property
    def answers(self) -> bool:
        """True when it has an API; of one that has none, vLLM's own command says so."""
        return "--headless" not in self.argv


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Ray of a server: the ports of its dashboard and of its node managers, and how many GPUs the
    server takes.

    With `reserve`, the server's ranks are outside Ray (`mp`), and its GPUs are set aside in Ray, so
    that Ray gives them to nobody else; with `partial` it takes only some of a node's, and Ray must
    say which before it can start.
    """

    dashboard: int
    node_manager: int
    gpus: int
    reserve: bool = False
    partial: bool = False


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The rules of supervision. All times are seconds.

    `canary` is the time between two looks, `stuck` after how many seconds without a step an
    engine that hangs is ended, `restarts` how many are allowed within `window` (None: as many as it
    takes), `start_timeout` how long a restart may take at least, `grace` how long an engine may
    take to end politely. With `restarts` of 0 nothing is ever ended or started again.
    """

    canary: float = 5.0
    stuck: float = 360.0
    restarts: int | None = None
    window: float = 3600.0
    start_timeout: float = 1800.0
    grace: float = 5.0
    pause: float = 5.0
    longest_pause: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Desired:
    """A server: its processes, where it answers, what it takes, and how it is kept.

    `id` is equal exactly when the same server is asked for; `asked` (seconds since 1970) tells two
    requests for it apart. `places` has how many GPUs it takes on each node, `addresses` the address
    of every node of the cluster, `memory_share` which part of a GPU's memory it claims (None:
    nobody looks), `visible` the variable that names the GPUs a process may see. `asked_for` is what
    the user asked for, by which a later run asks again (`vlaunch rollback`).
    """

    name: str
    id: str
    model: str
    backend: str
    processes: tuple[Process, ...]
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

    @property
    def api_host(self) -> str:
        """The address under which vLLM answers on its own node, for what it was told to bind to."""
        return "127.0.0.1" if self.everywhere else self.host

    @property
    def everywhere(self) -> bool:
        """True when it listens on all of its node's addresses."""
        return self.host in ("0.0.0.0", "::", "")  # noqa: S104 - compared, not bound

    @property
    def apis(self) -> tuple[Process, ...]:
        """The processes that answer requests: one that balances them over all replicas, or, where
        somebody outside of vLLM does that (hybrid and external load balancing), each.
        """
        return tuple(process for process in self.processes if process.answers) or self.processes[:1]

    @property
    def api_node(self) -> str:
        """The node of the first process that answers requests."""
        return self.apis[0].node

    def behind(self, process: Process) -> range:
        """Return the replicas to which the API of a process hands requests; none where the server
        has only one.
        """
        if self.replicas == 1:
            return range(0)
        first, count = (0, self.replicas) if len(self.apis) == 1 else process.replicas
        return range(first, first + count)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes whose agents a start needs: those of the processes, then of the ranks."""
        return tuple(dict.fromkeys((*(process.node for process in self.processes), *self.places)))

    @property
    def reach(self) -> tuple[str, ...]:
        """The nodes where something of it may run: Ray places ranks on whichever it likes."""
        ray_nodes = self.addresses if self.backend == "ray" else ()
        return tuple(dict.fromkeys((*self.nodes, *ray_nodes)))


def read(data: Any) -> Desired:
    """Read plain data; raises ValueError when it is no server of this version."""
    version = data.get("version", VERSION) if isinstance(data, Mapping) else VERSION
    if version != VERSION:
        raise ValueError(f"version {version!r:.80} of a server is not known here")
    spec = records.read(Desired, data, "server", complete=True)
    if not spec.processes:
        raise ValueError("a server without a process")
    return spec
