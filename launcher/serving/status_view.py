"""A cluster's status as a table, with the lines of servers and of batch jobs below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from launcher.agent.observed import Fault
from launcher.app.registry import workloads
from launcher.app.terminal import Line, line, log, make_table, plain
from launcher.core import sizes
from launcher.core.domain import fold
from launcher.serving.status import ClusterStatus, NodeStatus, ServerStatus
from launcher.tools.servers import DEFAULT, GOOD, READY

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

COLOURS = {
    **dict.fromkeys(("running", "alive", *GOOD), "green"),
    **dict.fromkeys(("quiet", "resting", "starting", "waiting", "stopping", "absent"), "yellow"),
    **dict.fromkeys(("none", "-"), "dim"),
}
_LINE = 200  # characters of a line of evidence
_MOST = 16  # nodes that have a row each
_MARGIN = " " * 8  # before what belongs to a server


def render(status: ClusterStatus) -> RenderableType:
    """Return the table and what follows it."""
    from rich.console import Group

    lines: list[RenderableType] = [plain(f"cluster {status.cluster}", "bold"), _nodes(status.nodes)]
    if len(status.nodes) > _MOST:
        lines.append(plain("  each node by itself: `vlaunch status --json`", "dim"))
    lines += [line(text, lead=f"  {names}: ") for text, names in _remarks(status.nodes).items()]
    if compiled := _compiled(status.nodes):
        lines.append(line(compiled, lead="compiled: "))
    if status.network:
        style = "" if status.network.startswith("proven") else "yellow"
        lines.append(line(status.network, style, lead=plain("network: ", style)))
    if status.certificates:
        lines.append(line(status.certificates, "yellow"))
    for each in status.servers:
        lines += _server(each, len(status.servers) == 1)
    if not status.servers:
        lines.append(plain("server: none", "dim"))
    for workload in workloads():
        lines += workload.lines(status.batches)
    return Group(*lines)


def _nodes(nodes: Sequence[NodeStatus]) -> Table:
    table = make_table("NODE", "ROLE", "IP", "CONTAINER", "RAY", "GPUS", "RANKS", "DRIFT")
    for group in _alike(nodes):
        node = group[0]
        alike = all(other.ranks == node.ranks for other in group)
        ranks = ", ".join(node.ranks) or "-" if alike else f"{len(node.ranks)} each"
        table.add_row(
            plain(fold([each.node for each in group])),
            node.role,
            node.ip if len(group) == 1 else f"{node.ip} …",
            _coloured(node.container),
            _coloured(node.ray or "unknown"),
            plain(node.gpus),
            plain(ranks),
            _drift(node),
        )
    return table


def _drift(node: NodeStatus) -> str:
    return "yes" if node.drift else "unknown" if node.trouble else "-"


def _alike(nodes: Sequence[NodeStatus]) -> list[list[NodeStatus]]:
    """Return the nodes of each row: many that differ in nothing but name, address and which ranks
    they have share one.
    """
    if len(nodes) <= _MOST:
        return [[node] for node in nodes]
    groups: dict[tuple[object, ...], list[NodeStatus]] = {}
    for node in nodes:
        seen = (node.role, node.container, node.ray, node.gpus, len(node.ranks), _drift(node))
        groups.setdefault(seen, []).append(node)
    return list(groups.values())


def _coloured(word: str) -> Text:
    return plain(word, COLOURS.get(word, "red"))


def _remarks(nodes: tuple[NodeStatus, ...]) -> dict[str, str]:
    """Return what is to be said of nodes, each with the nodes of which it is true."""
    lines: dict[str, list[str]] = {}
    for node in nodes:
        remarks = [
            *(f"differs from the inventory: {difference}" for difference in node.drift),
            *(["its container is privileged: root in it is root on the node"] * node.privileged),
            *(
                ["its agent is not connected to the head's: `vlaunch logs` says why"]
                * (node.agent == "lost")
            ),
            *(model.words for model in node.unfinished),
            *node.trouble.splitlines()[:1],
        ]
        for remark in remarks:
            lines.setdefault(remark, []).append(node.node)
    return {text: fold(names) for text, names in lines.items()}


def _compiled(nodes: tuple[NodeStatus, ...]) -> str:
    """Say how much engines have compiled; nothing where that is not worth a word."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        if node.compiled is not None and node.compiled >= sizes.MIB:
            found.setdefault(sizes.told(node.compiled), []).append(node.node)
    return ", ".join(f"{size} on {fold(names)}" for size, names in found.items())


