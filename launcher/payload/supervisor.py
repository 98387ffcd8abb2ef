"""Keeps one server running: a Ray job on the head that starts vLLM, knows ready from dead, and starts it again.

`supervisor.py run --job ID [--again]` is what Ray runs; `supervisor.py boot` runs beside a head that has just started, and
hands the server to Ray again that was wanted before; `supervisor.py watch` goes on there, and does so when a supervisor died.
All find what is wanted in `wanted.json` (`record.py`) and write down how it goes in `server.json`. Standard library only.

How soon a dead server is noticed, with a canary every 5 s and 8 s for its answer:
- vLLM's own process ended: 0.5 s.
- A rank's process died: Ray knows at once; a node's container: after 5 s (`plan/containers.py` sets Ray's own looks). Its
  records are read before every canary and each second while one is on its way: within 10 s. Mostly the engine notices
  sooner, and its process ends, or its API answers a canary with EngineDeadError: within 5 s.
- A node that swallows packets: Ray takes it for dead after a minute, unless the next rule does before.
- Nothing died, and nothing is answered (a GPU that hangs): canaries come back late, and vLLM's counters do not move. A
  late canary alone means nothing, for the server may be busy, and nor do counters that stand still for a moment, for one
  long step, or a kernel that is compiled late, stops all. Both for `STUCK` seconds mean death. Replicas are asked in turn, and
  one that hangs is judged by its own answers and counters; with n of them its turn may come n canaries later.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import head
import record
from supervisor_boot import boot, say, watch
from supervisor_look import SILENT, Canary, Counters, Fault, Look, Still, beside, gpus

STUCK = 30.0  # seconds without an answer and without any movement of the counters
_SLOW = 2.0  # seconds after which a canary makes us look at the counters
_POLL = 0.5
_ODD = 3  # answers in a row that are no answers, until they mean death
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class Stopped(BaseException):
    """Somebody asks the supervisor to end: raised wherever it waits."""


class Supervisor:
    """Runs one server until it is stopped, cannot be started, or has used up its restarts. `again`: it has answered before."""

    def __init__(self, wanted: dict[str, Any], job: str, *, again: bool = False) -> None:
        self.wanted, self.job, self.again = wanted, job, again
        self.look, self.record = Look(wanted, job), record.Record(wanted, job)
        policy = wanted.get("policy") or {}
        self.every, self.timeout = float(policy.get("canary", 5)), float(policy.get("timeout", 8))
        self.stuck = float(policy.get("stuck", STUCK))
        self.grace, self.deadline = float(policy.get("grace", 5)), float(policy.get("start_timeout", 1800))
        self.child: subprocess.Popen[bytes] | None = None
        self.offset = 0  # where the log of the present engine begins
        self.in_flight: int | None = None
        self.odd, self.asked = 0, 0
        self.still = Still(self.timeout, self.stuck)

    def run(self) -> int:
        """Supervise, and return the exit code of the job."""
        if self.again:
            self.anew()
        while True:
            self.start()
            fault = self.until_ready()
            if fault is None:
                self.again = True
                with contextlib.suppress(OSError):
                    record.answered(self.wanted)
                self.record.ready()
                say("the server answers")
                fault = self.while_ready()
            if not self.again:
                return self.never_answered(fault)
            say(f"{fault.what}{f' (rank {fault.rank} on {fault.node})' if fault.node else ''}")
            self.record.fault(
                fault.what, node=fault.node, rank=fault.rank, evidence=fault.evidence, in_flight=self.in_flight
            )  # fmt: skip
            self.record.set("recovering", "ending what is left of the engine")
            self.end_engine()
            self.record.reached("stopped")
            if record.wants(self.wanted) and not self.record.said["restarts_left"]:
                return self.give_up(fault)
            if not self.wait_for_cluster():
                self.record.set("stopped", "it is not wanted any more")
                return 0
            self.record.reached("whole")
            self.record.may_restart()  # one was left, and meanwhile none was taken
            self.anew()

    def anew(self) -> None:
        """Say in the log that what is above is of another engine, also that of a supervisor that was killed or switched off."""
        used = self.record.most - self.record.said["restarts_left"]
        say(f"{head.AGAIN} (restart {used} of {self.record.most} in {self.record.window:g}s)")

    def start(self) -> None:
        """Start vLLM in a process group of its own; it gets a signal to end should this process be killed."""
        self.record.set("recovering" if self.again else "starting", "starting the engine")
        self.offset, self.in_flight, self.odd = self.look.log_size(), None, 0
        self.still = Still(self.timeout, self.stuck)
        self.look.ranks = {}
        environment = {**os.environ, **self.wanted.get("env", {}), "VLAUNCH_JOB": self.job}
        # `_die_with_us` is one system call: no other thread's lock can stop it.
        self.child = subprocess.Popen(
            self.wanted["argv"],
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_us,  # noqa: PLW1509
        )
        if self.again:
            self.record.reached("started")

    def until_ready(self) -> Fault | None:
        """Wait for the first answer. The first start of all has no deadline, as without a supervisor; later ones have."""
        began = looked = time.monotonic()
        while not self.look.answers():
            self.pause(min(1.0, self.every))
            if ended := self.ended(" before its first answer"):
                return ended
            now = time.monotonic()
            if self.again and now - began >= self.deadline:
                return Fault(f"no answer within {self.deadline:g}s of a restart", evidence=self.look.log_since(self.offset))
            if self.again and now - looked >= self.every:
                looked = now
                if gone := self.left():
                    return gone
        with contextlib.suppress(*SILENT):
            self.look.meet()
        return None

    def left(self) -> Fault | None:
        """Return the fault of a node that went away while vLLM starts, which would wait for it for half an hour."""
        try:
            table = self.look.nodes()
            brought = gpus([row for row in table.values() if row["state"] == "ALIVE"])
            gone = next((ip for ip in self.look.missed(brought) if ip not in brought), "")
        except SILENT:
            return None
        why = str((table.get(gone) or {}).get("state_message") or "")
        return Fault("a node left Ray while the engine started", node=gone, evidence=why) if gone else None

    def while_ready(self) -> Fault:
        """Look again and again, until there is a fault."""
        while True:
            fault = self.tick()
            if fault is not None:
                return fault
            if not self.still.since:
                self.pause(self.every)

    def tick(self) -> Fault | None:
        """Look once: at the process, at Ray's records, and with a canary."""
        fault = self.ended() or self.dead_rank()
        if fault is not None:
            return fault
        replica = self.asked % self.look.replicas if self.look.replicas > 1 else None
        self.asked += 1
        canary, before = Canary(self.look, self.timeout, replica), None
        while canary.is_alive():
            canary.join(min(_POLL, self.timeout / 8))
            if not canary.is_alive():
                break
            if fault := self.ended() or (self.dead_rank() if time.monotonic() - canary.began >= 1 else None):
                return fault
            if before is None and time.monotonic() - canary.began >= min(_SLOW, self.timeout / 2):
                before = self.look.counters()
        return self.judged(canary, before)

    def judged(self, canary: Canary, before: Counters | None) -> Fault | None:
        """Judge what became of a canary."""
        if canary.late:
            return self.late(canary.replica, before)
        self.still.answered(canary.replica)
        if 0 < canary.status < 500:  # also a refusal is an answer: the API key may have changed
            self.odd = 0
            now = self.look.counters()
            self.in_flight = now.in_flight if now else None
            self.doubt(self.still.said)
            self.record.alive(canary.seconds, self.in_flight)
            if not self.look.ranks:
                with contextlib.suppress(*SILENT):
                    self.look.meet()
            return None
        self.odd += 1
        what = f"its API answers {canary.status}" if canary.status else "its API does not answer"
        closed = canary.status == 0 and "refused" in canary.said
        if closed or "EngineDead" in canary.said or self.look.health() == 503 or self.odd >= _ODD:
            return self.explained(Fault(what, evidence=canary.said[:300]))
        return self.tick_again()

    def tick_again(self) -> Fault | None:
        """Ask once more without waiting for the next turn."""
        self.pause(min(1.0, self.every))
        return self.tick()

    def late(self, replica: int | None, before: Counters | None) -> Fault | None:
        """Judge a server whose canary did not come back in time: busy, or dead."""
        after = self.look.counters()
        self.still.late(replica, before, after)
        if after is not None and not self.still.since:
            self.in_flight = after.in_flight
        if not self.still.dead:
            self.doubt(self.still.said)
            return None
        fault, replica = self.explained(Fault(self.still.said)), self.still.longest[1]
        return fault if fault.rank or replica is None else replace(fault, node=self.look.home(replica), rank=f"DP{replica}")

    def doubt(self, why: str) -> None:
        """Write down why a server that is ready may not be; empty when nothing speaks against it."""
        if why != self.record.said["doing"]:
            self.record.set("ready", why)

    def ended(self, when: str = "") -> Fault | None:
        """Return the fault of a vLLM whose process has ended."""
        code = self.child.poll() if self.child else None
        if code is None:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return self.explained(Fault(f"vLLM {how}{when}"))

    def dead_rank(self) -> Fault | None:
        """Return the fault that Ray knows of; a dashboard that does not answer has not said anything."""
        try:
            found = self.look.dead() if self.look.ranks else None
        except SILENT:
            return None
        # The engine ends its ranks itself when it dies first; then its log says why.
        return found and (self.ended() or (found if found.rank else self.explained(found)))

    def explained(self, fault: Fault) -> Fault:
        """Add which rank is to blame, and what the log says."""
        log = self.look.log_since(self.offset)
        told = Fault(fault.what, fault.node, fault.rank, "\n".join(each for each in (fault.evidence, log) if each))
        return beside(told, (self.look.culprit() or self.look.accused(log)) if self.look.ranks else None)

    def wait_for_cluster(self) -> bool:
        """Wait until all is there that a start needs, twice in a row and however long it takes; False when it is not wanted."""
        self.look.steady = 0
        while True:
            if not record.wants(self.wanted):
                return False
            try:
                doing = self.look.lacking()
            except SILENT:
                doing = "waiting for Ray's dashboard to answer"
            self.record.set("recovering", doing or "the cluster has what it needs again")
            if self.look.steady == 2:
                return True
            time.sleep(min(1.0, self.every))

    def end_engine(self) -> None:
        """End vLLM politely, then by force, and everything of this job that it may have left on this node."""
        if self.child is None:
            return
        self.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + self.grace
        while (self.child.poll() is None or self.others()) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.signal_group(signal.SIGKILL)
        for pid in self.others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(10)

    def signal_group(self, which: signal.Signals) -> None:
        """Send a signal to vLLM and what it started."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child.pid, which)

    def others(self) -> list[int]:
        """Return the processes of this job but for this one."""
        return [pid for pid in head.processes(self.job) if pid != os.getpid()]

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than vLLM's process lives."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and (self.child is None or self.child.poll() is None):
            time.sleep(min(_POLL, left))

    def never_answered(self, fault: Fault) -> int:
        """End as an unsupervised server does that cannot start: what is wrong with it another start would not mend."""
        self.end_engine()
        record.forget(self.wanted)
        self.record.fault(fault.what, evidence=fault.evidence)
        self.record.set("stopped", f"it never answered: {fault.what}")
        code = self.child.returncode if self.child else 1
        return 128 - code if code < 0 else code or 1

    def give_up(self, fault: Fault) -> int:
        """Say loudly that no restart is left, and why the last one was needed."""
        hours = f"{self.record.window / 3600:g} h" if self.record.window >= 3600 else f"{self.record.window:g} s"
        reason = f"no restart is left of {self.record.most} in {hours}; the last fault: {fault.what}"
        self.record.set("gave-up", reason)
        record.forget(self.wanted)
        say(f"GIVING UP: {reason}")
        for line in fault.evidence.splitlines():
            say(f"  {line}")
        return 1

    def stop(self) -> int:
        """End because somebody asked for it. Ray gives this process 3 s, vLLM has its signal before."""
        self.record.set("stopped", "stopped")
        say("stopped; ending the engine")
        self.end_engine()
        return 143


def _die_with_us() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise Stopped


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("run", "boot", "watch"))
    parser.add_argument("--job", default="")
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    if args.verb == "boot":
        return boot()
    if args.verb == "watch":
        watch()
    wanted = record.read(record.WANTED)
    if not wanted:
        say(f"there is no {record.WANTED} in {record.FOLDER}: nobody wants a server")
        return 1
    supervisor = Supervisor(wanted, args.job, again=args.again)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        return supervisor.run()
    except (FileNotFoundError, PermissionError) as error:  # as a shell says it of a program that is not there
        supervisor.record.set("stopped", f"{error.filename}: {error.strerror}")
        say(supervisor.record.said["doing"])
        record.forget(wanted)
        return 127
    except Stopped:
        supervisor.signal_group(signal.SIGTERM)
        return supervisor.stop()


if __name__ == "__main__":
    sys.exit(main())
