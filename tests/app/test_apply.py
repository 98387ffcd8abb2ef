"""The runner of plans: waves, gates, waits, and reports of failures."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import pytest

from launcher.app.apply import apply
from launcher.core.check import Finding, Status
from launcher.core.domain import Answer, Argv
from launcher.core.errors import GateError, LockError, NodeError
from launcher.core.events import Event
from launcher.core.plan import Gate, Plan, Stage, Step
from launcher.core.transport import Answers, Command
from launcher.tools.site import ray_judges
from tests.fakes import FakeTransport


class Clock:
    """A clock that advances only in sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


def step(node: str, title: str = "starting", label: str = "run") -> Step:
    return Step(title=title, command=Command(node=node, argv=(label, node), timeout=30))


def plan(*stages: Stage) -> Plan:
    return Plan(verb="up", stages=stages)


def stage(*steps: Step, gates: tuple[Gate, ...] = (), id_: str = "s") -> Stage:
    return Stage(id=id_, title=f"Stage {id_}", steps=steps, gates=gates)


def good(command: Command) -> Answer:
    return Answer(node=command.node, code=0, seconds=0.5)


def statuses(*args: Status | Sequence[Finding]) -> Callable[[Answers], Sequence[Finding]]:
    """Return a judge with a sequence of results; the last one repeats."""
    rest = list(args)

    def judge(_: Answers) -> Sequence[Finding]:
        now = rest.pop(0) if len(rest) > 1 else rest[0]
        return (
            [Finding(node="gpu01", status=now, text=f"it is {now}", fix="mend it")]
            if isinstance(now, str)
            else now
        )

    return judge


def run(
    what: Plan, transport: FakeTransport | None = None, clock: Clock | None = None
) -> list[Event]:
    clock = clock or Clock()
    return list(apply(what, transport or FakeTransport(good), clock=clock, sleep=clock.sleep))


def test_stages_steps_and_gates_are_reported_in_order() -> None:
    """Starts, ends and durations; a stage ends when its gates pass."""
    events = run(
        plan(stage(step("a"), gates=(Gate(id="g", what="it holds", judge=statuses("pass")),)))
    )

    assert [(event.kind, event.node, event.state) for event in events] == [
        ("stage", "", "running"),
        ("step", "a", "running"),
        ("step", "a", "ok"),
        ("finding", "gpu01", "ok"),
        ("stage", "", "ok"),
    ]
    assert events[2].seconds == 0.5
    assert events[3].data == {"check": "g", "fix": "mend it"}


def test_steps_of_one_node_run_in_sequence() -> None:
    """Two steps for one node are two waves; a wave is sent as one batch."""
    sizes: list[list[str]] = []

    class Batches(FakeTransport):
        def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
            sizes.append([command.argv[0] for command in commands])
            return super().run(commands)

    run(
        plan(stage(step("a", label="rm"), step("a", label="run"), step("b", label="rm"))),
        Batches(good),
    )

    assert sizes == [["rm", "rm"], ["run"]]


def test_a_failing_step_stops_later_waves() -> None:
    """The other steps of its wave finish; the second wave, gates and later stages are not sent."""
    transport = FakeTransport(
        lambda c: Answer(node=c.node, code=1, err="boom") if c.node == "a" else good(c)
    )
    what = plan(stage(step("a"), step("b"), step("b", label="next")), stage(step("c"), id_="t"))
    events = []
    with pytest.raises(NodeError) as caught:
        for event in apply(what, transport):
            events.append(event)

    assert [(command.node, command.argv[0]) for command in transport.commands] == [
        ("a", "run"),
        ("b", "run"),
    ]
    assert [
        (item.node, item.state)
        for item in events
        if item.kind == "step" and item.state != "running"
    ] == [
        ("a", "failed"),
        ("b", "ok"),
    ]
    assert caught.value.message == "a: starting failed (exit 1)"
    assert caught.value.evidence == "boom"


def test_equal_failures_are_merged() -> None:
    """With the evidence once."""
    with pytest.raises(NodeError) as caught:
        run(
            plan(stage(*(step(f"gpu0{n}") for n in (1, 2, 3)))),
            FakeTransport(lambda c: Answer(node=c.node, code=1, err="no space left on device")),
        )

    assert caught.value.node == "gpu[01-03]"
    assert caught.value.message == "gpu[01-03]: starting failed (a disk is full, or /dev/shm)"
    assert caught.value.evidence == "no space left on device"
    assert "docker system df`" in caught.value.hint


