"""What a network check asked for and what came of it, kept on the head so that `serve` and `status`
know what is proven.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from launcher.checks import crossing, network
from launcher.checks.network import Verdict
from launcher.model import LEVELS, Answer, Inventory, Level
from launcher.placement import narrow
from launcher.plan import containers
from launcher.plan.shape import Step
from launcher.tools import network as probe
from launcher.tools.expectations import Expectations
from launcher.tools.host import HostFacts
from launcher.transport import Command

FILE = "network.json"
# Written whole, as secrets are: a reader never sees half of it.
_STORE = (
    'umask 022 && mkdir -p "$1" && chmod 711 "$1" && new=$1/.$2.$$ && cat > "$new" && mv "$new"'
    ' "$1/$2"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """How to check: the required level (`None`: the inventory's), ranks a node (`None`: its GPUs),
    and deadlines in seconds.

    `nonce` tells this run's ranks from those of another; `nodes` are those between which to measure
    (none named: all). `collective` means that collectives will cross nodes, and `crossing` is the
    split that makes them do so, where the model's shape is known. `known` is what GPUs and network
    cards should do.
    """

    nonce: str
    nodes: tuple[str, ...] = ()
    require: Level | Literal["auto"] | None = None
    ranks_per_node: int | None = None
    deadline: float | None = None
    pair_timeout: float = 20.0
    collective: bool = True
    crossing: crossing.Crossing | None = None
    known: Expectations = field(default_factory=Expectations)


@dataclass(slots=True, kw_only=True)
class Proof:
    """What the gate saw, for the step that writes it down and for those who print it.

    `servers` is what the kept record says of servers' own logs: that stays when another verdict
    takes its place.
    """

    verdict: Verdict | None = None
    servers: Mapping[str, Any] = field(default_factory=dict)
    reports: dict[str, probe.Report] = field(default_factory=dict)
    ask: Ask | None = None


def incarnation(inventory: Inventory, facts: Mapping[str, HostFacts]) -> str:
    """Return a word that changes whenever a node's container is another one or started again; empty
    when one does not run.
    """
    own = [containers.own(inventory, node, facts.get(node.name)) for node in inventory.nodes]
    if None in own:
        return ""
    words = sorted((each.id, each.started) for each in own if each is not None)
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def record(
    inventory: Inventory, facts: Mapping[str, HostFacts], proof: Proof, *, taken: str
) -> Step:
    """Write the verdict down on the head, for `serve` and `status`."""
    return _store(inventory, facts, lambda: as_record(inventory, facts, proof, taken=taken))


def confirmed(
    inventory: Inventory,
    facts: Mapping[str, HostFacts],
    kept: Mapping[str, Any],
    *,
    server: str,
    id: str,
    said: str,
) -> Step:
    """Write down, beside the verdict, what the own logs of a server say of its ranks' links."""
    told = {**kept.get("servers", {}), server: {"id": id, "said": said}}
    return _store(inventory, facts, lambda: {**kept, "servers": told})


def of_server(kept: Mapping[str, Any], server: str, id: str) -> str:
    """Return what the own logs of a server said of its ranks' links; empty where nobody has
    looked.
    """
    said = kept.get("servers", {}).get(server, {})
    return str(said["said"]) if said.get("id") == id else ""


def _store(
    inventory: Inventory, facts: Mapping[str, HostFacts], said: Callable[[], Mapping[str, Any]]
) -> Step:
    head = inventory.head
    directory = containers.state_dir(inventory, head, facts.get(head.name))
    return Step(
        title="keeping the verdict on the head",
        command=Command(
            node=head.name,
            argv=("sh", "-c", _STORE, "keep", directory, FILE),
            timeout=30,
            stdin=lambda: json.dumps(said()).encode(),
            shown_stdin="printf '{}'",
        ),
    )


def forget(inventory: Inventory, facts: Mapping[str, HostFacts]) -> Step:
    """Remove the last verdict before another is made: a check that fails must not leave an older
    proof behind.
    """
    head = inventory.head
    path = f"{containers.state_dir(inventory, head, facts.get(head.name))}/{FILE}"
    return Step(
        title="forgetting the last verdict",
        command=Command(node=head.name, argv=("rm", "-f", path), timeout=30),
    )


def as_record(
    inventory: Inventory, facts: Mapping[str, HostFacts], proof: Proof, *, taken: str
) -> dict[str, Any]:
    """Return a verdict as it is kept: which incarnation it is about, and what was proven."""
    verdict = proof.verdict
    if verdict is None:
        return {}
    ask = proof.ask
    here = narrow(inventory, ask.nodes if ask is not None else ())
    said = {
        "incarnation": incarnation(here, facts),
        "nodes": [node.name for node in here.nodes],
        "taken": taken,
        "passed": verdict.passed,
        "asked": (ask.require if ask is not None else None) or inventory.require,
        "required": verdict.required,
        "ranks_per_node": (ask.ranks_per_node if ask is not None else None) or 0,
        "collective": (
            verdict.collective is not None
            and not verdict.collective.error
            and verdict.collective.correct
        ),
        "summary": summary(verdict),
        "servers": proof.servers,
        **(
            {"figures": asdict(measured)}
            if (measured := crossing.figures(verdict)) is not None
            else {}
        ),
    }
    finite: dict[str, Any] = _finite(said)
    return finite


def ask_record(inventory: Inventory, facts: Mapping[str, HostFacts]) -> Command:
    """Ask the head for the last verdict."""
    head = inventory.head
    path = f"{containers.state_dir(inventory, head, facts.get(head.name))}/{FILE}"
    return Command(
        node=head.name, argv=("sh", "-c", 'cat "$1" 2>/dev/null', "verdict", path), timeout=20
    )


def parse_record(answer: Answer) -> dict[str, Any]:
    """Read the last verdict; empty where there is none that can be read: then nothing is proven."""
    try:
        found = json.loads(answer.out)
    except (ValueError, RecursionError):
        return {}
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("passed"), bool)
        or not all(
            isinstance(found.get(word), str)
            for word in ("incarnation", "taken", "required", "summary")
        )
        or not isinstance(found.get("ranks_per_node"), int)
        or found["required"] not in LEVELS
    ):
        return {}
    told, names = found.pop("servers", None), found.pop("nodes", None)
    if isinstance(names, list) and all(isinstance(each, str) for each in names):
        found["nodes"] = names
    if isinstance(told, dict) and all(isinstance(each, dict) for each in told.values()):
        found["servers"] = told
    figures = found.pop("figures", None)
    if isinstance(figures, dict) and all(
        isinstance(each, (int, float)) and 0 <= each < math.inf for each in figures.values()
    ):
        found |= {"figures": figures} if figures.get("algbw") and figures.get("bandwidth") else {}
    return found


