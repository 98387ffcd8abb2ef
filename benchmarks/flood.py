"""A flood of requests at one server: whether each is answered, and what `vlaunch status` says
meanwhile.

    python -m benchmarks.flood [INVENTORY] [--server NAME] [--requests 1000] [--minutes 10]
    [--tokens 16] [--json] python -m benchmarks.flood [INVENTORY] --freeze

The default inventory is the practice cluster's; the server must be up. So many requests are kept in
flight for so many minutes: as each ends, another is sent. `--freeze` needs the practice cluster,
and `serve: {stuck: 60}` in its inventory when the server was started: it stops all of the engine's
processes (SIGSTOP), first for a moment, then for good. Exits with 1 when a goal is missed.
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
from launcher.tools.servers import DEFAULT

EVERY = 20.0  # seconds between two looks
MOMENT = 10.0  # seconds of the short freeze
# Seconds: the goal for red, twice the least for `suspect`, and the limit for the next answer.
RED, BACK = 120.0, 600.0
_AFTER_A_FAILURE = 1.0  # seconds until a request that failed is followed by another


@dataclass(slots=True)
class Flood:
    """Requests that are kept in flight.

    `open` had no answer yet when it ended; `said` has the first failures.
    """

    target: Endpoint
    tokens: int
    answered: int = 0
    failed: int = 0
    open: int = 0
    said: list[str] = field(default_factory=list)

    async def run(self, requests: int, seconds: float) -> None:
        """Keep so many requests in flight for so many seconds."""
        deadline = time.monotonic() + seconds
        asking = [asyncio.create_task(self._ask_on(deadline)) for _ in range(requests)]
        _, late = await asyncio.wait(asking, timeout=seconds)
        self.open = len(late)
        for each in late:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _ask_on(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            try:
                status = await self._ask()
            except (OSError, ValueError, IndexError, EOFError) as error:
                status, said = 0, f"{type(error).__name__}: {error}"
            else:
                said = f"HTTP {status}"
            if status == 200:
                self.answered += 1
                continue
            self.failed += 1
            self.said = [*self.said, said][:5]
            await asyncio.sleep(_AFTER_A_FAILURE)

    async def _ask(self) -> int:
        """Send one request and return its status; an answer that is cut off raises EOFError."""
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
    """Something that has to hold, and what was seen."""

    what: str
    seen: str
    met: bool


def flooded(flood: Flood, looks: Sequence[ServerView], seconds: float) -> list[Goal]:
    """Judge a flood by what became of its requests, and by what `status` said."""
    green = sum(each.colour == "green" for each in looks)
    shown = sum(each.queue for each in looks)
    others = sorted({each.state for each in looks if each.colour != "green"})
    began, ended = (looks[0], looks[-1]) if looks else (None, None)
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
            met=bool(looks) and green == len(looks),
            seen=f"{green} of {len(looks)}" + (f"; also {', '.join(others)}" if others else ""),
        ),
        Goal(
            what="and shows the queue",
            seen=f"{shown} of {len(looks)}",
            met=bool(looks) and shown == len(looks),
        ),
        Goal(
            what="no restart, no fault",
            seen=f"{restarts} restarts, {faults} faults",
            met=(restarts, faults) == (0, 0),
        ),
    ]


def flood(
    inventory: Inventory, name: str, target: Endpoint, *, requests: int, seconds: float, tokens: int
) -> list[Goal]:
    """Flood a server, ask `status` meanwhile, and judge."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket a request
    sent, looks = Flood(target, tokens), list[ServerView]()
    thread = threading.Thread(target=lambda: asyncio.run(sent.run(requests, seconds)), daemon=True)
    began = time.monotonic()
    thread.start()
    while (left := began + seconds - time.monotonic()) > EVERY / 2:
        time.sleep(min(EVERY, left / 2))
        looks.append(client.look(inventory, name))
        print(
            f"{time.monotonic() - began:4.0f} s  {_words(looks[-1])}", file=sys.stderr, flush=True
        )
    thread.join(seconds + 60)
    for each in sent.said:
        print(f"failed: {each}", file=sys.stderr)
    return flooded(sent, looks, seconds)