def test_nodes_are_named_in_the_plans_order() -> None:
    """The same failure has the same message every time."""

    class Backwards(FakeTransport):
        def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
            return super().run(list(reversed(commands)))

    with pytest.raises(NodeError) as caught:
        run(
            plan(stage(step("gpu01"), step("gpu02"))),
            Backwards(lambda c: Answer(node=c.node, code=1, err="no")),
        )

    assert caught.value.node == "gpu[01-02]"


def test_all_failed_nodes_are_named() -> None:
    """Even with the same error in different steps."""
    with pytest.raises(NodeError) as caught:
        run(
            plan(stage(step("a", "writing"), step("b", "starting"))),
            FakeTransport(lambda c: Answer(node=c.node, code=1, err="boom")),
        )

    assert "writing failed" in caught.value.message
    assert "b: " in f"{caught.value.message}\n{caught.value.evidence}"


def test_evidence_is_separate_per_node() -> None:
    """Complete for the first node, with names for the others."""
    with pytest.raises(NodeError) as caught:
        run(
            plan(stage(step("a"), step("b"))),
            FakeTransport(lambda c: Answer(node=c.node, code=1, err=f"boom {c.node}")),
        )

    assert caught.value.evidence == "boom a\nb: boom b"


def test_a_timeout_is_reported_with_its_limit() -> None:
    """And not as exit code 124."""
    with pytest.raises(NodeError) as caught:
        run(
            plan(stage(step("a"))),
            FakeTransport(lambda c: Answer(node=c.node, code=124, timed_out=True)),
        )

    assert caught.value.message == "a: starting failed (timed out after 30s)"
    assert caught.value.evidence


def test_a_gate_is_repeated_until_it_passes() -> None:
    """Every `every` seconds."""
    clock = Clock()
    gate = Gate(
        id="g", what="it holds", judge=statuses("wait", "wait", "pass"), deadline=10, every=2
    )
    waits = [
        event for event in run(plan(stage(gates=(gate,))), clock=clock) if event.kind == "wait"
    ]

    assert clock.naps == [2, 2]
    assert [(wait.text, wait.seconds, wait.deadline) for wait in waits] == [
        ("gpu01: it is wait", 0, 10),
        ("gpu01: it is wait", 2, 10),
    ]


def test_a_late_gate_fails_with_its_reason() -> None:
    """After its deadline and one last query, not before."""
    clock = Clock()
    gate = Gate(id="g", what="it holds", judge=statuses("wait"), deadline=10, every=3)
    with pytest.raises(GateError) as caught:
        run(plan(stage(gates=(gate,))), clock=clock)

    assert clock.now == 12
    assert caught.value.message == "timed out after 10s: gpu01: it is wait"
    assert caught.value.hint == "mend it"


def test_a_failure_ends_the_wait_at_once() -> None:
    """A longer wait would be useless."""
    clock = Clock()
    gate = Gate(id="g", what="it holds", judge=statuses("wait", "fail"), deadline=100)
    with pytest.raises(GateError) as caught:
        run(plan(stage(gates=(gate,))), clock=clock)

    assert clock.naps == [1]
    assert caught.value.message == "gpu01: it is fail"


def test_a_pass_must_last() -> None:
    """A flapping node restarts the hold time."""
    clock = Clock()
    gate = Gate(
        id="g", what="it holds", judge=statuses("pass", "wait", "pass"), deadline=60, hold=3
    )
    events = run(plan(stage(gates=(gate,))), clock=clock)

    assert clock.now == 5
    assert (
        "waiting for it to stay true"
        in [event for event in events if event.kind == "wait"][-1].text
    )


def test_a_flapping_gate_ends_at_its_deadline() -> None:
    """It neither passes for long enough nor fails."""
    clock = Clock()
    flicker = iter(range(1000))

    def judge(_: Answers) -> Sequence[Finding]:
        return [
            Finding(node="a", status="pass" if next(flicker) % 2 else "wait", text="in and out")
        ]

    with pytest.raises(GateError):
        run(
            plan(stage(gates=(Gate(id="g", what="it holds", judge=judge, deadline=10, hold=3),))),
            clock=clock,
        )

    assert clock.now <= 12


