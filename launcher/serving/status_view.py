"""A cluster's status as a table, followed by lines for servers and batch jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import groupby
from typing import TYPE_CHECKING

from launcher.agent import state
from launcher.agent.observed import Fault
from launcher.app.registry import workloads
from launcher.app.terminal import Line, evidence_line, make_table, plain_text, text_line
from launcher.core import sizes
from launcher.core.domain import fold
from launcher.serving.status import ClusterStatus, NodeStatus, ServerStatus
from launcher.tools.shipped import node_files
from launcher.tools.site.servers import DEFAULT, GOOD, READY, shown_state

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
_MAX_ROWS = 16  # above, equal nodes share a row
_MARGIN = " " * 8  # indent of a server's details


def render_status(status: ClusterStatus) -> RenderableType:
    """Return the table and the lines below it."""
    from rich.console import Group

    title = plain_text(f"cluster {status.cluster}", "bold")
    lines: list[RenderableType] = [title, _node_table(status.nodes)]
    if len(status.nodes) > _MAX_ROWS:
        lines.append(plain_text("  details of each node: `vlaunch status --json`", "dim"))
    remarks = _node_remarks(status.nodes).items()
    lines += [text_line(text, lead=f"  {names}: ") for text, names in remarks]
    if compiled := _describe_compile_cache(status.nodes):
        lines.append(text_line(compiled, lead="compiled: "))
    if status.network:
        style = "" if status.network.startswith("verified") else "yellow"
        lines.append(text_line(status.network, style, lead=plain_text("network: ", style)))
    if status.certificates:
        lines.append(text_line(status.certificates, "yellow"))
    if status.front:
        states = (f"{state} on {node}" for node, state in status.front.nodes.items())
        style = "" if status.front.whole else "red"
        lines.append(text_line(", ".join(states), style, lead=f"front: {status.front.url} "))
        lines += [text_line(text, "yellow", lead=_MARGIN) for text in status.front.drift]
        if status.front.certificate:
            lines.append(text_line(status.front.certificate, style or "yellow", lead=_MARGIN))
    lines += _all_server_lines(status)
    if not status.servers:
        lines.append(plain_text("server: none", "dim"))
    for workload in workloads():
        lines += workload.lines(status.batches)
    return Group(*lines)


def _node_table(nodes: Sequence[NodeStatus]) -> Table:
    table = make_table("NODE", "ROLE", "IP", "CONTAINER", "RAY", "GPUS", "RANKS", "DRIFT")
    for group in _group_nodes(nodes):
        node = group[0]
        same_ranks = all(other.ranks == node.ranks for other in group)
        ranks = ", ".join(node.ranks) or "-" if same_ranks else f"{len(node.ranks)} each"
        table.add_row(
            plain_text(fold([member.node for member in group])),
            node.role,
            node.ip if len(group) == 1 else f"{node.ip} …",
            _coloured_state(node.container),
            _coloured_state(node.ray or "unknown"),
            plain_text(node.gpus),
            plain_text(ranks),
            _drift_cell(node),
        )
    return table


def _drift_cell(node: NodeStatus) -> str:
    return "yes" if node.drift else "unknown" if node.trouble else "-"


def _group_nodes(nodes: Sequence[NodeStatus]) -> list[list[NodeStatus]]:
    """Return the nodes of each row; in a large cluster, equal ones share a row."""
    if len(nodes) <= _MAX_ROWS:
        return [[node] for node in nodes]
    groups: dict[tuple[object, ...], list[NodeStatus]] = {}
    for node in nodes:
        key = (node.role, node.container, node.ray, node.gpus, len(node.ranks), _drift_cell(node))
        groups.setdefault(key, []).append(node)
    return list(groups.values())


def _coloured_state(state: str) -> Text:
    return plain_text(shown_state(state), COLOURS.get(state, "red"))


def _node_remarks(nodes: tuple[NodeStatus, ...]) -> dict[str, str]:
    """Return remarks about nodes, each with the nodes it applies to."""
    lines: dict[str, list[str]] = {}
    for node in nodes:
        remarks = [
            *(f"drift: {difference}" for difference in node.drift),
            *(["its container is privileged: its root is root on the node"] * node.privileged),
            *["its agent is not connected to the head: see `vlaunch logs`"]
            * (node.agent == "lost"),
            *[f"its {node_files.OLD_AGENT}"] * node.old_agent,
            *(model.summary for model in node.unfinished),
            *node.trouble.splitlines()[:1],
        ]
        for remark in remarks:
            lines.setdefault(remark, []).append(node.node)
    return {text: fold(names) for text, names in lines.items()}


def _describe_compile_cache(nodes: tuple[NodeStatus, ...]) -> str:
    """Describe the size of the compile caches; empty below 1 MiB."""
    nodes_by_size: dict[str, list[str]] = {}
    for node in nodes:
        if node.compiled is not None and node.compiled >= sizes.MIB:
            nodes_by_size.setdefault(sizes.format_size(node.compiled), []).append(node.node)
    return ", ".join(f"{size} on {fold(names)}" for size, names in nodes_by_size.items())


def _all_server_lines(status: ClusterStatus) -> Iterator[Line]:
    for group, members in groupby(status.servers, key=lambda server: state.group_of(server.name)):
        replicas = list(members)
        if len(replicas) > 1:
            yield _group_line(group, replicas, status)
        for server in replicas:
            yield from _server_lines(server, len(status.servers) == 1)


def _group_line(name: str, replicas: Sequence[ServerStatus], status: ClusterStatus) -> Line:
    """Return a line for the replicas of a server, above their own lines."""
    ready = sum(server.state in GOOD for server in replicas)
    style = "green" if ready == len(replicas) else "yellow" if ready else "red"
    line = text_line(f"{ready} of {len(replicas)} ready", style, lead=f"replicas of {name}: ")
    if status.front:
        line.text.append("  ").append_text(
            plain_text(status.front.url.replace("/NAME/", f"/{name}/"))
        )
    return line


def _server_lines(server: ServerStatus, only: bool) -> list[Line]:
    name = "" if not server.name or (only and server.name == DEFAULT) else f" {server.name}"
    style = "yellow" if server.warning else ""
    nodes = f" on {fold(server.nodes)}" if server.nodes else ""
    placed = f" ({server.backend}{nodes})" if server.backend else ""
    texts = [f"{server.model}{placed}"] if server.model else []
    apart = server.endpoints if len(server.endpoints) > 1 and server.state in READY else ()
    if apart:
        good = sum(endpoint.state in GOOD for endpoint in apart)
        texts.append(f"{good} of {len(apart)} endpoints ready")
    elif server.state in GOOD:
        texts.append(server.endpoint)
    elif server.detail:
        texts.append(server.detail)
    first = state_line(f"server{name}: ", server.state, *texts, style=style)
    health = (text_line(text, lead=_MARGIN) for text in _health_texts(server))
    lines = [first]
    for endpoint in apart:
        detail = f"in {endpoint.seconds:.1f}s" if endpoint.state == "answering" else endpoint.detail
        name = f"{_MARGIN}{endpoint.url} on {endpoint.node}: "
        lines.append(state_line(name, endpoint.state, detail))
    return [*lines, *health, *_supervision_lines(server)]


def state_line(name: str, state: str, *texts: str, style: str = "") -> Line:
    """Return a line with a state in its colour, followed by texts."""
    line = plain_text(name)
    line.append_text(plain_text(shown_state(state), style or COLOURS.get(state, "red")))
    for text in filter(None, texts):
        line.append("  ").append_text(plain_text(text))
    return Line(line, len(plain_text(name)))


def _health_texts(server: ServerStatus) -> Iterator[str]:
    """Yield the last answer or the load; for a stuck server, for how long and where."""
    record, busy = server.observed, server.state == "busy"
    facts = list(_answer_texts(server))
    if busy and record is not None and record.asking:
        facts.append(f"oldest {record.asking:.0f} s")
    if facts:
        yield f"{'busy: ' if busy else ''}{', '.join(facts)}"
    if busy and len(server.endpoints) < 2 and server.detail:
        yield server.detail
    if server.warning:
        yield server.warning
    if record is not None and record.drained:
        yield "out of rotation: other replicas get new requests"
    if record is not None and server.state in ("quiet", "suspect"):
        text = f"no step has ended for {record.still:.0f} s; longest so far:"
        yield f"{text} {record.longest_step:.1f} s"
        if record.wedge is not None:
            yield f"hanging: {record.wedge.location}"


def _answer_texts(server: ServerStatus) -> Iterator[str]:
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


def _supervision_lines(server: ServerStatus) -> Iterator[Line]:
    """Yield the supervisor's record: restarts, and the last fault with its first evidence."""
    record = server.observed
    if record is None or server.age is None:
        return
    fault = record.last_fault
    restarts = format_count(len(record.restarts), "restart")
    text = f"supervised: checked {server.age:.0f} s ago, {restarts}"
    if record.restarts_left is not None:
        text += f", {record.restarts_left} left"
    if fault is not None:
        when = _format_time(fault.at)
        faults = format_count(record.fault_count, "fault")
        text += f", last of {faults} at {when}: {_describe_fault(fault)}"
    if record.next_start is not None and record.state == "pausing":
        wait = max(0.0, record.next_start - record.written - server.age)
        text += f"; next restart in {wait:.0f} s"
    yield text_line(text, lead=_MARGIN)
    evidence = [text for text in (fault.evidence if fault else "").splitlines() if text.strip()]
    yield from (evidence_line(text[:_LINE], "", margin=len(_MARGIN) + 2) for text in evidence[:2])


def _describe_fault(fault: Fault) -> str:
    """Describe a fault: its place, its cause and its effect."""
    rank = f"rank {fault.rank}" if fault.rank else ""
    location = " on ".join(filter(None, (rank, fault.node)))
    cause = f": {fault.cause}" if fault.cause and fault.cause != fault.what else ""
    recovery = (
        "still not ready"
        if fault.ready_again_after is None
        else f"ready again after {fault.ready_again_after:.0f}s"
    )
    lost = "requests lost: unknown"
    if fault.lost is not None:
        lost = f"{format_count(fault.lost, 'request')} lost"
    return f"{fault.what}{f' ({location})' if location else ''}{cause}; {recovery}, {lost}"


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _format_time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "unknown time"
