"""Servers of a cluster: their health according to the supervisor, and their resources."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.agent import desired, observed, state
from launcher.agent.desired import Desired
from launcher.agent.observed import OVER, Drain, Observed
from launcher.core.domain import Node
from launcher.core.errors import RequestError
from launcher.core.transport import Command
from launcher.tools import agent_queries
from launcher.tools.site import Site

DEFAULT = "default"  # default name of a server
OLD = 15.0  # seconds after which the agent's observations are outdated
GOOD = ("answering", "busy")
OTHER_VERSION = "its files are damaged, or of another version of vlaunch"
READY = (*GOOD, "quiet", "suspect", "resting")  # of a server that has answered
BAD = ("suspect", "recovering", "failed", "gave-up", "unknown")
# states of servers, nodes and batch jobs as shown to users, by their keys in JSON and labels
_SHOWN = {
    **{"answering": "ready", "waiting": "pending", "pausing": "backing off"},
    **{"recovering": "restarting", "gave-up": "restart limit reached", "absent": "missing"},
    **{"prepared": "not submitted", "refused": "rejected"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Server: its spec (None if stopped), and its status `age` seconds ago (None if not observed
    yet). An `unreadable` one has files of another version of vlaunch, and may run. `drain` is that
    of the server before it, which it replaces.
    """

    name: str
    desired: Desired | None = None
    observed: Observed | None = None
    age: float = math.inf
    unreadable: bool = False
    drain: Drain | None = None

    @property
    def state(self) -> str:
        """State, one of `observed.STATES`; `waiting` until the supervisor has read the spec,
        `unknown` for an unreadable one.
        """
        if self.unreadable:
            return "unknown"
        if self.desired is None:
            return "stopped" if self.observed is None or self.observed.state in OVER else "stopping"
        return self.observed.state if self.observed is not None else "waiting"

    @property
    def runs(self) -> bool:
        """True until it reaches a final state, and so holds GPUs and ports."""
        return self.state not in OVER

    @property
    def id(self) -> str:
        """Id of the spec: equal exactly for equal specs."""
        return self.desired.id if self.desired else self.observed.id if self.observed else ""

    @property
    def model(self) -> str:
        """Name of its model."""
        record = self.desired or self.observed
        return record.model if record else "unknown model"

    @property
    def task(self) -> str:
        """Detected task of its model; empty before the first answer."""
        return self.observed.task if self.observed else ""

    @property
    def group(self) -> str:
        """Name of its group: replicas of one server share it."""
        return state.group_of(self.name)

    @property
    def label(self) -> str:
        """Name for display."""
        return f"server `{self.name}`"

    @property
    def gpus(self) -> int:
        """Total number of GPUs that it uses."""
        return sum(self.desired.places.values()) if self.desired else 0

    @property
    def nodes(self) -> Collection[str]:
        """Nodes with its ranks as observed (Ray chooses them), else as expected."""
        ranks = self.observed.ranks if self.observed else {}
        return ranks or (self.desired.places if self.desired else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersState:
    """Servers, and of the agents by node the seconds since the last report (`members`), and the
    sha256 of the archive (`programs`), which older ones do not report.

    `agent` is the age of the head agent's observations in seconds, infinite if it does not answer.
    """

    servers: tuple[Server, ...] = ()
    members: Mapping[str, float] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)
    agent: float = math.inf

    @property
    def running(self) -> tuple[Server, ...]:
        """Servers that use GPUs and ports."""
        return tuple(server for server in self.servers if server.runs)


def gpus_by_node(server: Server) -> Mapping[str, int]:
    """Return a server's GPUs on each node; Ray may have placed ranks elsewhere than planned."""
    planned = server.desired.places if server.desired else {}
    ranks = server.observed.ranks if server.observed else {}
    counts = {node: len(names) for node, names in ranks.items()}
    return counts if sum(counts.values()) == sum(planned.values()) else planned


def query_servers(site: Site) -> Command:
    """Query the servers from the head's agent."""
    return site.in_container(site.head, agent_queries.servers(), timeout=30)


def shown_state(state: str) -> str:
    """Return a state as shown to users."""
    return _SHOWN.get(state, state)


def server_health(server: Server, agent: float) -> tuple[str, str]:
    """Return the supervisor's verdict, `agent` seconds old, on a server, and the reason."""
    if agent > OLD:
        return "unknown", describe_silence(agent)
    record = server.observed
    if server.unreadable:
        return "unknown", f"{OTHER_VERSION}; to stop it, run `vlaunch stop {server.name}`"
    if server.desired is None:
        return "stopping", record.doing if record else ""
    if server.drain is not None:
        return "waiting", f"the server before it is {server.drain.text}"
    if record is None:
        return "waiting", "the head's agent has not picked it up yet"
    return valid_verdict(record.verdict), record.reason


