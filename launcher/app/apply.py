"""Plan × Transport → events.

One runner for every plan; what a step or a gate means is not known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from launcher.core.check import Finding, folded, worst
from launcher.core.domain import Answer, Argv, fold, natural
from launcher.core.errors import GateError, LockError, NodeError, VlaunchError
from launcher.core.events import Event, State
from launcher.core.plan import Gate, Plan, Stage, Step, in_waves
from launcher.core.transport import Recording, Transport, by_node
from launcher.tools import ray_judges as ray_checks
from launcher.tools import symptoms

_STATES: Mapping[str, State] = {
    "pass": "ok",
    "warn": "warn",
    "fail": "failed",
    "skip": "skip",
    "wait": "running",
}
_BAD = ("fail", "wait")


def apply(
    plan: Plan,
    transport: Transport,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Event]:
    """Run a plan stage by stage.

    A transport that records what changes a node has its record sent with the first command that
    changes it.

    Raises:
        NodeError: one or more nodes failed a step; the others finished theirs.
        GateError: a gate failed, or ran out of time.
        LockError: the transport may not be used any more; nothing was sent since, whatever
            `keep_going` says.
    """
    failed: list[VlaunchError] = []
    run = _Run(plan, transport, clock, sleep)
    for stage in plan.stages:
        try:
            yield from run.stage(stage)
        except (NodeError, GateError) as error:
            if not plan.keep_going or isinstance(error, LockError):
                raise
            failed.append(error)
    if failed:
        raise _all(failed)


class _Run:
    """A plan on its way; `_records` is what goes before the first step of each node."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._transport, self._clock, self._sleep = transport, clock, sleep
        self._keep_going = plan.keep_going
        self._records = _records(plan, transport)

    def stage(self, stage: Stage) -> Iterator[Event]:
        """Run a stage's steps, then see that its gates hold; raises what `apply` does."""
        began = self._clock()
        failed: list[VlaunchError] = []
        yield Event(kind="stage", stage=stage.id, text=stage.title, state="running")
        for wave in in_waves(stage.steps):
            try:
                yield from self._wave(stage, wave)
            except NodeError as error:
                if not self._keep_going or isinstance(error, LockError):
                    raise
                failed.append(error)
        for gate in stage.gates:
            yield from self._gate(stage, gate)
        if failed:
            raise _all(failed)
        took = self._clock() - began
        yield Event(kind="stage", stage=stage.id, text=stage.title, state="ok", seconds=took)

    def _wave(self, stage: Stage, wave: Sequence[Step]) -> Iterator[Event]:
        steps = {step.command.node: step for step in wave}
        for step in wave:
            yield Event(
                kind="step",
                stage=stage.id,
                node=step.command.node,
                text=step.title,
                state="running",
            )
        failed: list[Answer] = []
        sent = [
            replace(step.command, before=self._records.pop(step.command.node, ())) for step in wave
        ]
        for answer in self._transport.run(sent):
            yield Event(
                kind="step",
                stage=stage.id,
                node=answer.node,
                text=steps[answer.node].title,
                state="ok" if answer.ok else "failed",
                seconds=answer.seconds,
            )
            if not answer.ok:
                failed.append(answer)
        if failed:
            raise _step_error(steps, failed)

    def _gate(self, stage: Stage, gate: Gate) -> Iterator[Event]:
        began = self._clock()
        green_since: float | None = None
        said = ""
        if gate.doing:
            yield Event(kind="wait", stage=stage.id, text=gate.doing, state="running")
        while True:
            findings = gate.judge(by_node(self._transport, gate.ask))
            now, status = self._clock(), worst(findings)
            if status in ("pass", "skip", "warn"):
                green_since = now if green_since is None else green_since
                if now - green_since >= gate.hold:
                    yield from _report(stage, gate, findings, now - began)
                    return
            else:
                green_since = None
            if status == "fail" or (status == "wait" and now - began >= gate.deadline):
                raise _gate_error(gate, self._explained(gate, findings), findings)
            text = _awaited(gate, findings)
            yield Event(
                kind="wait",
                stage=stage.id,
                text=text,
                state="running" if text != said else "",
                seconds=now - began,
                deadline=gate.deadline,
            )
            said = text
            self._sleep(gate.every)

    def _explained(self, gate: Gate, findings: Sequence[Finding]) -> list[Finding]:
        """Return what is not so, with what the logs of its nodes say of it."""
        bad = {each.node for each in findings if each.status in _BAD}
        wanted = [command for command in gate.evidence if command.node in bad]
        logs = {answer.node: answer for answer in self._transport.run(wanted)} if wanted else {}
        said = folded(ray_checks.explain_logs(findings, logs))
        return [each for each in said if each.status in _BAD]


