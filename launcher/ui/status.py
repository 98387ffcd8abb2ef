"""A cluster's status as a table, with the server's line and those of batch jobs below it."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

from launcher.model import fold
from launcher.plan.status import ClusterStatus, NodeStatus, ServerStatus
from launcher.tools import symptoms
from launcher.ui import jobs

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

_COLOURS = {
    "running": "green", "alive": "green", "answering": "green", "starting": "yellow", "none": "dim", "absent": "yellow",
}  # fmt: skip
_LINE = 200  # characters of a line of evidence


def console() -> Console:
    """Return where a table goes: as wide as the terminal, and never folded in a pipe, where `grep` reads it."""
    from rich.console import Console

    wide = Console(highlight=False)
    return wide if wide.is_terminal else Console(highlight=False, width=1000)


def render(status: ClusterStatus) -> RenderableType:
    """Return the table and what follows it."""
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("NODE", "ROLE", "IP", "CONTAINER", "RAY", "GPUS", "RANKS", "DRIFT"):
        table.add_column(name, overflow="fold")
    for node in status.nodes:
        table.add_row(
            _plain(node.node), node.role, node.ip, _coloured(node.container), _coloured(node.ray or "unknown"),
            _plain(node.gpus), _plain(", ".join(node.ranks) or "-"),
            "yes" if node.drift else "-" if not node.trouble else "unknown",
        )  # fmt: skip
    lines: list[RenderableType] = [_plain(f"cluster {status.cluster}", "bold"), table]
    lines += [_plain(line) for line in _remarks(status.nodes)]
    if status.network:
        lines.append(_plain(f"network: {status.network}", "" if status.network.startswith("proven") else "yellow"))
    lines.append(_server(status.server, status.endpoint))
    lines += jobs.lines(status.batches)
    return Group(*lines)


def _plain(words: str, style: str = "") -> Text:
    """Return words as they are: neither rich's markup nor a terminal's codes, for nodes have had a hand in them."""
    from rich.text import Text

    return Text(symptoms.brief(words), style=style)


def _coloured(word: str) -> Text:
    return _plain(word, _COLOURS.get(word, "red"))


def _remarks(nodes: tuple[NodeStatus, ...]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for node in nodes:
        for each in node.drift:
            lines.setdefault(f"differs from the inventory: {each}", []).append(node.node)
        if node.trouble:
            lines.setdefault(node.trouble.splitlines()[0], []).append(node.node)
    return [f"  {fold(names)}: {text}" for text, names in lines.items()]


def _server(server: ServerStatus, endpoint: str) -> Text:
    line = _plain("server: ").append_text(_coloured(server.state))
    if server.model:
        line.append_text(_plain(f"  {server.model} ({server.backend})"))
    if server.state == "answering":
        said = [f"{server.fingerprint}, answered in {server.seconds:.1f}s"]
        if server.kv_tokens is not None:
            said.append(f"{server.kv_tokens:,} tokens of KV cache")
        if server.concurrency is not None:
            said.append(f"{server.concurrency:g}× concurrency at full length")
        line.append_text(_plain(f"  {endpoint}")).append("\n        ").append_text(_plain(", ".join(said)))
    elif server.detail:
        line.append_text(_plain(f"  {server.detail}"))
    for each in _supervised(server):
        line.append("\n        ").append_text(_plain(each))
    return line


def _supervised(server: ServerStatus) -> list[str]:
    """Say how many restarts are left, and what the last fault was."""
    kept = server.supervision
    if kept is None:
        return []
    left = f"{kept.restarts_left} restarts left" if kept.restarts_left != 1 else "1 restart left"
    if kept.fault is None:
        return [f"supervised, {left}"]
    fault, when = kept.fault, datetime.fromtimestamp(kept.fault.at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    where = " on ".join(each for each in (f"rank {fault.rank}" if fault.rank else "", fault.node) if each)
    after = "not ready since" if fault.ready_again_after is None else f"ready again after {fault.ready_again_after:.0f}s"
    lost = "" if fault.lost is None else f", {fault.lost} requests lost" if fault.lost != 1 else ", 1 request lost"
    said = f"{fault.what}{f' ({where})' if where else ''}"
    return [
        f"supervised, {left}; last fault of {kept.faults} at {when}: {said}; {after}{lost}",
        *(f"  {line[:_LINE]}" for line in fault.evidence[:2]),
    ]