def about(
    inventory: Inventory, facts: Mapping[str, HostFacts], kept: Mapping[str, Any]
) -> frozenset[str]:
    """Return the nodes between whose very containers, as they are now, the kept verdict was made;
    none where they changed.
    """
    nodes = {node.name: node for node in inventory.nodes}
    names = kept.get("nodes") or list(nodes)
    if not set(names) <= nodes.keys():
        return frozenset()
    here = incarnation(replace(inventory, nodes=tuple(nodes[name] for name in names)), facts)
    return frozenset(names if here and here == kept.get("incarnation") else ())


def proven(
    inventory: Inventory,
    facts: Mapping[str, HostFacts],
    kept: Mapping[str, Any],
    *,
    require: Level | None,
    collective: bool,
    nodes: Sequence[str] = (),
) -> bool:
    """True when the kept verdict is about these very containers and covers what is asked, between
    `nodes` (none named: all).

    What `auto` stands for depends on what was found on the nodes: only a verdict on `auto` covers
    it, and the highest level.
    """
    wanted, level = require or inventory.require, kept.get("required")
    among = [inventory.node(name) for name in nodes] or inventory.nodes
    if level not in LEVELS or not {node.name for node in among} <= about(inventory, facts, kept):
        return False
    covers = (
        kept.get("asked") == "auto" or level == LEVELS[-1]
        if wanted == "auto"
        else LEVELS.index(level) >= LEVELS.index(wanted)
    )
    return (
        kept.get("passed") is True
        and (not collective or kept.get("collective") is True)
        # 0: one for each GPU. With fewer, some GPUs and their network cards were never tried.
        and (
            kept.get("ranks_per_node") == 0
            or kept.get("ranks_per_node", -1) >= min(node.gpus for node in among)
        )
        and covers
    )


def summary(verdict: Verdict) -> str:
    """Return what was proven in one line."""
    kinds = sorted({cell.transport for cell in verdict.cells if cell.transport}) or ["nothing"]
    rates = [cell.bandwidth for cell in verdict.cells if cell.bandwidth is not None]
    times = [cell.latency for cell in verdict.cells if cell.latency is not None]
    pairs = len(verdict.cells) // 2
    said = [f"{pairs} {'pair' if pairs == 1 else 'pairs'} over {', '.join(kinds)}"]
    if rates:
        said.append(_span(network.rate(min(rates)), network.rate(max(rates))))
    if times:
        said.append(_span(f"{min(times) * 1e6:.0f}", f"{max(times) * 1e6:.0f}") + " µs")
    return ", ".join(said)


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict ready for JSON: bandwidth in bytes per second, latency in seconds."""
    said: dict[str, Any] = _finite(
        {**asdict(verdict), "passed": verdict.passed, "summary": summary(verdict)}
    )
    return said


def _finite(said: Any) -> Any:
    """Return plain data without numbers that JSON does not have."""
    if isinstance(said, Mapping):
        return {key: _finite(value) for key, value in said.items()}
    if isinstance(said, (list, tuple)):
        return [_finite(each) for each in said]
    return None if isinstance(said, float) and not math.isfinite(said) else said