def valid_verdict(verdict: str) -> str:
    """Return a verdict from a node; `unknown` if it is invalid."""
    return verdict if verdict in observed.VERDICTS else "unknown"


def describe_silence(agent: float) -> str:
    """Describe for how long the head's agent has been silent."""
    if math.isfinite(agent):
        return f"the head's agent has not reported for {agent:.0f} s"
    return "the head's agent does not answer"


def parse_servers(answer: Mapping[str, Any]) -> ServersState:
    """Parse the reply of the head's agent; skips invalid servers."""
    listed, members, programs = map(answer.get, ("servers", "members", "programs"))
    listed = listed if isinstance(listed, list) else []
    members = members if isinstance(members, Mapping) else {}
    programs = programs if isinstance(programs, Mapping) else {}
    parsed = (server for raw in listed if (server := _parse_server(raw)) is not None)
    return ServersState(
        servers=tuple(sorted(parsed, key=lambda s: (s.group, state.replica_number(s.name)))),
        members={str(node): _parse_age(age) for node, age in members.items()},
        programs={str(node): str(digest) for node, digest in programs.items()},
        agent=_parse_age(answer.get("agent")),
    )


def choose_server(candidates: Sequence[Server], name: str | None) -> Server:
    """Return the server of that name, or the only server; of several replicas, one that is ready
    if there is one.

    Raises:
        RequestError: there is no such server, or there are several and none was named.
    """
    names = ", ".join(f"`{server.name}`" for server in candidates)
    chosen = [server for server in candidates if name in (None, server.name, server.group)]
    if len({server.group for server in chosen}) == 1:
        return min(chosen, key=lambda server: server.state != "ready")
    if name is not None:
        raise RequestError(
            f"no server `{name}` is running",
            evidence=f"running: {names}" if names else "",
            hint="see `vlaunch status`",
        )
    if not candidates:
        raise RequestError(
            "no server is running on this cluster", hint="start one: `vlaunch serve --model MODEL`"
        )
    raise RequestError(
        f"{len(candidates)} servers are running: {names}",
        hint=f"choose one by its name: `--server {candidates[0].name}`",
    )


def ranks_on(node: str, state: ServersState, actors: Sequence[str]) -> tuple[str, ...]:
    """Return the ranks on a node: those of servers, with names if there are several, then those of
    other Ray actors.
    """
    ranks = [
        (server.name, rank)
        for server in state.running
        if server.observed is not None
        for rank in server.observed.ranks.get(node, ())
    ]
    others = Counter(actors) - Counter(rank for _, rank in ranks)
    alone = len(state.running) == 1
    return (
        *(rank if alone else f"{name}: {rank}" for name, rank in ranks),
        *others.elements(),
    )


def replace_addresses(nodes: Sequence[Node], text: str) -> str:
    """Replace addresses of nodes by their names."""
    for node in nodes:
        text = re.sub(rf"(?<![\d.]){re.escape(node.ip)}(?!\d|\.\d)", node.name, text)
    return text


def with_node_names(nodes: Sequence[Node], server: Server) -> Server:
    """Replace addresses of nodes by their names in a server's status, which quotes tools."""
    if server.observed is None:
        return server
    record = json.dumps(server.observed.as_json(), ensure_ascii=False)
    return replace(
        server, observed=observed.parse_status(json.loads(replace_addresses(nodes, record)))
    )


def _parse_server(raw: Any) -> Server | None:
    try:
        name = raw["name"]
        if not state.NAME.fullmatch(name):  # names appear in commands of hints
            return None
        written, status = raw.get("desired"), raw.get("observed")
    except (LookupError, TypeError, AttributeError):
        return None
    try:
        spec = None if written is None else desired.parse_spec(written)
        record = None if status is None else observed.parse_status(status)
    except ValueError:
        return None if written is None else Server(name=name, unreadable=True)
    drain = None
    if spec and record and (record.id, record.asked) != (spec.id, spec.asked):
        drain, record = record.draining, None  # status of the previous server
    age = _parse_age(raw.get("age"))
    return Server(name=name, desired=spec, observed=record, age=age, drain=drain)


def _parse_age(raw: Any) -> float:
    valid = isinstance(raw, (int, float)) and not isinstance(raw, bool) and math.isfinite(raw)
    return float(raw) if valid else math.inf


def server_dir(site: Site, name: str) -> str:
    """Return a server's folder on the head's host."""
    return f"{site.state_dir(site.head)}/server/{name}"
