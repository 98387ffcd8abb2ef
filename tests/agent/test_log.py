"""The agent's lines in its container's log."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from launcher.agent import log
from tests.agent.stage import Clock


def test_words_that_an_output_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image may have set another encoding; nobody ends for a stranger's letters, or draws on the
    terminal.
    """
    to: Any = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(to, encoding="ascii"))
    log.say("agent of Knoten-ß\ud800\x1b[2J connected")

    assert to.getvalue() == b"vlaunch agent: agent of Knoten-???[2J connected\n"


def test_an_output_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may print while the process ends."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", output)
    output.close()
    log.say("agent of gpu2 connected")


def test_an_exception_is_printed_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with where it was raised, in letters that the output can show."""
    try:
        raise LookupError("no\x1bthing")
    except LookupError:
        log.trace("chat")
    lines = capsys.readouterr().out.splitlines()

    assert lines[0] == "vlaunch agent: chat: Traceback (most recent call last):"
    assert lines[-1] == "vlaunch agent: chat: LookupError: no?thing"
    assert len(lines) > 3


def test_other_hosts_cannot_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same is printed once a minute, and not too much of it."""
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    limited = log.LimitedLog()
    for at in range(50):
        for _ in range(3):
            limited.say(f"trouble {at}")
    assert len(capsys.readouterr().out.splitlines()) == 20
    clock.now += 61.0
    limited.say("trouble 0")
    assert capsys.readouterr().out == "vlaunch agent: trouble 0\n"
