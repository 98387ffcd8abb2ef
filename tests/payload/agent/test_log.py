"""The agent's lines in its container's log."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from launcher.payload.agent import log


def test_words_that_an_output_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image may have set another encoding; nobody ends for a stranger's letters, or draws on the
    terminal.
    """
    to: Any = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(to, encoding="ascii"))
    log.say("the agent of Knoten-ß\ud800\x1b[2J is here")

    assert to.getvalue() == b"vlaunch agent: the agent of Knoten-???[2J is here\n"


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