@pytest.mark.parametrize(("status", "state"), [("warn", "warn"), ("skip", "skip"), ("pass", "ok")])
def test_warnings_and_skips_are_reported_and_do_not_stop_a_plan(status: Status, state: str) -> None:
    """None of them is silent."""
    events = run(plan(stage(gates=(Gate(id="g", what="it holds", judge=statuses(status)),))))

    assert [event.state for event in events if event.kind == "finding"] == [state]


def test_a_pass_without_text_has_the_gates_title() -> None:
    """With the nodes folded."""
    results = [Finding(node=name, status="pass", text="") for name in ("gpu01", "gpu02")]
    events = run(plan(stage(gates=(Gate(id="g", what="it holds", judge=statuses(results)),))))

    assert [(event.node, event.text) for event in events if event.kind == "finding"] == [
        ("gpu[01-02]", "it holds")
    ]


def test_a_failing_gate_queries_failed_nodes_for_evidence() -> None:
    """Only these; the log gives the message its cause, a line of evidence, and the hint."""
    results = [
        Finding(node="a", status="pass", text="in"),
        Finding(node="b", status="fail", text="not in", fix="look"),
    ]
    logs = tuple(Command(node=node, argv=("logs",)) for node in ("a", "b"))
    transport = FakeTransport(
        lambda c: Answer(
            node=c.node, code=0, out="noise\nOSError: [Errno 98] Address already in use\n"
        )
    )
    gate = Gate(
        id="g",
        what="it holds",
        judge=statuses(results),
        evidence=logs,
        explain=ray_judges.explain_logs,
    )
    with pytest.raises(GateError) as caught:
        run(plan(stage(gates=(gate,))), transport)

    assert [command.node for command in transport.commands] == ["b"]
    assert caught.value.message == "b: not in: a port is already in use"
    assert caught.value.evidence == "OSError: [Errno 98] Address already in use"
    assert "ss -ltnp" in caught.value.hint


def test_several_failures_are_all_reported() -> None:
    """The message is the failed condition; nodes' errors are evidence, and fixes are hints without
    repetition.
    """
    results = [
        Finding(node="gpu01", status="fail", text="no GPU", fix="buy one"),
        Finding(node="gpu02", status="fail", text="no GPU", fix="buy one"),
        Finding(node="gpu03", status="wait", text="slow", fix="wait"),
    ]
    with pytest.raises(GateError) as caught:
        run(plan(stage(gates=(Gate(id="g", what="GPUs are there", judge=statuses(results)),))))

    assert caught.value.message == "check failed: GPUs are there"
    assert caught.value.evidence == "gpu[01-02]: no GPU\ngpu03: slow"
    assert caught.value.hint == "buy one\nwait"


def test_a_cluster_wide_failure_has_no_node() -> None:
    """A foreign node in Ray belongs to no node, and no log is queried."""
    results = [Finding(node="", status="fail", text="a stranger")]
    gate = Gate(
        id="g",
        what="it holds",
        judge=statuses(results),
        evidence=(Command(node="a", argv=("logs",)),),
    )
    with pytest.raises(GateError) as caught:
        run(plan(stage(gates=(gate,))), FakeTransport(lambda _: None))

    assert caught.value.message == "a stranger"


def test_a_gate_gets_answers_in_query_order() -> None:
    """Whichever node answers first."""
    items: list[Answers] = []

    def judge(answers: Answers) -> Sequence[Finding]:
        items.append(answers)
        return []

    requests = (
        Command(node="a", argv=("one",)),
        Command(node="b", argv=("one",)),
        Command(node="a", argv=("two",)),
    )
    run(
        plan(stage(gates=(Gate(id="g", what="", judge=judge, queries=requests),))),
        FakeTransport(lambda c: Answer(node=c.node, code=0, out=c.argv[0])),
    )

    assert {node: [answer.out for answer in answers] for node, answers in items[0].items()} == {
        "a": ["one", "two"],
        "b": ["one"],
    }


