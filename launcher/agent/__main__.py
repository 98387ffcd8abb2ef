"""First process of a container: `vlaunch_agent --node NAME --head IP --port P [--lead
--metrics-port P] [--private-shm] [-- ray start …]`.

Starts Ray, and the servers' engines on the supervisor's orders; on the head (`--lead`) it runs the
supervisors. It exits on a signal, and when Ray exits while no engine runs: Docker then restarts the
container. Its HTTP server (`server.py`) runs in a thread of its own.
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

from . import metrics, state
from .front import rotation
from .front.haproxy import DRAIN
from .front.router_process import RouterProcess
from .link import leader, queries, server
from .link.certificates import Certificates
from .link.leader import Leader
from .link.members import Member
from .log import say, trace
from .processes import children, process
from .processes.node import RESTARTED, LocalNode, Order
from .supervise.supervisor import Supervisor

# seconds between two turns: mostly, and while something is being started or ended
_INTERVAL, _BUSY_INTERVAL = 0.5, 0.1
_RAY_RETRY = 5.0  # seconds until Ray is started again beside engines that go on without it
_RAY_GRACE = 30.0  # seconds for Ray to end


class RayDaemon:
    """Ray on this node (`ray start --block`), if the inventory enables it.

    Its output goes to the container's log.
    """

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        self.code: int | None = None  # how it ended
        self.starts = 0
        self._head = ""
        self._rejoins = False
        self._process: subprocess.Popen[bytes] | None = None
        self._again = 0.0

    def tick(self, *, others: bool) -> None:
        """Start Ray. If it exits, restart it beside `others`; else store its exit code."""
        if not self.argv or time.monotonic() < self._again:
            return
        if self._process is None:
            # The note of a dead session would send `ray start --head` to a cluster that is gone.
            with contextlib.suppress(OSError):
                os.remove("/tmp/ray/ray_current_cluster")  # Ray's own place
            try:
                self._process = children.spawn(
                    self.argv,
                    env={**os.environ, process.MARK: process.mark_value("ray")},
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
        process.kill(process.find_marked("ray"))
        if self._rejoins:
            self._rejoins = False
        elif others:
            say(
                f"Ray exited with code {code}; restarting it while servers that do not use it keep"
                " running"
            )
            self._again = time.monotonic() + _RAY_RETRY
        else:
            self.code = code if code >= 0 else 128 - code

    def follow_head(self, head: str) -> None:
        """Restart Ray if its head has changed: it would wait for the old head and then exit."""
        if head and self._head and head != self._head and self._process is not None:
            say("Ray's head was restarted; rejoining it")
            process.kill(process.find_marked("ray"))
            self._again, self._rejoins = 0.0, True  # `turn` sees it end
        self._head = head or self._head

    def stop(self) -> None:
        """Ask Ray to exit."""
        self.argv = []
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)

    @property
    def ended(self) -> bool:
        """True if Ray does not run."""
        return self._process is None or self._process.poll() is not None


class Agent:
    """Main loop and state of this container's first process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.woken = threading.Event()  # there are other orders
        self.node = LocalNode(
            state.FOLDER, private_shm=args.private_shm, on_gpus_lost=self._exit_for_restart
        )
        self.ray = RayDaemon(args.command)
        self.router = RouterProcess(state.FOLDER)
        self.lead: Leader | None = None
        self.member: Member | None = None
        self.lock = threading.RLock()  # of all this, for the server's thread
        address, certificates = (args.head, args.port), Certificates(server=args.lead)
        sites = [queries.site(state.SOCKET, self)]
        if args.lead:
            lead = self.lead = Leader(args.node, self.node)
            sites.append(leader.members_site(lead, self.lock, certificates, *address))

            def page(now: float) -> str:
                return metrics.render_metrics(
                    now, time.monotonic() - self.turned, lead.report_ages()
                )

            sites.append(queries.metrics_site(args.head, args.metrics_port, page))
        else:
            wake = self.woken.set
            self.member = Member(args.node, self.node, *address, certificates, wake)
        self.server = server.HttpServer(*sites)
        self.supervisors: dict[str, Supervisor] = {}
        self.paused: dict[str, float] = {}  # servers that get no requests, and until when
        self.signals: list[int] = []
        self.code: int | None = None
        self.turned = time.monotonic() - _INTERVAL

    def run(self) -> int:
        """Run until a signal or an exit code; return the exit code."""
        self.tick()  # before members connect: engines without an order stop
        self.server.start()
        if self.member is not None:
            self.member.start()
        while self.code is None and not self.signals:
            with self.lock:
                self.tick()
            self.woken.wait(_BUSY_INTERVAL if self.busy else _INTERVAL)
            self.woken.clear()
        return self.shut_down()

    @property
    def busy(self) -> bool:
        """True while something starts or stops, or new orders are likely."""
        part = self.member or self.node
        return part.changing or any(supervisor.changing for supervisor in self.supervisors.values())

    def tick(self) -> None:
        """Run one round of the main loop."""
        self.turned = time.monotonic()
        children.reap()
        self.ray.tick(others=self.node.has_engine)
        self.router.tick()
        self.code = self.ray.code if self.code is None else self.code
        if self.member is not None:
            self.member.tick()
            self.ray.follow_head(self.member.answer.ray)
        if self.lead is not None:
            self._supervise(self.lead)

    def _supervise(self, lead: Leader) -> None:
        for name in state.server_names():
            if name not in self.supervisors:
                self.supervisors[name] = Supervisor(name, state.FOLDER, lead)
        for supervisor in self.supervisors.values():
            try:
                supervisor.tick()
            except Exception:
                trace(supervisor.name)
        orders: dict[str, dict[str, Order]] = {}
        for name, supervisor in self.supervisors.items():
            for node, order in supervisor.orders().items():
                orders.setdefault(node, {})[name] = order
        lead.orders = orders
        lead.left_alone = {
            name for name, supervisor in self.supervisors.items() if supervisor.leaves_alone
        }
        statuses = {name: supervisor.status for name, supervisor in self.supervisors.items()}
        known = {name: status for name, status in statuses.items() if status is not None}
        states = rotation.front_states(known)
        self.paused = rotation.lasting_pauses(self.paused, states, self.turned)
        lead.front_states = states | dict.fromkeys(self.paused, DRAIN)
        has_front = bool(lead.fronts())
        for name, status in known.items():
            is_drained = lead.front_states.get(name) == DRAIN and not status.draining
            status.drained = has_front and is_drained
        lead.ray = f"{lead.boot}.{self.ray.starts}" if self.ray.starts else ""
        lead.tick()

    def _exit_for_restart(self, why: str) -> None:
        """Exit, unless this hurts a thing that works, or has not helped before."""
        note = os.path.join(state.FOLDER, RESTARTED)
        statuses = (supervisor.status for supervisor in self.supervisors.values())
        serving = any(status and status.state in ("starting", "ready") for status in statuses)
        if os.path.exists(note) or serving or self.router.runs or process.busy_ray_workers():
            return
        try:
            state.write_json(note, why)
        except OSError:
            return  # it could restart for ever
        say(f"{why}: restarting the container")
        self.code = 1

    def shut_down(self) -> int:
        """Stop everything that runs here, politely first; the specs stay."""
        deadline = time.monotonic() + _RAY_GRACE
        self.ray.stop()
        self.router.stop()
        while not (self.node.stop_all() and self.ray.ended) and time.monotonic() < deadline:
            children.reap()
            time.sleep(0.1)
        return (
            self.code if self.code is not None else 128 + (self.signals[0] if self.signals else 0)
        )


def main() -> int:
    """Parse the command line and run the agent."""
    parser = argparse.ArgumentParser()
    for name in ("--node", "--head"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--lead", action="store_true")
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--private-shm", action="store_true")
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()
    children.raise_file_limit()
    agent = Agent(args)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: agent.signals.append(received))
    code = agent.run()
    sys.stdout.flush()
    os._exit(code)  # a query that waits for Ray or vLLM must not hold the container


if __name__ == "__main__":
    sys.exit(main())
