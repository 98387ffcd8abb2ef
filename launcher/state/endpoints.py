"""Where a server answers: one endpoint, or, where somebody outside of vLLM hands out requests, one
of each node; what is asked there, and how each is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.model import Argv, Inventory, fold
from launcher.payload.agent.desired import Desired
from launcher.payload.agent.observed import Observed
from launcher.site import Site
from launcher.state.liveness import STILL, ServerState, judge
from launcher.state.servers import Kept, Server
from launcher.tools import payload, vllm
from launcher.transport import Command

PROMPT = "Say hello."
_PATIENCE = 5  # seconds for a completion; who has many requests waiting is known by its counters
_BRIEF = 2  # the same, where the keeper's own has been waiting for longer
# of several endpoints, the one that is as a server is
WORST: Sequence[ServerState] = (
    "failed",
    "gave-up",
    "recovering",
    "silent",
    "unknown",
    "stopping",
    "waiting",
    "starting",
    "busy",
    "answering",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where one API answers: its node, its URL between the nodes, and the numbers of the replicas
    behind it, none where the server has only one.
    """

    node: str
    url: str
    replicas: range = range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What came back from one API: what it says about itself, and a completion; empty where nobody
    asked.
    """

    about: Mapping[str, Any] = field(default_factory=dict)
    completion: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """How one endpoint is: `seconds` is how long its completion took, 0 where none came."""

    node: str
    url: str
    state: ServerState
    detail: str = ""
    seconds: float = 0.0


def url(inventory: Inventory, bind: str, port: int, node: str = "") -> str:
    """Return the URL that clients use: the node's address (the head's) between the nodes, or the
    only one it listens on.
    """
    at = inventory.node(node) if node else inventory.head
    host = at.ip if bind in ("0.0.0.0", "::", "") else bind  # noqa: S104 - compared, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def of(inventory: Inventory, wanted: Desired) -> tuple[Endpoint, ...]:
    """Return where a server answers; without nodes that are none of the inventory's any more."""
    known = {node.name for node in inventory.nodes}
    return tuple(
        Endpoint(
            node=each.node,
            url=url(inventory, wanted.host, wanted.port, each.node),
            replicas=wanted.behind(each),
        )
        for each in wanted.apis
        if each.node in known
    )


def server(inventory: Inventory, wanted: Desired) -> Argv:
    """Ask what an API says."""
    ports = replace(inventory.ports, api=wanted.port)
    return payload.server(ports, payload.api_host(wanted.host))


def complete(
    inventory: Inventory,
    wanted: Desired,
    at: Endpoint,
    tokens: int,
    timeout: float,
    task: str = "",
) -> Argv:
    """Ask an API for a completion, or for what else its model gives; each replica behind it."""
    return payload.complete(
        replace(inventory.ports, api=wanted.port),
        payload.api_host(wanted.host),
        PROMPT,
        tokens,
        timeout,
        len(at.replicas) or 1,
        task,
        first=at.replicas.start,
    )


def query(site: Site, asked: Server) -> dict[str, list[Command]]:
    """Return what to ask each node that has an API of a server: what that says, and a completion
    (or what else its model gives), the only proof that it answers.

    Nothing where no engine runs that could answer, or where a node cannot be asked.
    """
    wanted, inventory = asked.desired, site.inventory
    if wanted is None or asked.state not in ("starting", "ready"):
        return {}
    found = {}
    for each in of(inventory, wanted):
        node = inventory.node(each.node)
        if site.running(node) is not None:
            verbs = (
                server(inventory, wanted),
                complete(inventory, wanted, each, 1, _patience(asked), asked.task),
            )
            found[each.node] = [site.inside(node, verb, timeout=40) for verb in verbs]
    return found


def _patience(asked: Server) -> int:
    """Return how many seconds to wait for a completion: behind a canary that has waited for longer
    already, ours would not be answered sooner.
    """
    seen = asked.observed
    if seen is None or asked.age >= STILL:
        return _PATIENCE
    return _BRIEF if seen.asking >= _PATIENCE or seen.still >= STILL else _PATIENCE


def undecided(kept: Kept, heard: Mapping[str, Mapping[str, Heard]]) -> bool:
    """True while a server that has not answered may be busy or silent, and its keeper will know in
    a moment.
    """
    return any(
        each.state == "ready"
        and each.observed is not None
        and each.observed.still < STILL
        and each.observed.asking > 0
        and one.completion.get("status") != 200
        and one.completion.get("moved") is None
        for each in kept.running
        for one in heard.get(each.name, {}).values()
        if one.completion
    )


def holds(abouts: Iterable[Mapping[str, Any]], log: str = "") -> vllm.Capacity:
    """Return how much all APIs hold together, by what each says of itself, else by an engine's log;
    what one of them does not say is not known.
    """
    each = []
    for about in abouts:
        labels = about.get("capacity")
        texts = labels if isinstance(labels, Mapping) else {}
        texts = {name: text for name, text in texts.items() if isinstance(text, str)}
        each.append(vllm.capacity(texts, log))
    tokens = [one.tokens for one in each if one.tokens is not None]
    times = [one.concurrency for one in each if one.concurrency is not None]
    return vllm.Capacity(
        tokens=sum(tokens) if tokens and len(tokens) == len(each) else None,
        concurrency=sum(times) if times and len(times) == len(each) else None,
    )


def status(
    site: Site, asked: Server, seen: Observed | None, agent: float, heard: Mapping[str, Heard]
) -> tuple[EndpointStatus, ...]:
    """Return how each endpoint of a server is; the arguments are those of `liveness.judge`."""
    found = []
    for each in of(site.inventory, asked.desired) if asked.desired else ():
        completion = heard.get(each.node, Heard()).completion
        state, detail = judge(asked, seen, agent, completion)
        found.append(
            EndpointStatus(
                node=each.node,
                url=each.url,
                state=state,
                detail=detail,
                seconds=float(completion.get("seconds", 0)) if state == "answering" else 0.0,
            )
        )
    return tuple(found)


def together(found: Sequence[EndpointStatus]) -> tuple[ServerState, str]:
    """Return how a server is whose endpoints are so: as the worst of them, and why, with the node
    where it is not true of all.
    """
    state = min((each.state for each in found), key=WORST.index)
    told: dict[str, list[str]] = {}
    for each in found:
        if each.state == state and each.detail:
            told.setdefault(each.detail, []).append(each.node)
    if any(len(nodes) == len(found) for nodes in told.values()):
        return state, "".join(told)
    return state, "; ".join(f"{fold(nodes)}: {text}" for text, nodes in told.items())
