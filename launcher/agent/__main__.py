"""First process of a container: `vlaunch_agent --node NAME --head IP --port P
[--lead --metrics-port P] [--private-shm] [-- ray start …]`.

Starts Ray, and the servers' engines as the keeper orders; on the head (`--lead`) it is the keeper.

It ends when it is told to, and when Ray ends while no engine is here: Docker starts the container
again then. Its HTTP server (`server.py`) is a thread of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

from . import children, crew, metrics, process, queries, server, state
from .certificates import Certificates
from .crew import Lead
from .keeper import Keeper
from .log import say, trace
from .members import Follower
from .node import Node, Order

# seconds between two turns: mostly, and while something is being started or ended
_TURN, _QUICK = 0.5, 0.1
_RAY_AGAIN = 5.0  # seconds until Ray is started again beside engines that go on without it
_RAY_GRACE = 30.0  # seconds for Ray to end


class RayDaemon:
    """Ray on this node (`ray start --block`), where the inventory wants it.

    What it prints goes to the container's log.
    """

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        self.code: int | None = None  # how it ended
        self.starts = 0
        self._head = ""
        self._rejoins = False
        self._process: subprocess.Popen[bytes] | None = None
        self._again = 0.0

    def turn(self, *, others: bool) -> None:
        """Start it; when it has ended while `others` go on without it, start it again, else say how
        it ended in `code`.
        """
        if not self.argv or time.monotonic() < self._again:
            return
        if self._process is None:
            # The note of a dead session would send `ray start --head` to a cluster that is gone.
            with contextlib.suppress(OSError):
                os.remove("/tmp/ray/ray_current_cluster")  # Ray's own place
            try:
                self._process = children.spawn(
                    self.argv,
                    env={**os.environ, process.MARK: process.mark("ray")},
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                )
            except OSError as error:
                say(f"{self.argv[0]}: {error.strerror}")
                self.code = 127
            self.starts += 1
            return
        code = self._process.poll()
        if code is None:
            return
        children.forget(self._process)
        self._process = None
        process.kill(process.marked("ray"))
        if self._rejoins:
            self._rejoins = False
        elif others:
            say(
                f"Ray has ended with exit code {code}; it is started again, beside what goes on"
                " without it"
            )
            self._again = time.monotonic() + _RAY_AGAIN
        else:
            self.code = code if code >= 0 else 128 - code

    def follow(self, head: str) -> None:
        """Start Ray again where its head is another one than before: it would wait for the old one,
        and then end.
        """
        if head and self._head and head != self._head and self._process is not None:
            say("Ray's head was started anew; joining it")
            process.kill(process.marked("ray"))
            self._again, self._rejoins = 0.0, True  # `turn` sees it end
        self._head = head or self._head

    def stop(self) -> None:
        """Tell it to end."""
        self.argv = []
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)

    @property
    def over(self) -> bool:
        """True when it does not run."""
        return self._process is None or self._process.poll() is not None


class Agent:
    """All that this container's first process does."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.woken = threading.Event()  # there are other orders
        self.node = Node(state.FOLDER, private_shm=args.private_shm, lost=self._lost)
        self.ray = RayDaemon(args.command)
        self.lead: Lead | None = None
        self.follower: Follower | None = None
        self.lock = threading.RLock()  # of all this, for the server's thread
        address, certificates = (args.head, args.port), Certificates(server=args.lead)
        sites = [queries.site(state.SOCKET, self)]
        if args.lead:
            lead = self.lead = Lead(args.node, self.node)
            sites.append(crew.site(lead, self.lock, certificates, *address))

            def page(now: float) -> str:
                return metrics.text(now, time.monotonic() - self.turned, lead.heard())

            sites.append(queries.metrics_site(args.head, args.metrics_port, page))
        else:
            wake = self.woken.set
            self.follower = Follower(args.node, self.node, *address, certificates, wake)
        self.server = server.Server(*sites)
        self.keepers: dict[str, Keeper] = {}
        self.told: list[int] = []
        self.code: int | None = None
        self.turned = time.monotonic() - _TURN

    def run(self) -> int:
        """Go on until somebody says that it is enough; return the exit code."""
        self.turn()  # before it answers members, whose engines end without an order
        self.server.start()
        if self.follower is not None:
            self.follower.start()
        while self.code is None and not self.told:
            with self.lock:
                self.turn()
            self.woken.wait(_QUICK if self.busy else _TURN)
            self.woken.clear()
        return self.leave()

    @property
    def busy(self) -> bool:
        """True while something is being started or stopped, or other orders are likely."""
        part = self.follower or self.node
        return part.changing or any(keeper.changing for keeper in self.keepers.values())

    def turn(self) -> None:
        """Look at everything once."""
        self.turned = time.monotonic()
        children.reap()
        self.ray.turn(others=self.node.runs)
        self.code = self.ray.code if self.code is None else self.code
        if self.follower is not None:
            self.follower.turn()
            self.ray.follow(self.follower.answer.ray)
        if self.lead is not None:
            self._keep(self.lead)

    def _keep(self, lead: Lead) -> None:
        for name in state.names():
            if name not in self.keepers:
                self.keepers[name] = Keeper(name, state.FOLDER, lead)
        for keeper in self.keepers.values():
            try:
                keeper.turn()
            except Exception:
                trace(keeper.name)
        orders: dict[str, dict[str, Order]] = {}
        for name, keeper in self.keepers.items():
            for node, order in keeper.orders().items():
                orders.setdefault(node, {})[name] = order
        lead.orders = orders
        lead.ray = f"{lead.boot}.{self.ray.starts}" if self.ray.starts else ""
        lead.turn()

    def _lost(self, why: str) -> None:
        say(f"{why}: the container is started anew")
        self.code = 1

    def leave(self) -> int:
        """End everything that runs here, politely first; what is wanted stays wanted."""
        deadline = time.monotonic() + _RAY_GRACE
        self.ray.stop()
        while not (self.node.leave() and self.ray.over) and time.monotonic() < deadline:
            children.reap()
            time.sleep(0.1)
        return self.code if self.code is not None else 128 + (self.told[0] if self.told else 0)


def main() -> int:
    """Read the command line and be the agent."""
    parser = argparse.ArgumentParser()
    for name in ("--node", "--head"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--lead", action="store_true")
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--private-shm", action="store_true")
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()
    children.allow_files()
    agent = Agent(args)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: agent.told.append(received))
    code = agent.run()
    sys.stdout.flush()
    os._exit(code)  # a query that waits for Ray or vLLM must not hold the container


if __name__ == "__main__":
    sys.exit(main())
