"""Network probe of one node, run in a container that will serve: starts one rank per GPU, prints
one JSON object. Its standard input begins with the run's certificate (`tls.py`).

Standard library only; the ranks (`network_rank.py`) import torch. It exits when its standard input
ends, at its deadline, or on a signal, and leaves no process behind. Its output has the shape of
`Report` in `launcher/network/probe_command.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import network_node
import network_start

TAIL = 2000
# resolv.conf(5): the shortest that glibc waits for a name server
QUICK_NAMES = "timeout:1 attempts:1"


class RankChild:
    """One rank from its parent's point of view."""

    def __init__(self, rank: int, local: int) -> None:
        self.rank, self.local = rank, local
        self.phase, self.error, self.note, self.ended = "starting", "", "", False
        self.killed, self.ready, self.closed = False, False, False
        self.took: dict[str, float] = {}
        self.transfers: list[dict[str, Any]] = []
        self.collective: dict[str, Any] | None = None
        self.facts: dict[str, object] = {}
        self.logged: list[dict[str, Any]] = []
        self.tail, self.partial = "", b""
        self.process: subprocess.Popen[bytes] | None = None
        self.events = -1

    def start(self, argv: list[str], env: dict[str, str], listener: int) -> None:
        """Start the process with a descriptor for its events, and on rank 0 the listening one."""
        self.events, theirs = os.pipe()
        passed = [theirs] if listener < 0 else [theirs, listener]
        try:
            self.process = subprocess.Popen(
                [
                    *argv,
                    "--events",
                    str(theirs),
                    "--listener",
                    str(listener),
                    "--parent",
                    str(os.getpid()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=passed,
                start_new_session=True,
            )
        finally:
            os.close(theirs)

    def list_pipes(self) -> Iterator[tuple[int, Callable[[bytes], None]]]:
        """Yield the descriptors of a started rank, and their readers."""
        yield self.events, self.read_events
        if self.process is not None and self.process.stdout is not None:
            yield self.process.stdout.fileno(), self.read_output

    def read_events(self, data: bytes) -> None:
        """Parse data from the pipe: whole lines of JSON; empty at its end."""
        self.closed = not data
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            self.phase = event.get("phase", self.phase)
            self.error = event.get("error", self.error)
            self.note = event.get("note", self.note)
            self.ended = bool(event.get("done", self.ended))
            self.ready = bool(event.get("ready", self.ready))
            self.took.update(event.get("took", {}))
            self.facts.update(event.get("facts", {}))
            self.collective = event.get("collective", self.collective)
            if "transfer" in event:
                self.transfers.append(event["transfer"])
            if "log" in event:
                self.logged.append(event["log"])

    def has_met(self) -> bool:
        """True if it has met the other ranks, or has finished everything."""
        return self.ended or "meeting" in self.took

    def has_failed(self) -> bool:
        """True if it exited before it met the others."""
        exited = self.process is not None and self.process.poll() is not None
        return exited and self.closed and not self.has_met()

    def send_line(self, line: str) -> None:
        """Send the rank an order (see `ProbeRank.await_release` and `ProbeRank.follow_parent`)."""
        with contextlib.suppress(OSError):
            if self.process is not None and self.process.stdin is not None:
                os.write(self.process.stdin.fileno(), f"{line}\n".encode())

    def read_output(self, data: bytes) -> None:
        self.tail = (self.tail + data.decode(errors="replace"))[-TAIL:]

    def report(self) -> dict[str, Any]:
        """Return the fields of `RankReport`."""
        code = self.process.poll() if self.process else None
        error = self.error or self.note
        if not self.error and self.killed:
            error = f"did not exit by itself{'; ' + self.note if self.note else ''}"
        elif not error and not self.ended and code is not None:
            error = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return {
            "rank": self.rank,
            "local_rank": self.local,
            "phase": self.phase,
            "ended": self.ended,
            "exit": code,
            "error": error,
            "tail": self.tail,
            "torch": self.took.get("torch"),
            "meeting": self.took.get("meeting"),
        }


class NodeProbe:
    """All ranks of this node, from start to report."""

    def __init__(
        self, args: argparse.Namespace, program: tuple[str, ...], argv: list[str], certificate: str
    ) -> None:
        self.args, self.program, self.argv = args, program, argv
        self.certificate = certificate  # of the run; empty in exported pods
        self.children = [
            RankChild(args.node_rank * args.ranks_per_node + i, i)
            for i in range(args.ranks_per_node)
        ]
        self.signal = 0
        self.started = time.monotonic()
        self.error = ""
        self.env = network_node.network_environment()
        names = [entry.partition("=")[0] for entry in args.nodes.split(",")]
        self.peers = [name for name in names if name != args.node]

    def run(self) -> dict[str, Any]:
        """Start the ranks, wait, stop them, and return the report."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.on_signal)
        folder = tempfile.mkdtemp(prefix="vlaunch-nccl-")
        listener = None
        try:
            if self.args.node_rank == 0:
                listener = network_node.reserve_port(self.args.master, self.args.port)
            env = rank_environment(os.environ, folder)
            for child in self.children:
                fd = listener.fileno() if listener and child.rank == 0 else -1
                child.start([*self.program, "--child", str(child.local), *self.argv], env, fd)
            self.meeting = threading.Thread(
                target=self.await_rendezvous, args=(listener,), daemon=True
            )
            self.meeting.start()
            self.error = self.watch()
        except network_node.PortUnusable as error:
            self.error = str(error)
        except Exception as error:
            self.error = f"the probe failed: {type(error).__name__}: {error}"
        finally:
            self.kill_ranks()
            log, pairs = network_node.read_logs(folder), self.pair_logs(folder)
            shutil.rmtree(folder, ignore_errors=True)
        return {**self.report(), "log": log, "pair_logs": pairs}

    def await_rendezvous(self, listener: socket.socket | None) -> None:
        """Release the ranks once all nodes have torch, or send them the reason against it."""
        args = self.args
        try:
            if listener is None:
                address = args.master, args.port
                network_start.follow(
                    self, *address, args.nonce, args.node, args.reach, args.torch, self.certificate
                )
            else:
                network_start.Gathering(
                    listener, args.nonce, self.peers, self, self.certificate
                ).meet(args.reach, args.torch)
        except (network_start.RendezvousError, OSError) as error:
            self.send_line(f"no {error}")

    def send_line(self, line: str) -> None:
        for child in self.children:
            child.send_line(line)

    def release(self, absent: Sequence[str]) -> None:
        self.send_line(f"go {','.join(absent)}".rstrip())

    def lose(self, node: str) -> None:
        self.send_line(f"lost {node}")

    def have_torch(self) -> bool:
        self.refuse_failed()
        return all(child.ready or child.ended for child in self.children)

    def have_met(self) -> bool:
        self.refuse_failed()
        return all(child.has_met() for child in self.children)

    def refuse_failed(self) -> None:
        """Raise RendezvousError for a rank that exited early."""
        for child in self.children:
            if child.has_failed():
                text = f"rank {child.rank} ({self.args.node}) ended"
                raise network_start.RendezvousError(f"{network_start.STOPPED}{text}")

    def has_unsent_exits(self) -> bool:
        """True while the head, or other nodes, have not yet learned that a rank exited."""
        return self.meeting.is_alive() and any(child.has_failed() for child in self.children)

    def on_signal(self, number: int, _frame: object) -> None:
        self.signal = number

    def watch(self) -> str:
        """Read from the ranks until all have exited, and the other nodes know of early exits;
        return the reason for an early end, if any.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ, discard_input)
            for child in self.children:
                for descriptor, reader in child.list_pipes():
                    selector.register(descriptor, selectors.EVENT_READ, reader)
            while len(selector.get_map()) > 1 or self.any_alive() or self.has_unsent_exits():
                remaining = self.started + self.args.deadline - time.monotonic()
                if remaining <= 0:
                    return f"the deadline of {self.args.deadline:.0f} s passed"
                if self.signal:
                    return f"ended by {signal.Signals(self.signal).name}"
                for key, _ in selector.select(min(remaining, 0.2)):
                    data = os.read(key.fd, 65536)
                    key.data(data)
                    if data:
                        continue
                    if key.fd == 0:
                        return "standard input closed: vlaunch no longer waits for the report"
                    selector.unregister(key.fd)
        return ""

    def any_alive(self) -> bool:
        return any(child.process and child.process.poll() is None for child in self.children)

    def kill_ranks(self) -> None:
        """Kill running ranks, and read their last output."""
        for child in self.children:
            if child.process is None:
                continue
            if child.process.poll() is None:
                child.process.kill()
                child.killed = True
            child.process.wait()
            for descriptor, reader in child.list_pipes():
                os.set_blocking(descriptor, False)
                try:
                    while data := os.read(descriptor, 65536):
                        reader(data)
                except BlockingIOError:
                    pass

    def pair_logs(self, folder: str) -> dict[str, str]:
        """Return NCCL's lines of each peer's measurement, from all ranks of this node."""
        logs: dict[str, str] = {}
        logged = [
            (child.process.pid, log)
            for child in self.children
            if child.process is not None
            for log in child.logged
        ]
        share = network_node.LOG_LIMIT // max(1, len(logged))
        for pid, log in logged:
            text = network_node.read_pair_log(folder, pid, log["start"], log["end"], share)
            logs[log["peer"]] = logs.get(log["peer"], "") + text
        return {peer: text for peer, text in logs.items() if text}

    def report(self) -> dict[str, Any]:
        """Return the fields of `Report`."""
        facts: dict[str, object] = next((child.facts for child in self.children if child.facts), {})
        return {
            "node": self.args.node,
            "backend": self.args.backend,
            "ranks": [child.report() for child in self.children],
            "transfers": collect_transfers(
                self.args,
                [
                    (child.local, child.transfers, explain_unmeasured(child, self.error))
                    for child in self.children
                ],
            ),
            "collective": worst_collective(
                [child.collective for child in self.children if child.collective]
            ),
            "rdma": network_node.active_rdma_ports(),
            "shared_switch": network_node.has_shared_switch(),
            "env": self.env,
            "gpu": facts.get("gpu", ""),
            "versions": facts.get("versions") or {},
            "infiniband": network_node.infiniband_devices(),
            "memlock": network_node.memlock_limit(),
            "seconds": round(time.monotonic() - self.started, 3),
            "error": self.error,
        }


def discard_input(_data: bytes) -> None:
    """Ignore data: only the end of standard input matters."""


def explain_unmeasured(child: RankChild, reason: str) -> str:
    """Return why a rank did not measure a pair: its error, else the probe's, and its phase."""
    cause = (
        reason
        if child.killed and not child.error
        else child.report()["error"] or reason or "this pair was not reached"
    )
    return f"rank {child.rank} in phase `{child.phase}`: {cause}"


def collect_transfers(
    args: argparse.Namespace, ranks: list[tuple[int, list[dict[str, Any]], str]]
) -> list[dict[str, Any]]:
    """Return each direction towards this node per rank: a measurement, or an error."""
    names = [entry.partition("=")[0] for entry in args.nodes.split(",")]
    results = []
    for local, measured, reason in ranks:
        results += measured
        measured_sources = {entry["source"] for entry in measured}
        results += [
            {"source": name, "target": args.node, "local_rank": local, "error": reason}
            for name in names
            if name != args.node and name not in measured_sources
        ]
    return results


def worst_collective(collectives: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the result for a node's ranks: a failure, else a wrong result, else the slowest."""
    order = sorted(
        collectives,
        key=lambda outcome: (
            not outcome.get("error"),
            outcome.get("correct", True),
            outcome.get("busbw") or 0.0,
        ),
    )
    return order[0] if order else None


def rank_environment(own: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the ranks' environment: NCCL logs to a file of its own per process."""
    return {
        **own,
        **network_node.cuda_compatibility(own),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET",
        "NCCL_DEBUG_FILE": os.path.join(folder, "nccl.%h.%p.log"),
        "PYTHONUNBUFFERED": "1",
        # A name server that does not answer would cost each connection of torch's store 10 s, and
        # the head's one all of them in turn (c10d, socket.cpp: `formatSockAddr`).
        "RES_OPTIONS": f"{own.get('RES_OPTIONS', '')} {QUICK_NAMES}".strip(),
    }


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument(
        "--nodes",
        required=True,
        help="name=ip,name=ip,… in the order of their ranks, the head first",
    )
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--master", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True)
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for everything")
    parser.add_argument(
        "--reach", type=float, default=60.0, help="seconds until the head's probe answers"
    )
    parser.add_argument(
        "--torch", type=float, default=180.0, help="seconds until all ranks have torch"
    )
    parser.add_argument(
        "--window", type=float, default=120.0, help="seconds after that for all ranks to meet"
    )
    parser.add_argument("--pair-timeout", type=float, default=20.0)
    parser.add_argument("--nonce", required=True)
    parser.add_argument(
        "--child",
        type=int,
        default=None,
        help="be this local rank (the probe's own use, as what follows)",
    )
    parser.add_argument("--events", type=int, default=-1)
    parser.add_argument("--listener", type=int, default=-1)
    parser.add_argument("--parent", type=int, default=0)
    return parser.parse_args(argv)


def main() -> int:
    args = parse_args(sys.argv[1:])
    if args.child is not None:
        import network_rank

        network_rank.exit_now(network_rank.main(args))
    certificate = json.loads(sys.stdin.readline())["certificate"]
    program = (sys.executable, os.path.abspath(sys.argv[0]))
    report = NodeProbe(args, program, sys.argv[1:], certificate).run()
    print(json.dumps(report), flush=True)
    return 0 if not report["error"] and all(rank["ended"] for rank in report["ranks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
