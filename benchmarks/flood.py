"""A flood of requests at one server: the answers, and `vlaunch status` during the flood.

    python -m benchmarks.flood [INVENTORY] [--server NAME] [--requests 1000] [--minutes 10]
    [--tokens 16] [--json]
    python -m benchmarks.flood [INVENTORY] --freeze

The default inventory is the lab cluster's; the server must be up. The given number of requests is
kept in flight: as each ends, another is sent. `--freeze` needs the lab cluster, and a server
started with `serve: {stuck: 60}` in its inventory: it stops all of the engine's processes
(SIGSTOP), first for a moment, then for good. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import client, engines
from benchmarks.client import Endpoint, ServerView
from launcher.core.domain import Inventory
from launcher.inventory.load import load
from launcher.lab import layout
from launcher.lab.layout import Host
from launcher.tools.site.servers import DEFAULT

EVERY = 20.0  # seconds between two queries of `status`
MOMENT = 10.0  # seconds of the short freeze
# Seconds: the goal for red, twice the minimum for `suspect`, and the limit for the next answer.
RED, BACK = 120.0, 600.0
_AFTER_A_FAILURE = 1.0  # seconds until a request that failed is followed by another


@dataclass(slots=True)
class Flood:
    """A constant number of requests in flight.

    `open` counts requests without an answer at the end; `errors` has the first failures.
    """

    target: Endpoint
    tokens: int
    answered: int = 0
    failed: int = 0
    open: int = 0
    errors: list[str] = field(default_factory=list)

    async def run(self, requests: int, seconds: float) -> None:
        """Keep `requests` requests in flight for `seconds` seconds."""
        deadline = time.monotonic() + seconds
        tasks = [asyncio.create_task(self._send_until(deadline)) for _ in range(requests)]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        self.open = len(late)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_until(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            try:
                status = await self._send()
            except (OSError, ValueError, IndexError, EOFError) as error:
                status, message = 0, f"{type(error).__name__}: {error}"
            else:
                message = f"HTTP {status}"
            if status == 200:
                self.answered += 1
                continue
            self.failed += 1
            self.errors = [*self.errors, message][:5]
            await asyncio.sleep(_AFTER_A_FAILURE)

    async def _send(self) -> int:
        """Send one request and return its status; raises EOFError for a truncated answer."""
        url = urlsplit(self.target.url)
        body = {
            "model": self.target.model,
            "prompt": "Say hello.",
            "max_tokens": self.tokens,
            "ignore_eos": True,
        }
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            writer.write(
                f"POST {url.path}/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection:"
                f" close\r\nAuthorization: Bearer {self.target.key}\r\nContent-Type:"
                f" application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            head, _, text = (await reader.read()).partition(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status == 200 and b"completion_tokens" not in text:
                raise EOFError("the answer is cut off")
            return status
        finally:
            writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A goal, and the result."""

    what: str
    seen: str
    met: bool


def judge_flood(flood: Flood, views: Sequence[ServerView], seconds: float) -> list[Goal]:
    """Compare the answers and the states of `status` with the goals."""
    green = sum(view.colour == "green" for view in views)
    shown = sum(view.queue for view in views)
    others = sorted({view.state for view in views if view.colour != "green"})
    began, ended = (views[0], views[-1]) if views else (None, None)
    restarts = ended.generation - began.generation if began and ended else 0
    faults = ended.faults - began.faults if began and ended else 0
    rate = (
        f"{flood.answered} answered ({flood.answered / seconds:.1f}/s), {flood.failed} failed,"
        f" {flood.open} under way"
    )
    return [
        Goal(
            what="requests are answered, and none fails",
            seen=rate,
            met=flood.answered > 0 and flood.failed == 0,
        ),
        Goal(
            what="`status` is green each time",
            met=bool(views) and green == len(views),
            seen=f"{green} of {len(views)}" + (f"; also {', '.join(others)}" if others else ""),
        ),
        Goal(
            what="and shows the queue",
            seen=f"{shown} of {len(views)}",
            met=bool(views) and shown == len(views),
        ),
        Goal(
            what="no restart, no fault",
            seen=f"{restarts} restarts, {faults} faults",
            met=(restarts, faults) == (0, 0),
        ),
    ]


def run_flood(
    inventory: Inventory, name: str, target: Endpoint, *, requests: int, seconds: float, tokens: int
) -> list[Goal]:
    """Flood a server, query `status` meanwhile, and return the goals."""
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))  # one socket per request
    sent, views = Flood(target, tokens), list[ServerView]()
    thread = threading.Thread(target=lambda: asyncio.run(sent.run(requests, seconds)), daemon=True)
    began = time.monotonic()
    thread.start()
    while (remaining := began + seconds - time.monotonic()) > EVERY / 2:
        time.sleep(min(EVERY, remaining / 2))
        views.append(client.query_server(inventory, name))
        print(
            f"{time.monotonic() - began:4.0f} s  {_format_view(views[-1])}",
            file=sys.stderr,
            flush=True,
        )
    thread.join(seconds + 60)
    for message in sent.errors:
        print(f"failed: {message}", file=sys.stderr)
    return judge_flood(sent, views, seconds)