def _server(server: ServerStatus, alone: bool) -> list[Line]:
    name = "" if not server.name or (alone and server.name == DEFAULT) else f" {server.name}"
    style = "yellow" if server.warning else ""
    where = f" on {fold(server.nodes)}" if server.nodes else ""
    placed = f" ({server.backend}{where})" if server.backend else ""
    texts = [f"{server.model}{placed}"] if server.model else []
    apart = server.endpoints if len(server.endpoints) > 1 and server.state in READY else ()
    if apart:
        good = sum(endpoint.state in GOOD for endpoint in apart)
        texts.append(f"{good} of {len(apart)} endpoints answer")
    elif server.state in GOOD:
        texts.append(server.endpoint)
    elif server.detail:
        texts.append(server.detail)
    first = state_line(f"server{name}: ", server.state, *texts, style=style)
    health = (line(text, lead=_MARGIN) for text in _health(server))
    lines = [first]
    for endpoint in apart:
        how = f"in {endpoint.seconds:.1f}s" if endpoint.state == "answering" else endpoint.detail
        name = f"{_MARGIN}{endpoint.url} on {endpoint.node}: "
        lines.append(state_line(name, endpoint.state, how))
    return [*lines, *health, *_supervision(server)]


def state_line(name: str, state: str, *texts: str, style: str = "") -> Line:
    """Return a line with a state in its colour, and the texts about it."""
    line = plain(name)
    line.append_text(plain(state, style or COLOURS.get(state, "red")))
    for text in filter(None, texts):
        line.append("  ").append_text(plain(text))
    return Line(line, len(plain(name)))


def _health(server: ServerStatus) -> Iterator[str]:
    """Yield what came back, or what is under way instead; of a server of which no step ends, how
    long it has stood, beside its longest step, and where.
    """
    record, busy = server.observed, server.state == "busy"
    facts = list(_answered(server))
    if busy and record is not None and record.asking:
        facts.append(f"oldest {record.asking:.0f} s")
    if facts:
        yield f"{'busy: ' if busy else ''}{', '.join(facts)}"
    if busy and len(server.endpoints) < 2 and server.detail:
        yield server.detail
    if server.warning:
        yield server.warning
    if record is not None and server.state in ("quiet", "suspect"):
        text = f"no step has ended for {record.still:.0f} s; the longest so far took"
        yield f"{text} {record.longest_step:.1f} s"
        if record.wedge is not None:
            yield f"it hangs: {record.wedge.where}"


def _answered(server: ServerStatus) -> Iterator[str]:
    if server.state == "answering":
        yield f"{server.came or server.fingerprint}, answered in {server.seconds:.1f}s"
        if server.kv_tokens is not None:
            yield f"{server.kv_tokens:,} tokens of KV cache"
        if server.concurrency is not None:
            yield f"{server.concurrency:g}× concurrency at full length"
    load = server.load
    if load is not None and (load.running or load.waiting):
        yield f"{load.running} running, {load.waiting} waiting"
        if load.tokens_per_s:
            yield f"{load.tokens_per_s:.0f} tokens/s"


def _supervision(server: ServerStatus) -> Iterator[Line]:
    """Yield what its keeper knows: when it looked, how often it has started it again, and what the
    last fault was, with the first lines of its evidence.
    """
    record = server.observed
    if record is None or server.age is None:
        return
    fault = record.last_fault
    text = f"kept: looked at {server.age:.0f} s ago, {count(len(record.restarts), 'restart')}"
    if record.restarts_left is not None:
        text += f", {record.restarts_left} left"
    if fault is not None:
        when = _when(fault.at)
        text += f", last fault of {record.fault_count} at {when}: {_describe(fault)}"
    if record.next_start is not None and record.state == "pausing":
        wait = max(0.0, record.next_start - record.written - server.age)
        text += f"; next start in {wait:.0f} s"
    yield line(text, lead=_MARGIN)
    evidence = [text for text in (fault.evidence if fault else "").splitlines() if text.strip()]
    yield from (log(text[:_LINE], "", margin=len(_MARGIN) + 2) for text in evidence[:2])


def _describe(fault: Fault) -> str:
    """Say what went wrong, where and why, and what came of it."""
    rank = f"rank {fault.rank}" if fault.rank else ""
    where = " on ".join(filter(None, (rank, fault.node)))
    cause = f": {fault.cause}" if fault.cause and fault.cause != fault.what else ""
    after = (
        "not ready since"
        if fault.ready_again_after is None
        else f"ready again after {fault.ready_again_after:.0f}s"
    )
    lost = (
        "requests lost: unknown" if fault.lost is None else f"{count(fault.lost, 'request')} lost"
    )
    return f"{fault.what}{f' ({where})' if where else ''}{cause}; {after}, {lost}"


def count(number: int, noun: str) -> str:
    """Write a number of things."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _when(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "no date"
