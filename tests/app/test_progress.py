"""Events for people and for programs."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from launcher.app import progress
from launcher.core.events import Event
from tests import golden

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\rover\x08"
# A run with all kinds of events.
EVENTS = (
    Event(kind="stage", stage="connect", text="Connect to 3 nodes", state="running"),
    Event(
        kind="step", stage="connect", node="gpu[01-03]", text="connected", state="ok", seconds=0.31
    ),
    Event(kind="stage", stage="connect", text="Connect to 3 nodes", state="ok", seconds=0.32),
    Event(kind="stage", stage="preflight", text="Scan the nodes", state="running"),
    Event(kind="finding", stage="preflight", node="gpu[01-03]", text="Docker answers", state="ok"),
    Event(
        kind="finding",
        stage="preflight",
        node="gpu02",
        text="neither `ss` nor `netstat` is installed",
        state="skip",
    ),
    Event(kind="finding", stage="preflight", node="gpu03", text="the driver is old", state="warn"),
    Event(kind="note", stage="difference", text="gpu02: env A: 1 → 2"),
    Event(kind="warning", text="no secret HF_TOKEN: gated models cannot be read", state="warn"),
    Event(kind="stage", stage="workers", text="Start the Ray workers", state="running"),
    Event(
        kind="step", stage="workers", node="gpu02", text="starting the Ray worker", state="running"
    ),
    Event(
        kind="step", stage="workers", node="gpu03", text="starting the Ray worker", state="running"
    ),
    Event(
        kind="step",
        stage="workers",
        node="gpu03",
        text="starting the Ray worker",
        state="ok",
        seconds=1.04,
    ),
    Event(
        kind="step",
        stage="workers",
        node="gpu02",
        text="starting the Ray worker",
        state="ok",
        seconds=1.26,
    ),
    Event(
        kind="wait",
        stage="ray",
        text="gpu02: has not joined Ray",
        seconds=1,
        deadline=180,
    ),
    Event(kind="wait", stage="ray", text="gpu02: has not joined Ray", seconds=2, deadline=180),
    Event(kind="step", stage="ray", node="gpu01", text="asking", state="unchanged"),
    Event(kind="step", stage="ray", node="gpu01", text="asking again", state="failed", seconds=3),
    Event(
        kind="done",
        text="cluster c is up: 3 nodes, 24 GPUs",
        state="ok",
        seconds=61.5,
        data={"changed": 3},
    ),
)


def shown(to: progress.Printer, *events: Event) -> None:
    with to:
        progress.show_all(events, to)


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A line per new event; repeated waits and starts are omitted; standard output stays empty."""
    shown(progress.PlainLines(), *EVENTS)
    out, err = capsys.readouterr()

    assert out == ""
    golden.check(GOLDEN / "plain-lines.txt", err)


def test_a_wait_is_a_line_when_its_text_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    """Progress is one every ten seconds."""
    clock = iter([*range(25), 25])
    events = [
        *(Event(kind="wait", stage="load", text=text) for text in ("a", "a", "b", "a")),
        *(Event(kind="wait", stage="x", text=f"{n} rows", data={"n": n}) for n in range(25)),
    ]
    shown(progress.PlainLines(lambda: float(next(clock))), *events)

    waits = ["waiting: a", "waiting: b", "waiting: a", "10 rows", "20 rows"]
    assert capsys.readouterr().err.splitlines() == [f"  {line}" for line in waits]


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """An event is one object on standard output; standard error stays empty."""
    shown(progress.JsonLines(), *EVENTS)
    out, err = capsys.readouterr()

    assert err == ""
    assert [json.loads(line) for line in out.splitlines()] == [event.as_json() for event in EVENTS]
    golden.check(GOLDEN / "events.jsonl", out)


def test_a_silent_printer_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """For commands whose output is data."""
    shown(progress.make_printer(silent=True, quiet=True), *EVENTS)

    assert capsys.readouterr() == ("", "")