def _all(failed: Sequence[VlaunchError]) -> VlaunchError:
    """Return the first error with the stories of the others below it."""
    first, *others = failed
    if not others:
        return first
    lines = [first.evidence, *(line for each in others for line in (each.message, each.evidence))]
    hints = dict.fromkeys(line for each in failed for line in each.hint.splitlines())
    return GateError(
        first.message, evidence="\n".join(line for line in lines if line), hint="\n".join(hints)
    )


def _records(plan: Plan, transport: Transport) -> dict[str, Argv]:
    """Return what goes before the first step of each node; who sends it takes it out."""
    if not plan.steps or not isinstance(transport, Recording):
        return {}
    changes: dict[str, list[str]] = {}
    for step in plan.steps:
        changes.setdefault(step.command.node, []).append(step.title)
    return dict(transport.record(plan.verb, changes))


def _step_error(steps: Mapping[str, Step], failed: Sequence[Answer]) -> NodeError:
    failed = sorted(failed, key=lambda answer: natural(answer.node))
    first = failed[0]
    title = steps[first.node].title
    same = [each.node for each in failed if steps[each.node].title == title]
    known = symptoms.first(first.err + "\n" + first.out)
    how = _how(first, steps[first.node])
    others = [
        f"{each.node}: {each.tail}"
        if each.node in same
        else f"{each.node}: {steps[each.node].title} failed: {each.tail}"
        for each in failed
        if each.node not in same or each.tail != first.tail
    ]
    return NodeError(
        fold(same),
        f"{title} failed ({known.cause if known else how})",
        evidence=[first.tail or how, *others],
        hint=known.fix
        if known
        else "look at every node: `vlaunch doctor`; `--verbose` shows what was sent",
    )


def _how(answer: Answer, step: Step) -> str:
    if answer.timed_out:
        return f"did not end within {step.command.timeout:.0f}s"
    return f"exit {answer.code}"


def _awaited(gate: Gate, findings: Sequence[Finding]) -> str:
    """Say what a gate waits for: for what is not so yet, or, where all is well, to see it last."""
    waiting = [_line(each) for each in folded(findings) if each.status == "wait"]
    return "; ".join(waiting) or f"{gate.what}; seeing that it lasts"


def _line(finding: Finding) -> str:
    return f"{finding.node}: {finding.text}" if finding.node else finding.text


def _report(
    stage: Stage, gate: Gate, findings: Sequence[Finding], seconds: float
) -> Iterator[Event]:
    for each in folded(findings):
        yield Event(
            kind="finding",
            stage=stage.id,
            node=each.node,
            text=each.text or gate.what,
            state=_STATES[each.status],
            seconds=seconds,
            data={"check": gate.id, **({"fix": each.fix} if each.fix else {})},
        )


def _gate_error(gate: Gate, explained: Sequence[Finding], findings: Sequence[Finding]) -> GateError:
    late = f" within {gate.deadline:.0f}s" if gate.deadline and worst(findings) == "wait" else ""
    where = [_line(each) for each in explained]
    evidence = [line for each in explained for line in each.evidence.splitlines()]
    hint = "\n".join(dict.fromkeys(each.fix for each in explained if each.fix))
    if len(where) == 1:
        return GateError(f"{where[0]}{late}", evidence=evidence, hint=hint)
    return GateError(f"not true{late}: {gate.what}", evidence=[*where, *evidence], hint=hint)