def test_interrupting_a_wait_leaves_at_once() -> None:
    """Ctrl-C stops the wait, without further queries or steps."""
    transport = FakeTransport(good)

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    gate = Gate(
        id="g",
        what="it holds",
        judge=statuses("wait"),
        queries=(Command(node="a", argv=("ask",)),),
        deadline=100,
    )
    with pytest.raises(KeyboardInterrupt):
        list(
            apply(
                plan(stage(gates=(gate,)), stage(step("b"), id_="t")), transport, sleep=interrupted
            )
        )

    assert [command.argv[0] for command in transport.commands] == ["ask"]


def test_closing_the_stream_stops_before_the_next_stage() -> None:
    """A reader of events may stop early; the transport cancels running commands."""
    transport = FakeTransport(good)
    events = apply(plan(stage(step("a")), stage(step("b"), id_="t")), transport)
    assert isinstance(events, Generator)
    next(events)
    events.close()

    assert transport.commands == []


def test_keep_going() -> None:
    """A failing node stops neither other nodes nor later stages, and all errors are reported."""
    sent: list[str] = []

    def handler(command: Command) -> Answer:
        sent.append(command.argv[0])
        return (
            Answer(node=command.node, code=1, err="busy")
            if command.argv == ("rm", "b")
            else good(command)
        )

    stages = (
        stage(step("b", "removing b", "rm"), step("b", "clearing b", "clear"), id_="workers"),
        stage(
            step("a", "removing a", "rm"),
            gates=(Gate(id="g", what="it is gone", judge=statuses("fail")),),
            id_="head",
        ),
    )
    with pytest.raises(GateError) as caught:
        run(Plan(verb="down", stages=stages, keep_going=True), FakeTransport(handler))

    assert sent == ["rm", "clear", "rm"]
    assert caught.value.message == "b: removing b failed (exit 1)"
    assert "gpu01: it is fail" in caught.value.evidence
    assert "mend it" in caught.value.hint


class Recording(FakeTransport):
    """A recorder of a plan's changes."""

    def __init__(self, handler: Callable[[Command], Answer | None]) -> None:
        super().__init__(handler)
        self.recorded: list[tuple[str, dict[str, list[str]]]] = []

    def record(self, verb: str, changes: Mapping[str, Sequence[str]]) -> Mapping[str, Argv]:
        self.recorded.append((verb, {node: list(titles) for node, titles in changes.items()}))
        return {node: ("write", node) for node in changes}


def test_changes_are_recorded_with_the_first_step() -> None:
    """All changes of a node at once, without a further command; queries leave no record."""
    gate = Gate(
        id="g", what="it holds", judge=statuses("pass"), queries=(Command(node="c", argv=("ask",)),)
    )
    stages = (
        stage(gates=(gate,)),
        stage(step("a", "one"), step("a", "two"), step("b", "one"), id_="t"),
        stage(step("b", "three")),
    )
    transport, plain = Recording(good), FakeTransport(good)
    run(plan(*stages), transport)
    run(plan(*stages), plain)

    assert transport.recorded == [("up", {"a": ["one", "two"], "b": ["one", "three"]})]
    assert [(command.node, command.preamble) for command in transport.commands] == [
        ("c", ()),
        ("a", ("write", "a")),
        ("b", ("write", "b")),
        ("a", ()),
        ("b", ()),
    ]
    assert [command.argv for command in transport.commands] == [
        command.argv for command in plain.commands
    ]
    assert not any(command.preamble for command in plain.commands)


def test_a_plan_without_steps_records_nothing() -> None:
    """It changes nothing."""
    transport = Recording(good)
    run(plan(stage(gates=(Gate(id="g", what="it holds", judge=statuses("pass")),))), transport)

    assert transport.recorded == []


def test_a_lost_lock_stops_a_plan_with_keep_going() -> None:
    """Another operator's work must not be removed."""

    class Lost(FakeTransport):
        def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
            if self.commands:
                raise LockError("a", "the lock was lost")
            return super().run(commands)

    transport = Lost(good)
    cleaning = Plan(
        verb="down", stages=(stage(step("a")), stage(step("b"), id_="t")), keep_going=True
    )

    with pytest.raises(LockError):
        run(cleaning, transport)
    assert [command.node for command in transport.commands] == ["a"]
