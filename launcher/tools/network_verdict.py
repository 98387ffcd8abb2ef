"""The last verdict on the network: kept on the head, so that `serve` and `status` know what is
proven.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from launcher.agent import state as agent
from launcher.core import decode
from launcher.core.domain import LEVELS, Answer, Level, fold
from launcher.core.errors import UnreadableAnswer
from launcher.core.transport import Command
from launcher.tools.placement import narrow
from launcher.tools.servers import Kept
from launcher.tools.site import Site

FILE = agent.NETWORK
_Positive = Annotated[float, decode.within(1e-9, 1e12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLinks:
    """The links that the ranks of the server with this `id` wrote of in their own logs, in
    words.
    """

    id: str
    said: decode.Text


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """The link between two nodes for the planner: the least bandwidth in GB/s, the median latency
    in µs, and whether it is TCP.
    """

    gbps: _Positive
    latency_us: _Positive
    tcp: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The last verdict as it is kept on the head; an empty one proves nothing.

    `incarnation` and `nodes` are the containers that it is about; `ranks_per_node` 0 stands for one
    rank for each GPU; `collective` is whether the all_reduce passed.
    """

    incarnation: str = ""
    nodes: tuple[str, ...] = ()
    taken: str = ""
    passed: bool = False
    asked: Level | Literal["auto"] = "auto"
    required: Level = "any"
    ranks_per_node: int = 0
    collective: bool = False
    summary: decode.Text = ""
    servers: Mapping[str, ServerLinks] = field(default_factory=dict)
    link: MeasuredLink | None = None


def only(site: Site, names: Sequence[str]) -> Site:
    """Return the site as a check sees it that is about only some nodes (none named: all)."""
    return replace(site, inventory=narrow(site.inventory, names))


def incarnation(site: Site) -> str:
    """Return a word that changes whenever a node's container is another one or started again; empty
    when one does not run.
    """
    own = [site.running(node) for node in site.nodes]
    if None in own:
        return ""
    words = sorted((each.id, each.started) for each in own if each is not None)
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def query_record(site: Site) -> Command:
    """Ask the head for the last verdict."""
    path = f"{site.state_dir(site.head)}/{FILE}"
    argv = ("sh", "-c", 'cat "$1" 2>/dev/null', "verdict", path)
    return Command(node=site.head.name, argv=argv, timeout=20)


def parse_record(answer: Answer) -> Record:
    """Read the last verdict; an empty one where it cannot be read: then nothing is proven."""
    try:
        return decode.read(Record, answer.out, "the last verdict on the network")
    except UnreadableAnswer:
        return Record()


def about(site: Site, kept: Record) -> frozenset[str]:
    """Return the nodes between whose very containers, as they are now, the kept verdict was made;
    none where they changed.
    """
    known = [node.name for node in site.nodes]
    names = kept.nodes or known
    here = incarnation(only(site, names)) if set(names) <= set(known) else ""
    return frozenset(names if here and here == kept.incarnation else ())


def proven(
    site: Site,
    kept: Record,
    *,
    require: Level | None,
    collective: bool,
    nodes: Sequence[str] = (),
) -> bool:
    """True when the kept verdict is about these very containers and covers what is asked, between
    `nodes` (none named: all).
    """
    among = [site.inventory.node(name) for name in nodes] or site.nodes
    return (
        kept.passed
        and (not collective or kept.collective)
        and _covers_level(kept, require or site.inventory.require)
        # with fewer ranks, some GPUs and their network cards were never tried
        and (kept.ranks_per_node or math.inf) >= min(node.gpus for node in among)
        and {node.name for node in among} <= about(site, kept)
    )


def _covers_level(kept: Record, wanted: Level | Literal["auto"]) -> bool:
    """True when the level that was required then is as high as the one that is wanted now.

    What `auto` stands for depends on what was found on the nodes: only a verdict on `auto` covers
    it, and the highest level.
    """
    if wanted == "auto":
        return kept.asked == "auto" or kept.required == LEVELS[-1]
    return LEVELS.index(kept.required) >= LEVELS.index(wanted)


def describe(site: Site, kept: Record, servers: Kept) -> str:
    """Describe the verdict on the network between these very containers, and the links in servers'
    own logs; empty where there is no network, or a container does not run.
    """
    own = [site.running(node) for node in site.nodes]
    if len(own) == 1 or None in own:
        return ""
    measured = about(site, kept)
    if not measured:
        return "not proven for these containers: `vlaunch check-nccl`"
    among = [node.name for node in site.nodes if node.name in measured]
    part = "" if len(among) == len(own) else f" between {fold(among)}"
    text = f"{'proven' if kept.passed else 'failed'} {kept.taken}{part}: {kept.summary}"
    if site.inventory.accelerator == "cpu":
        return text
    apart = [
        server
        for server in servers.running
        if server.desired is not None and len(server.desired.places) > 1
    ]
    links = [
        f"{server.what}: {link.said}"
        for server in apart
        if (link := kept.servers.get(server.name)) is not None and link.id == server.id
    ]
    if apart and not links:
        links = ["no server's own logs were looked at, its `vlaunch serve` does"]
    return "; ".join((text, *links))
