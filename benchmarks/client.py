"""A server as its users have it: what `vlaunch` says of it, and completions from its endpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.traffic import ask
from launcher.app.secrets import resolve
from launcher.core.domain import Inventory

VLAUNCH = str(Path(sys.executable).parent / "vlaunch")
LAB = Path("/var/lib/vlaunch-lab/inventory.yaml")
COLOURS = {
    "answering": "green",
    "busy": "green",
    "starting": "yellow",
    "waiting": "yellow",
    "stopping": "yellow",
    "quiet": "yellow",
    "resting": "yellow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where completions come from; `url` ends in `/v1`."""

    url: str
    model: str
    key: str = ""

    def answers(self, timeout: float = 10.0) -> bool:
        """Tell whether a completion comes back."""
        return ask(self.url, self.key, self.model, timeout).ok

    def await_answer(self, seconds: float, *, every: float = 0.1) -> float:
        """Ask until a completion comes back; return when it came, in seconds since 1970.

        Ends the program when none does.
        """
        deadline = time.monotonic() + seconds
        while not self.answers(max(1.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                sys.exit(f"{self.url} gave no completion within {seconds:.0f} s")
            time.sleep(every)
        return time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """What one `vlaunch status` said of a server.

    `at` (seconds since 1970) is when it had said it, after `took` seconds.

    `oldest` is for how many seconds the keeper's own completion has been waited for.
    """

    at: float
    took: float
    state: str
    running: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None
    oldest: float = 0.0
    generation: int = 0
    faults: int = 0

    @property
    def colour(self) -> str:
        """Green, yellow or red, as `status` shows it."""
        return COLOURS.get(self.state, "red")

    @property
    def queue(self) -> bool:
        """True when it shows requests that run or wait."""
        return bool(self.running or self.waiting)


def vlaunch(
    inventory: Inventory, *words: str, timeout: float = 900
) -> subprocess.CompletedProcess[str]:
    """Run `vlaunch` to its end, whatever that is."""
    return subprocess.run(
        [VLAUNCH, *words],
        env=environment(inventory),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def must(inventory: Inventory, *words: str, timeout: float = 900) -> str:
    """Run `vlaunch` and return what it printed; shows what it said and ends the program when it
    fails.
    """
    done = vlaunch(inventory, *words, timeout=timeout)
    if done.returncode != 0:
        sys.exit(
            f"`vlaunch {' '.join(words)}` ended with"
            f" {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def environment(inventory: Inventory) -> dict[str, str]:
    """Return the environment in which `vlaunch` works on an inventory."""
    return {**os.environ, "VLAUNCH_INVENTORY": str(inventory.path), "NO_COLOR": "1"}


def status(inventory: Inventory) -> list[dict[str, Any]]:
    """Return what `vlaunch status --json` says of all servers; ends the program when it gives no
    answer.
    """
    done = vlaunch(inventory, "status", "--json", timeout=120)
    try:
        return list(json.loads(done.stdout)["servers"])
    except (ValueError, KeyError):
        sys.exit(f"`vlaunch status` gives no answer:\n{done.stderr[-1000:]}")


def refuse_servers(inventory: Inventory, why: str) -> None:
    """End the program when servers run there: what follows would be the end of them, or would be
    disturbed by them.
    """
    if names := [each["name"] for each in status(inventory)]:
        sys.exit(
            f"servers run in this cluster ({', '.join(names)}); `vlaunch stop` them first, for this"
            f" {why}"
        )


def look(inventory: Inventory, name: str) -> ServerView:
    """Ask `vlaunch status` about a server."""
    began = time.time()
    said = {each["name"]: each for each in status(inventory)}
    return read(said.get(name, {}), began, time.time())


def read(said: Mapping[str, Any], began: float, ended: float) -> ServerView:
    """Read what `status --json` says of one server; empty where it knows of none."""
    load, seen = said.get("load") or {}, said.get("observed") or {}
    return ServerView(
        at=ended,
        took=ended - began,
        state=str(said.get("state", "none")),
        running=load.get("running"),
        waiting=load.get("waiting"),
        tokens_per_s=load.get("tokens_per_s"),
        oldest=float(seen.get("asking") or 0.0),
        generation=int(seen.get("generation") or 0),
        faults=int(seen.get("fault_count") or 0),
    )


def endpoint(inventory: Inventory, said: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint of a server that `status --json` has told of, with the inventory's API
    key.
    """
    return Endpoint(url=str(said["endpoint"]), model=str(said["model"]), key=key(inventory))


def key(inventory: Inventory) -> str:
    """Return the API key that clients need; empty where none is asked for."""
    source = {name: each for name, each in inventory.secrets.items() if name == "VLLM_API_KEY"}
    return "".join(each.reveal() for each in resolve(source, inventory.path.parent).values())
