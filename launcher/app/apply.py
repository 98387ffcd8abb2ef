"""Plan × Transport → events.

One runner for every plan, without knowledge of its steps and gates.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from launcher.core.check import Finding, fold_findings, worst_status
from launcher.core.domain import Answer, Argv, fold, natural_key
from launcher.core.errors import GateError, LockError, NodeError, RequestError, VlaunchError
from launcher.core.events import Event, State
from launcher.core.plan import Gate, Plan, Stage, Step, split_waves
from launcher.core.transport import RecordingTransport, Transport, run_by_node
from launcher.failures.explain import explain

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

    A transport that records changes sends a node's record with the first command that changes it.

    Raises:
        NodeError: one or more nodes failed a step; the others finished theirs.
        GateError: a gate failed, or ran out of time.
        RequestError: a gate rejected the request.
        LockError: the transport is unusable; nothing was sent since, even with `keep_going`.
    """
    failed: list[VlaunchError] = []
    run = _PlanRun(plan, transport, clock, sleep)
    for stage in plan.stages:
        try:
            yield from run.run_stage(stage)
        except (NodeError, GateError) as error:
            if not plan.keep_going or isinstance(error, LockError):
                raise
            failed.append(error)
    if failed:
        raise _combine_errors(failed)


class _PlanRun:
    """Run of a plan; `_records` has the prefix of each node's first step."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._transport, self._clock, self._sleep = transport, clock, sleep
        self._keep_going = plan.keep_going
        self._records = _audit_prefixes(plan, transport)

    def run_stage(self, stage: Stage) -> Iterator[Event]:
        """Run a stage's steps, then wait for its gates; raises like `apply`."""
        began = self._clock()
        failed: list[VlaunchError] = []
        yield Event(kind="stage", stage=stage.id, text=stage.title, state="running")
        for wave in split_waves(stage.steps):
            try:
                yield from self._run_wave(stage, wave)
            except NodeError as error:
                if not self._keep_going or isinstance(error, LockError):
                    raise
                failed.append(error)
        for gate in stage.gates:
            yield from self._await_gate(stage, gate)
        if failed:
            raise _combine_errors(failed)
        took = self._clock() - began
        yield Event(kind="stage", stage=stage.id, text=stage.title, state="ok", seconds=took)

    def _run_wave(self, stage: Stage, wave: Sequence[Step]) -> Iterator[Event]:
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
            replace(step.command, preamble=self._records.pop(step.command.node, ()))
            for step in wave
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

    def _await_gate(self, stage: Stage, gate: Gate) -> Iterator[Event]:
        began = self._clock()
        holding_since: float | None = None
        if gate.progress_text:
            yield Event(kind="wait", stage=stage.id, text=gate.progress_text)
        while True:
            findings = gate.judge(run_by_node(self._transport, gate.queries))
            now, status = self._clock(), worst_status(findings)
            if status in ("pass", "skip", "warn"):
                holding_since = now if holding_since is None else holding_since
                if now - holding_since >= gate.hold:
                    yield from _report_findings(stage, gate, findings, now - began)
                    return
            else:
                holding_since = None
            if status == "fail" or (status == "wait" and now - began >= gate.deadline):
                raise _gate_error(gate, self._explain(gate, findings), findings)
            yield Event(
                kind="wait",
                stage=stage.id,
                text=_describe_wait(gate, findings),
                seconds=now - began,
                deadline=gate.deadline,
            )
            self._sleep(gate.every)

    def _explain(self, gate: Gate, findings: Sequence[Finding]) -> list[Finding]:
        """Return the unmet findings, with evidence from their nodes."""
        bad = {finding.node for finding in findings if finding.status in _BAD}
        commands = [command for command in gate.evidence if command.node in bad]
        if gate.explain is not None and commands:
            answers = {answer.node: answer for answer in self._transport.run(commands)}
            findings = gate.explain(findings, answers)
        return [finding for finding in fold_findings(findings) if finding.status in _BAD]