def test_quiet_shows_warnings_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    """No progress, and no success."""
    shown(progress.make_printer(quiet=True), *EVENTS)

    assert capsys.readouterr().err.splitlines() == [
        "  warning gpu03: the driver is old",
        "  warning no secret HF_TOKEN: gated models cannot be read",
        "  failed gpu01: asking again (3.0s)",
    ]


def test_choice_of_the_display(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By standard error: plain lines in a pipe, else a live display; JSON wins over both."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(progress.make_printer(), progress.PlainLines)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(progress.make_printer(), progress.LiveLines)
    assert isinstance(progress.make_printer(as_json=True), progress.JsonLines)
    assert isinstance(progress.make_printer(silent=True), progress.SilentPrinter)


def test_a_live_display_leaves_the_same_lines_as_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages, ends of steps, and findings stay in the scrollback."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    shown(progress.LiveLines(), *EVENTS)
    lines = screen.getvalue()

    for argv in (
        "Connect to 3 nodes",
        "✓ gpu[01-03] connected  0.3s",
        "- gpu02 neither",
        "! gpu03 the driver is old",
        "✓ cluster c is up",
    ):
        assert argv in lines
    assert "asking again" in lines


def test_a_live_display_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrapped row cannot be redrawn in place."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("COLUMNS", "40")
    live = progress.LiveLines()
    with live:
        for number in range(20):
            live.show(
                Event(
                    kind="step",
                    stage="s",
                    node=f"a-long-node-name-{number}x",
                    text="pulling an image with a long name",
                    state="running",
                )
            )
        live.show(Event(kind="wait", stage="s", text="word " * 40, state="running", deadline=10))
        drawn = live._draw().plain

    assert all(len(line) <= 40 for line in drawn.splitlines())


@pytest.mark.parametrize("kind", ["step", "finding", "note", "warning", "wait", "done", "stage"])
def test_events_are_sanitized(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Escape sequences and control characters are removed in all displays."""
    event = Event(
        kind=kind,
        stage="s",
        node="a",
        text=HOSTILE,
        state="running" if kind in ("wait", "stage") else "ok",
    )  # type: ignore[arg-type]
    shown(progress.PlainLines(), event)
    shown(progress.JsonLines(), event)
    out, err = capsys.readouterr()
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    shown(progress.LiveLines(), event)

    for text in (out, err, screen.getvalue()):
        assert not {"\x1b", "\x07", "\x9b", "\r", "\x08"} & set(text)


def test_delayed_passes_are_shown_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Folding must not drop a node's results."""
    running = [
        Event(kind="step", stage="s", node=node, text="building", state="running")
        for node in ("a1", "a2")
    ]
    shown(
        progress.PlainLines(),
        *running,
        Event(kind="step", stage="s", node="a1", text="building", state="ok", seconds=1),
        Event(kind="step", stage="s", node="a2", text="building", state="failed", seconds=2),
    )

    assert capsys.readouterr().err == "  failed a2: building (2.0s)\n  ok a1: building (1.0s)\n"


def test_the_clock_of_a_wait_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate may wait for minutes without an event: the time since the last one is added."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now = 100.0
    live = progress.LiveLines(clock=lambda: now)
    with live:
        live.show(
            Event(
                kind="wait",
                stage="network",
                text="measuring",
                state="running",
                seconds=2,
                deadline=300,
            )
        )
        first = live._draw().plain
        now = 161.0
        second = live._draw().plain
        live.show(Event(kind="wait", stage="network", text="measuring", seconds=70, deadline=300))
        third = live._draw().plain
        live.show(Event(kind="step", stage="network", text="measured", state="ok"))

        assert (first, second, third) == (
            "  … measuring  2s of 300s",
            "  … measuring  63s of 300s",
            "  … measuring  70s of 300s",
        )
        assert live._draw().plain == ""
