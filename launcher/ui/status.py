"""A cluster's status as a table, with the lines of servers and of batch jobs below it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from launcher.model import fold
from launcher.plan.servers import DEFAULT
from launcher.plan.status import ClusterStatus, NodeStatus, ServerStatus
from launcher.ui import jobs
from launcher.ui.table import with_columns
from launcher.ui.text import plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from launcher.payload.agent.observed import Fault

_COLOURS = {
    "running": "green",
    "alive": "green",
    "answering": "green",
    "busy": "green",
    "starting": "yellow",
    "waiting": "yellow",
    "stopping": "yellow",
    "none": "dim",
    "absent": "yellow",
    "-": "dim",
}
_LINE = 200  # characters of a line of evidence


def console() -> Console:
    """Return where a table goes: as wide as the terminal, and never folded in a pipe, where `grep`
    reads it.
    """
    from rich.console import Console

    wide = Console(highlight=False)
    return wide if wide.is_terminal else Console(highlight=False, width=1000)


def render(status: ClusterStatus) -> RenderableType:
    """Return the table and what follows it."""
    from rich.console import Group

    lines: list[RenderableType] = [plain(f"cluster {status.cluster}", "bold"), _nodes(status.nodes)]
    lines += [plain(line) for line in _remarks(status.nodes)]
    if status.network:
        style = "" if status.network.startswith("proven") else "yellow"
        lines.append(plain(f"network: {status.network}", style))
    lines += [_server(each, len(status.servers) == 1) for each in status.servers] or [
        plain("server: none", "dim")
    ]
    lines += jobs.lines(status.batches)
    return Group(*lines)


def _nodes(nodes: Sequence[NodeStatus]) -> Table:
    table = with_columns("NODE", "ROLE", "IP", "CONTAINER", "RAY", "GPUS", "RANKS", "DRIFT")
    for node in nodes:
        table.add_row(
            plain(node.node),
            node.role,
            node.ip,
            _coloured(node.container),
            _coloured(node.ray or "unknown"),
            plain(node.gpus),
            plain(", ".join(node.ranks) or "-"),
            _drift(node),
        )
    return table


def _drift(node: NodeStatus) -> str:
    if node.drift:
        return "yes"
    return "unknown" if node.trouble else "-"


def _coloured(word: str) -> Text:
    return plain(word, _COLOURS.get(word, "red"))


def _remarks(nodes: tuple[NodeStatus, ...]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for node in nodes:
        for each in node.drift:
            lines.setdefault(f"differs from the inventory: {each}", []).append(node.node)
        if node.agent == "lost":
            lines.setdefault(
                "its agent is not connected to the head's: `vlaunch logs` says why", []
            ).append(node.node)
        if node.trouble:
            lines.setdefault(node.trouble.splitlines()[0], []).append(node.node)
    return [f"  {fold(names)}: {text}" for text, names in lines.items()]


def _server(server: ServerStatus, alone: bool) -> Text:
    name = "" if not server.name or (alone and server.name == DEFAULT) else f" {server.name}"
    style = "yellow" if server.warning else _COLOURS.get(server.state, "red")
    line = plain(f"server{name}: ").append_text(plain(server.state, style))
    if server.model:
        line.append_text(plain(f"  {server.model}{_placed(server)}"))
    if server.state in ("answering", "busy"):
        line.append_text(plain(f"  {server.endpoint}"))
    elif server.detail:
        line.append_text(plain(f"  {server.detail}"))
    for each in (*_answers(server), *_kept(server)):
        line.append("\n        ").append_text(plain(each))
    return line


def _placed(server: ServerStatus) -> str:
    if not server.backend:
        return ""
    where = f" on {fold(server.nodes)}" if server.nodes else ""
    return f" ({server.backend}{where})"


def _answers(server: ServerStatus) -> list[str]:
    """Say what came back, or what is under way instead."""
    busy = server.state == "busy"
    said = [*_answered(server), *_load(server)]
    if busy and server.observed is not None and server.observed.asking:
        said.append(f"oldest {server.observed.asking:.0f} s")
    first = f"{'busy: ' if busy else ''}{', '.join(said)}" if said else ""
    also = server.detail if busy else ""
    return [each for each in (first, also, server.warning) if each]


def _answered(server: ServerStatus) -> list[str]:
    if server.state != "answering":
        return []
    said = [f"{server.fingerprint}, answered in {server.seconds:.1f}s"]
    if server.kv_tokens is not None:
        said.append(f"{server.kv_tokens:,} tokens of KV cache")
    if server.concurrency is not None:
        said.append(f"{server.concurrency:g}× concurrency at full length")
    return said


def _load(server: ServerStatus) -> list[str]:
    load = server.load
    if load is None or not (load.running or load.waiting):
        return []
    said = [f"{load.running} running, {load.waiting} waiting"]
    if load.tokens_per_s:
        said.append(f"{load.tokens_per_s:.0f} tokens/s")
    return said


def _kept(server: ServerStatus) -> list[str]:
    """Say what its keeper knows: when it looked, how often it has started it again, and what the
    last fault was.
    """
    seen = server.observed
    if seen is None or server.age is None:
        return []
    said = f"kept: looked at {server.age:.0f} s ago, {_count(len(seen.restarts), 'restart')}"
    if seen.restarts_left is not None:
        said += f", {seen.restarts_left} left"
    evidence: list[str] = []
    if seen.faults:
        fault = seen.faults[-1]
        said += f", last fault of {seen.fault_count} at {_when(fault.at)}: {_told(fault)}"
        evidence = [line for line in fault.evidence.splitlines() if line.strip()]
    if seen.next_start is not None and seen.state == "pausing":
        said += f"; next start in {max(0.0, seen.next_start - seen.written - server.age):.0f} s"
    return [said, *(f"  {line[:_LINE]}" for line in evidence[:2])]


def _told(fault: Fault) -> str:
    """Say what went wrong, where and why, and what came of it."""
    rank = f"rank {fault.rank}" if fault.rank else ""
    where = " on ".join(each for each in (rank, fault.node) if each)
    cause = f": {fault.cause}" if fault.cause and fault.cause != fault.what else ""
    after = (
        "not ready since"
        if fault.ready_again_after is None
        else f"ready again after {fault.ready_again_after:.0f}s"
    )
    lost = (
        "requests lost: unknown" if fault.lost is None else f"{_count(fault.lost, 'request')} lost"
    )
    return f"{fault.what}{f' ({where})' if where else ''}{cause}; {after}, {lost}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _when(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "no date"