def _combine_errors(failed: Sequence[VlaunchError]) -> VlaunchError:
    """Return the first error with the others as evidence."""
    first, *others = failed
    if not others:
        return first
    lines = [
        first.evidence,
        *(line for error in others for line in (error.message, error.evidence)),
    ]
    hints = dict.fromkeys(line for error in failed for line in error.hint.splitlines())
    return GateError(
        first.message, evidence="\n".join(line for line in lines if line), hint="\n".join(hints)
    )


def _audit_prefixes(plan: Plan, transport: Transport) -> dict[str, Argv]:
    """Return the audit prefix of each node's first step; the sender removes it."""
    if not plan.steps or not isinstance(transport, RecordingTransport):
        return {}
    changes: dict[str, list[str]] = {}
    for step in plan.steps:
        changes.setdefault(step.command.node, []).append(step.title)
    return dict(transport.record(plan.verb, changes))


def _step_error(steps: Mapping[str, Step], failed: Sequence[Answer]) -> NodeError:
    failed = sorted(failed, key=lambda answer: natural_key(answer.node))
    first = failed[0]
    title = steps[first.node].title
    same = [answer.node for answer in failed if steps[answer.node].title == title]
    failure = explain(first.err + "\n" + first.out)
    outcome = _describe_failure(first, steps[first.node])
    others = [
        f"{answer.node}: {answer.tail}"
        if answer.node in same
        else f"{answer.node}: {steps[answer.node].title} failed: {answer.tail}"
        for answer in failed
        if answer.node not in same or answer.tail != first.tail
    ]
    return NodeError(
        fold(same),
        f"{title} failed ({failure.cause if failure else outcome})",
        evidence=[first.tail or outcome, *others],
        hint=failure.fix
        if failure
        else "run `vlaunch doctor`; `--verbose` shows the remote commands",
    )


def _describe_failure(answer: Answer, step: Step) -> str:
    if answer.timed_out:
        return f"timed out after {step.command.timeout:.0f}s"
    return f"exit {answer.code}"


def _describe_wait(gate: Gate, findings: Sequence[Finding]) -> str:
    """Describe the wait of a gate: the unmet findings, or that they are met and must last."""
    waiting = [
        _finding_line(finding) for finding in fold_findings(findings) if finding.status == "wait"
    ]
    return "; ".join(waiting) or f"{gate.what}; waiting for it to stay true"


def _finding_line(finding: Finding) -> str:
    return f"{finding.node}: {finding.text}" if finding.node else finding.text


def _report_findings(
    stage: Stage, gate: Gate, findings: Sequence[Finding], seconds: float
) -> Iterator[Event]:
    for finding in fold_findings(findings):
        yield Event(
            kind="finding",
            stage=stage.id,
            node=finding.node,
            text=finding.text or gate.what,
            state=_STATES[finding.status],
            seconds=seconds,
            data={"check": gate.id, **({"fix": finding.fix} if finding.fix else {})},
        )


def _gate_error(
    gate: Gate, explained: Sequence[Finding], findings: Sequence[Finding]
) -> VlaunchError:
    kind = RequestError if gate.rejects_request else GateError
    late = ""
    if gate.deadline and worst_status(findings) == "wait":
        late = f"timed out after {gate.deadline:.0f}s"
    lines = [_finding_line(finding) for finding in explained]
    evidence = [line for finding in explained for line in finding.evidence.splitlines()]
    hint = "\n".join(dict.fromkeys(finding.fix for finding in explained if finding.fix))
    if len(lines) == 1:
        text = f"{late}: {lines[0]}" if late else lines[0]
        return kind(text, evidence=evidence, hint=hint)
    failed = f"{late} waiting for" if late else "check failed"
    return kind(f"{failed}: {gate.what}", evidence=[*lines, *evidence], hint=hint)
