"""A cluster's status as a table, with the server's line below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.model import fold
from launcher.plan.status import ClusterStatus, NodeStatus, ServerStatus
from launcher.tools import symptoms

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLOURS = {
    "running": "green", "alive": "green", "answering": "green", "starting": "yellow", "none": "dim", "absent": "yellow",
}  # fmt: skip


def render(status: ClusterStatus) -> RenderableType:
    """Return the table and what follows it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("NODE", "ROLE", "IP", "CONTAINER", "RAY", "GPUS", "RANKS", "DRIFT"):
        table.add_column(name, overflow="fold")
    for node in status.nodes:
        table.add_row(
            node.node, node.role, node.ip, _coloured(node.container), _coloured(node.ray or "unknown"), node.gpus,
            ", ".join(node.ranks) or "-", "yes" if node.drift else "-" if not node.trouble else "unknown",
        )  # fmt: skip
    lines: list[RenderableType] = [Text(f"cluster {status.cluster}", style="bold"), table]
    lines += [Text(line) for line in _remarks(status.nodes)]
    lines.append(_server(status.server, status.endpoint))
    return Group(*lines)


def _coloured(word: str) -> RenderableType:
    from rich.text import Text

    return Text(word, style=_COLOURS.get(word, "red"))


def _remarks(nodes: tuple[NodeStatus, ...]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for node in nodes:
        for each in node.drift:
            lines.setdefault(f"differs from the inventory: {each}", []).append(node.node)
        if node.trouble:
            lines.setdefault(symptoms.plain(node.trouble.splitlines()[0]), []).append(node.node)
    return [f"  {fold(names)}: {text}" for text, names in lines.items()]


def _server(server: ServerStatus, endpoint: str) -> RenderableType:
    from rich.text import Text

    line = Text("server: ").append(server.state, style=_COLOURS.get(server.state, "red"))
    if server.model:
        line.append(f"  {server.model} ({server.backend})")
    if server.state == "answering":
        line.append(f"  {endpoint}\n        {server.fingerprint}, answered in {server.seconds:.1f}s")
        if server.kv_tokens is not None:
            line.append(f", {server.kv_tokens:,} tokens of KV cache")
        if server.concurrency is not None:
            line.append(f", {server.concurrency:g}× concurrency at full length")
    elif server.detail:
        line.append(f"  {symptoms.plain(server.detail)}")
    return line
