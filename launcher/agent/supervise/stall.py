"""State of an engine in which no step ends: quiet first, then suspect, with the place of the hang.

It decides nothing: `supervisor.py` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..desired import Desired
from ..health import verdicts
from ..health.verdicts import Clock, Wait
from ..link.leader import Leader
from ..observed import Wedge
from ..processes.blame import Inspections, StallFinding
from ..processes.ray_view import RayRank
from .faults import DeathSign

_RECENT = 10.0  # seconds for which evidence holds after the last wait: counters may move at a death
_MOST = 32  # different stacks, and observations, in a record
_WIDTH = 2500  # characters of one


class Stall:
    """Comparison of samples of one engine's ranks while it is quiet.

    `verdict` is quiet, suspect or empty, `wedge` the place of the hang by the newest samples;
    `seconds` is the time without an ended step.
    """

    def __init__(self, name: str, spec: Desired, lead: Leader, clock: Clock) -> None:
        self.name, self.spec, self.lead, self.clock = name, spec, lead, clock
        self.verdict, self.reason, self.seconds = "", "", 0.0
        self.wedge: Wedge | None = None
        self._evidence: Wedge | None = None  # the last wedge; a death may end the samples first
        self._inspections = Inspections()
        self._quiet = float("-inf")  # when it was quiet last

    def tick(self, waits: Sequence[Wait], longest: float, ranks: Sequence[RayRank]) -> None:
        """Judge the time without an ended step; `longest` is the server's longest step so far."""
        quiet = [wait for wait in waits if verdicts.is_quiet(wait.seconds, longest)]
        now = self.clock.monotonic()
        if not quiet:
            self.verdict, self.reason, self.wedge = "", "", None
            self._inspections = Inspections()
            return
        if now - self._quiet > _RECENT:
            self._evidence = None
        self._quiet = now
        worst = max(quiet, key=lambda wait: wait.seconds)
        self.seconds = worst.seconds
        # Replicas of a mixture of experts compute together: then all wait for one rank.
        all_of = len(quiet) >= self.spec.replicas
        replica = None if all_of else worst.replica
        holders = self._ranks(ranks, replica)
        for node in holders:  # the sample of a node that cannot be queried proves nothing
            fresh = self.lead.is_reporting(node)
            sample = self.lead.report(node, self.name).inspection if fresh else None
            self._inspections.add_sample(node, sample)
        finding = self._inspections.compare_newest(holders, replica=replica)
        self.wedge = None
        suffix = "" if replica is None else f" of replica {replica}"
        self.verdict, self.reason = "quiet", f"no step{suffix} has ended for {self.seconds:.0f} s"
        if finding.progress is False:
            self.wedge = self._evidence = _make_wedge(finding, self.clock.time() - self.seconds)
            self.reason += f": {self.wedge.location}"
            if verdicts.is_suspect(self.seconds, longest):
                self.verdict = "suspect"
        elif finding.progress is None:
            self.reason = "; ".join((self.reason, *finding.observations[:1]))
        else:
            self._evidence = None

    def _ranks(self, ranks: Sequence[RayRank], replica: int | None) -> dict[str, dict[int, str]]:
        """Return the nodes that run ranks, with Ray's ranks by PID."""
        placed: dict[str, dict[int, str]] = {}
        for rank in ranks:
            if replica is None or f"DP{replica}" in rank.name.split():
                placed.setdefault(rank.node, {})[rank.pid] = rank.name
        if self.spec.backend == "ray":
            return placed
        return {
            process.node: {}
            for process in self.spec.processes
            if replica is None or replica in range(process.replicas[0], sum(process.replicas))
        }

    def attribute_death(self, sign: DeathSign) -> DeathSign:
        """Attribute a death to the rank that hung before, by the evidence of a hang: the processes
        of a hung engine exit in any order.

        A process killed for lack of memory, or a node that is certainly gone, is a cause of its
        own.
        """
        recent = self.clock.monotonic() - self._quiet <= _RECENT
        text = f"{sign.what} {sign.cause}".lower()
        memory = any(marker in text for marker in ("sigkill", "out of memory", "outofmemory"))
        if not recent or memory or sign.certain:
            return sign
        wedge = self._evidence or Wedge(since=0.0)
        away = [node for node in self.spec.nodes if not self.lead.is_reporting(node)]
        place = f"{', '.join(away)} cannot be reached" if away and not wedge.rank else wedge.details
        evidence = (f"then: {sign.what}", *wedge.observations, *wedge.stacks, sign.evidence)
        return replace(
            sign,
            what=f"no step had ended for {self.seconds:.0f} s: {place}",
            node=wedge.node,
            rank=wedge.rank,
            evidence="\n".join(filter(None, evidence)),
        )


def _make_wedge(finding: StallFinding, since: float) -> Wedge:
    return Wedge(
        since=since,
        rank=finding.rank,
        node=finding.node,
        gpu=finding.gpu,
        frame=finding.frame,
        observations=[text[:_WIDTH] for text in finding.observations[:_MOST]],
        stacks=[stack[:_WIDTH] for stack in finding.stacks[:_MOST]],
    )
