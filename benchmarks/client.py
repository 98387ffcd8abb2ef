"""A server as its users see it: `vlaunch status`, and completions from its endpoint."""

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

from benchmarks.faults.traffic import send_request
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
    """The endpoint of a server; `url` ends in `/v1`."""

    url: str
    model: str
    key: str = ""

    def is_answering(self, timeout: float = 10.0) -> bool:
        """Return whether the endpoint answers a request."""
        return send_request(self.url, self.key, self.model, timeout).ok

    def await_answer(self, seconds: float, *, every: float = 0.1) -> float:
        """Send requests until one is answered; return the time of the answer, in seconds since
        1970.

        Exits at the deadline.
        """
        deadline = time.monotonic() + seconds
        while not self.is_answering(max(1.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                sys.exit(f"{self.url} gave no completion within {seconds:.0f} s")
            time.sleep(every)
        return time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """A server in one `vlaunch status`.

    `at` is the time of the answer (seconds since 1970), `took` its duration. `oldest` is the age of
    the supervisor's own request, in seconds.
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
        """Green, yellow or red, as in `status`."""
        return COLOURS.get(self.state, "red")

    @property
    def queue(self) -> bool:
        """True when requests run or wait."""
        return bool(self.running or self.waiting)


def run_vlaunch(
    inventory: Inventory, *arguments: str, timeout: float = 900
) -> subprocess.CompletedProcess[str]:
    """Run `vlaunch`; it may fail."""
    return subprocess.run(
        [VLAUNCH, *arguments],
        env=environment(inventory),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def run_checked(inventory: Inventory, *arguments: str, timeout: float = 900) -> str:
    """Run `vlaunch` and return its output; exit when it fails."""
    completed = run_vlaunch(inventory, *arguments, timeout=timeout)
    if completed.returncode != 0:
        sys.exit(
            f"`vlaunch {' '.join(arguments)}` ended with"
            f" {completed.returncode}:\n{completed.stdout[-2000:]}{completed.stderr[-2000:]}"
        )
    return completed.stdout


def environment(inventory: Inventory) -> dict[str, str]:
    """Return the environment of `vlaunch` for an inventory."""
    return {**os.environ, "VLAUNCH_INVENTORY": str(inventory.path), "NO_COLOR": "1"}


def query_servers(inventory: Inventory) -> list[dict[str, Any]]:
    """Return the servers of `vlaunch status --json`; exit when it fails."""
    completed = run_vlaunch(inventory, "status", "--json", timeout=120)
    try:
        return list(json.loads(completed.stdout)["servers"])
    except (ValueError, KeyError):
        sys.exit(f"`vlaunch status` gives no answer:\n{completed.stderr[-1000:]}")


def require_no_servers(inventory: Inventory, reason: str) -> None:
    """Exit when servers run: the benchmark would end them, or they would disturb it."""
    if names := [server["name"] for server in query_servers(inventory)]:
        sys.exit(
            f"servers run in this cluster ({', '.join(names)}); `vlaunch stop` them first, for this"
            f" {reason}"
        )


def query_server(inventory: Inventory, name: str) -> ServerView:
    """Query `vlaunch status` for one server."""
    began = time.time()
    servers = {server["name"]: server for server in query_servers(inventory)}
    return parse_server(servers.get(name, {}), began, time.time())


def parse_server(payload: Mapping[str, Any], began: float, ended: float) -> ServerView:
    """Parse a server of `status --json`; an empty mapping is a server that does not exist."""
    load, observed = payload.get("load") or {}, payload.get("observed") or {}
    return ServerView(
        at=ended,
        took=ended - began,
        state=str(payload.get("state", "none")),
        running=load.get("running"),
        waiting=load.get("waiting"),
        tokens_per_s=load.get("tokens_per_s"),
        oldest=float(observed.get("asking") or 0.0),
        generation=int(observed.get("generation") or 0),
        faults=int(observed.get("fault_count") or 0),
    )


def server_endpoint(inventory: Inventory, payload: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint of a server of `status --json`, with the inventory's API key."""
    return Endpoint(
        url=str(payload["endpoint"]), model=str(payload["model"]), key=read_api_key(inventory)
    )


def read_api_key(inventory: Inventory) -> str:
    """Return the API key of clients; empty when none is configured."""
    source = {
        name: reference for name, reference in inventory.secrets.items() if name == "VLLM_API_KEY"
    }
    return "".join(
        reference.reveal() for reference in resolve(source, inventory.path.parent).values()
    )