def _words(seen: ServerView) -> str:
    queue = (
        f"{seen.running} running, {seen.waiting} waiting, {seen.tokens_per_s} tokens/s, oldest"
        f" {seen.oldest:.0f} s"
    )
    return (
        f"{seen.colour:6} {seen.state}: {queue}; generation {seen.generation}, asked for"
        f" {seen.took:.1f} s"
    )


# -- Frozen ----------------------------------------------------------------------------------------


def freeze(
    inventory: Inventory, name: str, target: Endpoint, stuck: float, hosts: Sequence[Host]
) -> Iterator[Goal]:
    """Freeze a server's engine on practice hosts for a moment, then for good; yield the results.

    `stuck` is the inventory's `serve: {stuck: SECONDS}`.
    """
    before = client.look(inventory, name)
    held = _frozen(hosts, name)
    try:
        time.sleep(MOMENT)
    finally:
        engines.thaw(held)
    target.await_answer(60)
    after = client.look(inventory, name)
    same = (after.generation, after.faults) == (before.generation, before.faults)
    yield Goal(
        what=f"frozen for {MOMENT:.0f} s: nothing happens to it",
        met=same and after.colour == "green",
        seen=(
            f"generation {before.generation} → {after.generation}, {after.faults - before.faults}"
            f" faults, {after.state}"
        ),
    )
    held, began = _frozen(hosts, name), time.time()
    try:
        red = _until(lambda: (view := client.look(inventory, name)).colour == "red" and view, RED)
        yield Goal(
            what="frozen for good: `status` is red in time",
            met=red is not None,
            seen=f"{red.state} after {red.at - began:.1f} s" if red else f"not within {RED:.0f} s",
        )
        ended = _until(
            lambda: (view := client.look(inventory, name)).faults > after.faults and view,
            stuck + 60,
        )
    finally:
        engines.thaw(held)
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


def _frozen(hosts: Sequence[Host], name: str) -> list[int]:
    found = engines.of_server(hosts, name)
    if not found:
        sys.exit(f"no process of server `{name}` runs on the practice hosts")
    engines.freeze(found)
    print(f"{len(found)} processes of `{name}` are frozen", file=sys.stderr, flush=True)
    return found


def _until(seen: Callable[[], ServerView | bool], seconds: float) -> ServerView | None:
    """Look until something is seen; None when it is not in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if isinstance(found := seen(), ServerView):
            return found
    return None


# -- The command -----------------------------------------------------------------------------------


def report(goals: Sequence[Goal], *, as_json: bool) -> str:
    """Return the goals as a table, or as JSON."""
    if as_json:
        return json.dumps(
            {"goals": [asdict(each) for each in goals], "met": all(each.met for each in goals)}
        )
    lines = [f"| {each.what} | {each.seen} | {'met' if each.met else 'missed'} |" for each in goals]
    return "\n".join(["| goal | seen | |", "|---|---|---|", *lines])


def find(inventory: Inventory, name: str) -> Mapping[str, Any]:
    """Return what `status` says of a server that answers; ends the program when it does not."""
    said = {each["name"]: each for each in client.status(inventory)}
    if name not in said or client.COLOURS.get(said[name]["state"]) != "green":
        what = (
            f"it is {said[name]['state']}"
            if name in said
            else f"these run: {', '.join(said) or 'none'}"
        )
        sys.exit(
            f"server `{name}` does not answer: {what}. Start it: `vlaunch serve --name {name}`"
        )
    return said[name]


def main() -> int:
    """Flood or freeze, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inventory", nargs="?", type=Path, default=client.LAB)
    parser.add_argument("--server", default=DEFAULT)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer")
    parser.add_argument(
        "--freeze", action="store_true", help="freeze the engine instead; practice cluster only"
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
            f"{inventory.path} is no practice cluster's: only there processes are frozen from"
            " outside"
        )
    target = client.endpoint(inventory, find(inventory, args.server))
    if args.freeze and lab is not None:
        goals = list(freeze(inventory, args.server, target, inventory.serve.stuck, lab.hosts))
    else:
        seconds = 60 * args.minutes
        goals = flood(
            inventory,
            args.server,
            target,
            requests=args.requests,
            seconds=seconds,
            tokens=args.tokens,
        )
    print(report(goals, as_json=args.json))
    return 0 if all(each.met for each in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
