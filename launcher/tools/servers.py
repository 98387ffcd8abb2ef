"""Servers of a cluster: their health according to the supervisor, and their resources."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.agent import desired, observed, state
from launcher.agent.desired import Desired
from launcher.agent.observed import OVER, Observed
from launcher.core.domain import Node
from launcher.core.errors import RequestError
from launcher.core.transport import Command
from launcher.tools import agent_queries
from launcher.tools.site import Site

DEFAULT = "default"  # default name of a server
OLD = 15.0  # seconds after which the agent's observations are outdated
GOOD = ("answering", "busy")
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
    yet).
    """

    name: str
    desired: Desired | None = None
    observed: Observed | None = None
    age: float = math.inf

    @property
    def state(self) -> str:
        """State, one of `observed.STATES`; `waiting` until the supervisor has read the spec."""
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
        return self.desired.model if self.desired else self.observed.model if self.observed else "?"

    @property
    def task(self) -> str:
        """Detected task of its model; empty before the first answer."""
        return self.observed.task if self.observed else ""

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
    """Servers, and seconds since the last report of the agents, by node (`members`).

    `agent` is the age of the head agent's observations in seconds, infinite if it does not answer.
    """

    servers: tuple[Server, ...] = ()
    members: Mapping[str, float] = field(default_factory=dict)
    agent: float = math.inf

    @property
    def running(self) -> tuple[Server, ...]:
        """Servers that use GPUs and ports."""
        return tuple(server for server in self.servers if server.runs)


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
    if server.desired is None:
        return "stopping", record.doing if record else ""
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
    """Parse the reply of the head's agent; skips unreadable servers of other versions."""
    listed, members = answer.get("servers"), answer.get("members")
    listed = listed if isinstance(listed, list) else []
    members = members if isinstance(members, Mapping) else {}
    return ServersState(
        servers=tuple(server for raw in listed if (server := _parse_server(raw)) is not None),
        members={str(node): _parse_age(age) for node, age in members.items()},
        agent=_parse_age(answer.get("agent")),
    )


def choose_server(candidates: Sequence[Server], name: str | None) -> Server:
    """Return the server of that name, or the only server.

    Raises:
        RequestError: there is no such server, or there are several and none was named.
    """
    names = ", ".join(f"`{server.name}`" for server in candidates)
    chosen = [server for server in candidates if name in (None, server.name)]
    if len(chosen) == 1:
        return chosen[0]
    if name is not None:
        raise RequestError(
            f"no server `{name}` runs",
            evidence=f"running: {names}" if names else "",
            hint="see `vlaunch status`",
        )
    if not candidates:
        raise RequestError(
            "no server runs on this cluster", hint="start one: `vlaunch serve --model MODEL`"
        )
    raise RequestError(
        f"{len(candidates)} servers run: {names}",
        hint="choose one by its name in `vlaunch status`",
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
        spec = None if raw.get("desired") is None else desired.parse_spec(raw["desired"])
        record = None if raw.get("observed") is None else observed.parse_status(raw["observed"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if spec and record and (record.id, record.asked) != (spec.id, spec.asked):
        record = None  # status of the previous server
    return Server(name=name, desired=spec, observed=record, age=_parse_age(raw.get("age")))


def _parse_age(raw: Any) -> float:
    valid = isinstance(raw, (int, float)) and not isinstance(raw, bool) and math.isfinite(raw)
    return float(raw) if valid else math.inf


def server_dir(site: Site, name: str) -> str:
    """Return a server's folder on the head's host."""
    return f"{site.state_dir(site.head)}/server/{name}"