def _format_view(view: ServerView) -> str:
    queue = (
        f"{view.running} running, {view.waiting} waiting, {view.tokens_per_s} tokens/s, oldest"
        f" {view.oldest:.0f} s"
    )
    return (
        f"{view.colour:6} {view.state}: {queue}; generation {view.generation}, asked for"
        f" {view.took:.1f} s"
    )


# -- Frozen ----------------------------------------------------------------------------------------


def freeze(
    inventory: Inventory, name: str, target: Endpoint, stuck: float, hosts: Sequence[Host]
) -> Iterator[Goal]:
    """Freeze a server's engine on lab hosts for a moment, then for good; yield the goals.

    `stuck` is the inventory's `serve: {stuck: SECONDS}`.
    """
    before = client.query_server(inventory, name)
    pids = _freeze_engine(hosts, name)
    try:
        time.sleep(MOMENT)
    finally:
        engines.thaw(pids)
    target.await_answer(60)
    after = client.query_server(inventory, name)
    same = (after.generation, after.faults) == (before.generation, before.faults)
    yield Goal(
        what=f"frozen for {MOMENT:.0f} s: nothing happens to it",
        met=same and after.colour == "green",
        seen=(
            f"generation {before.generation} → {after.generation}, {after.faults - before.faults}"
            f" faults, {after.state}"
        ),
    )
    pids, began = _freeze_engine(hosts, name), time.time()
    try:
        red = _wait_for_view(
            lambda: (view := client.query_server(inventory, name)).colour == "red" and view, RED
        )
        yield Goal(
            what="frozen for good: `status` is red in time",
            met=red is not None,
            seen=f"{red.state} after {red.at - began:.1f} s" if red else f"not within {RED:.0f} s",
        )
        ended = _wait_for_view(
            lambda: (view := client.query_server(inventory, name)).faults > after.faults and view,
            stuck + 60,
        )
    finally:
        engines.thaw(pids)
    back = target.await_answer(BACK)
    yield Goal(
        what="and it comes back by itself",
        met=ended is not None,
        seen=(
            f"ended after {ended.at - began:.0f} s, answers again after {back - began:.0f} s"
            if ended
            else "it was not ended"
        ),
    )


def _freeze_engine(hosts: Sequence[Host], name: str) -> list[int]:
    pids = engines.find_engine_pids(hosts, name)
    if not pids:
        sys.exit(f"no process of server `{name}` runs on the lab hosts")
    engines.freeze(pids)
    print(f"{len(pids)} processes of `{name}` are frozen", file=sys.stderr, flush=True)
    return pids


def _wait_for_view(query: Callable[[], ServerView | bool], seconds: float) -> ServerView | None:
    """Query until `query` returns a view; return None at the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if isinstance(view := query(), ServerView):
            return view
    return None


# -- The command -----------------------------------------------------------------------------------


def format_report(goals: Sequence[Goal], *, as_json: bool) -> str:
    """Return the goals as a table, or as JSON."""
    if as_json:
        return json.dumps(
            {"goals": [asdict(goal) for goal in goals], "met": all(goal.met for goal in goals)}
        )
    lines = [f"| {goal.what} | {goal.seen} | {'met' if goal.met else 'missed'} |" for goal in goals]
    return "\n".join(["| goal | seen | |", "|---|---|---|", *lines])


def find_server(inventory: Inventory, name: str) -> Mapping[str, Any]:
    """Return a server of `status` that answers; exit when there is none."""
    servers = {server["name"]: server for server in client.query_servers(inventory)}
    if name not in servers or client.COLOURS.get(servers[name]["state"]) != "green":
        reason = (
            f"it is {servers[name]['state']}"
            if name in servers
            else f"these run: {', '.join(servers) or 'none'}"
        )
        sys.exit(
            f"server `{name}` does not answer: {reason}. Start it: `vlaunch serve --name {name}`"
        )
    return servers[name]


def main() -> int:
    """Flood or freeze, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inventory", nargs="?", type=Path, default=client.LAB)
    parser.add_argument("--server", default=DEFAULT)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer")
    parser.add_argument(
        "--freeze", action="store_true", help="freeze the engine instead; lab cluster only"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    inventory = load(args.inventory)
    if args.freeze and inventory.serve.stuck > 60:
        sys.exit(
            f"a frozen engine counts as dead after {inventory.serve.stuck:g} s: set `serve:"
            " {stuck: 60}` and run `vlaunch serve` again"
        )
    lab = layout.load_lab(inventory.path.parent)
    if args.freeze and lab is None:
        sys.exit(
            f"{inventory.path} is no lab cluster's: only there processes are frozen from outside"
        )
    target = client.server_endpoint(inventory, find_server(inventory, args.server))
    if args.freeze and lab is not None:
        goals = list(freeze(inventory, args.server, target, inventory.serve.stuck, lab.hosts))
    else:
        seconds = 60 * args.minutes
        goals = run_flood(
            inventory,
            args.server,
            target,
            requests=args.requests,
            seconds=seconds,
            tokens=args.tokens,
        )
    print(format_report(goals, as_json=args.json))
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
