"""The agent's lines in its container's log."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from launcher.agent import log
from tests.agent.stage import Clock


def test_unencodable_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image may set another encoding; remote text must neither raise nor act on the terminal."""
    to: Any = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(to, encoding="ascii"))
    log.say("agent of Knoten-ß\ud800\x1b[2J connected")

    assert to.getvalue() == b"vlaunch agent: agent of Knoten-???[2J connected\n"


def test_a_closed_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may print while the process exits."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", output)
    output.close()
    log.say("agent of gpu2 connected")


def test_an_exception_is_printed_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Every exception with its location, in encodable characters."""
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
    """Repeated lines are printed once per minute, and long ones cut."""
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
