"""The servers of a cluster: their health, as the head's keeper judges it, and what they hold."""

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

DEFAULT = "default"  # the name of a server that was given none
OLD = 15.0  # seconds since the head's agent looked, after which what it saw says nothing
GOOD = ("answering", "busy")
READY = (*GOOD, "quiet", "suspect", "resting")  # of a server that has answered
BAD = ("suspect", "recovering", "failed", "gave-up", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server: as it is wanted (None: somebody stopped it), and as the keeper saw it `age`
    seconds ago (None: not yet).
    """

    name: str
    desired: Desired | None = None
    observed: Observed | None = None
    age: float = math.inf

    @property
    def state(self) -> str:
        """How it is: a state of `observed.STATES`; what the keeper has not read yet is waiting."""
        if self.desired is None:
            return "stopped" if self.observed is None or self.observed.state in OVER else "stopping"
        return self.observed.state if self.observed is not None else "waiting"

    @property
    def runs(self) -> bool:
        """True while it is wanted and kept, or not wanted and not yet gone: it holds what it was
        given.
        """
        return self.state not in OVER

    @property
    def id(self) -> str:
        """Equal exactly when the same server is asked for."""
        return self.desired.id if self.desired else self.observed.id if self.observed else ""

    @property
    def model(self) -> str:
        """What it serves."""
        return self.desired.model if self.desired else self.observed.model if self.observed else "?"

    @property
    def task(self) -> str:
        """What its model does, as it was found out; empty before the first answer."""
        return self.observed.task if self.observed else ""

    @property
    def what(self) -> str:
        """Name it for people."""
        return f"server `{self.name}`"

    @property
    def gpus(self) -> int:
        """How many GPUs it holds in all."""
        return sum(self.desired.places.values()) if self.desired else 0

    @property
    def nodes(self) -> Collection[str]:
        """The nodes that hold it: where its ranks were seen (Ray chooses), else where they are
        expected.
        """
        seen = self.observed.ranks if self.observed else {}
        return seen or (self.desired.places if self.desired else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The servers, and the seconds since the last report of the nodes' agents, by node.

    `agent` is how many seconds ago it looked: infinite where it does not answer.
    """

    servers: tuple[Server, ...] = ()
    members: Mapping[str, float] = field(default_factory=dict)
    agent: float = math.inf

    @property
    def running(self) -> tuple[Server, ...]:
        """Those that hold GPUs and ports."""
        return tuple(each for each in self.servers if each.runs)


def ask(site: Site) -> Command:
    """Ask the head's agent for its servers."""
    return site.inside(site.head, agent_queries.servers(), timeout=30)


def health(server: Server, agent: float) -> tuple[str, str]:
    """Return the keeper's verdict on a server, and the reason; `agent` is how many seconds ago the
    keeper looked.
    """
    if agent > OLD:
        return "unknown", unheard(agent)
    record = server.observed
    if server.desired is None:
        return "stopping", record.doing if record else ""
    if record is None:
        return "waiting", "the head's agent has not taken it up yet"
    return known(record.verdict), record.reason


def known(verdict: str) -> str:
    """Return a verdict that came from a node; `unknown` when it is none."""
    return verdict if verdict in observed.VERDICTS else "unknown"


def unheard(agent: float) -> str:
    """Say for how long the head's agent has not looked at its servers."""
    if math.isfinite(agent):
        return f"the head's agent has not looked for {agent:.0f} s"
    return "the head's agent does not answer"


def read(answer: Mapping[str, Any]) -> Kept:
    """Read what the head's agent answered.

    A server that cannot be read is one of another version: left out.
    """
    listed, members = answer.get("servers"), answer.get("members")
    listed = listed if isinstance(listed, list) else []
    members = members if isinstance(members, Mapping) else {}
    return Kept(
        servers=tuple(server for raw in listed if (server := _server(raw)) is not None),
        members={str(node): _age(age) for node, age in members.items()},
        agent=_age(answer.get("agent")),
    )


def choose(candidates: Sequence[Server], name: str | None) -> Server:
    """Return the server of that name, or the only one there is.

    Raises:
        RequestError: there is none, none of that name, or several and none was named.
    """
    names = ", ".join(f"`{server.name}`" for server in candidates)
    chosen = [server for server in candidates if name in (None, server.name)]
    if len(chosen) == 1:
        return chosen[0]
    if name is not None:
        raise RequestError(
            f"no server `{name}` runs",
            evidence=f"these do: {names}" if names else "",
            hint="see `vlaunch status`",
        )
    if not candidates:
        raise RequestError(
            "no server runs on this cluster", hint="start one: `vlaunch serve --model MODEL`"
        )
    raise RequestError(
        f"{len(candidates)} servers run: {names}",
        hint="say which one by its name, as `vlaunch status` shows it",
    )


def ranks_on(node: str, kept: Kept, actors: Sequence[str]) -> tuple[str, ...]:
    """Return the ranks on a node: of servers, with several of them each with its name, then those
    of other actors of Ray's.
    """
    ranks = [
        (server.name, rank)
        for server in kept.running
        if server.observed is not None
        for rank in server.observed.ranks.get(node, ())
    ]
    others = Counter(actors) - Counter(rank for _, rank in ranks)
    alone = len(kept.running) == 1
    return (
        *(rank if alone else f"{name}: {rank}" for name, rank in ranks),
        *others.elements(),
    )


def with_names(nodes: Sequence[Node], text: str) -> str:
    """Put nodes' names in the place of their addresses."""
    for node in nodes:
        text = re.sub(rf"(?<![\d.]){re.escape(node.ip)}(?!\d|\.\d)", node.name, text)
    return text


def named(nodes: Sequence[Node], server: Server) -> Server:
    """Put nodes' names in the place of their addresses, wherever the agent's record quotes a
    tool.
    """
    if server.observed is None:
        return server
    record = json.dumps(server.observed.as_json(), ensure_ascii=False)
    return replace(server, observed=observed.read(json.loads(with_names(nodes, record))))


def _server(raw: Any) -> Server | None:
    try:
        name = raw["name"]
        if not state.NAME.fullmatch(name):  # hints name servers, and people run hints
            return None
        spec = None if raw.get("desired") is None else desired.read(raw["desired"])
        record = None if raw.get("observed") is None else observed.read(raw["observed"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if spec and record and (record.id, record.asked) != (spec.id, spec.asked):
        record = None  # of the server before
    return Server(name=name, desired=spec, observed=record, age=_age(raw.get("age")))


def _age(said: Any) -> float:
    good = isinstance(said, (int, float)) and not isinstance(said, bool) and math.isfinite(said)
    return float(said) if good else math.inf


def folder(site: Site, name: str) -> str:
    """Return a server's folder on the head's host."""
    return f"{site.state_dir(site.head)}/server/{name}"
