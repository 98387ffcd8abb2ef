"""Nodes' texts on a terminal: printable, on one line, and of limited length."""

from __future__ import annotations

import io
import json
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launcher.app import terminal
from launcher.app.progress import JsonLines, LiveLines, PlainLines, format_plain
from launcher.app.terminal import dump_json
from launcher.cli import main
from launcher.core import untrusted
from launcher.core.errors import NodeError
from launcher.core.events import Event
from tests.hostile import mutate
from tests.hostile.mutate import EVIL
from tests.hostile.test_answers import harmless

# All characters, lone surrogates included; control characters often.
TEXTS = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from("\x1b\x07\r\n\x9b\x9d\u202e\u2066\u2028\ud800\udfff[];0mHJ"),
    ),
    max_size=60,
)
NUMBERS = st.one_of(st.floats(), st.integers(), st.none(), TEXTS)


@mutate.examples(100)
@given(TEXTS)
def test_plain_text(text: str) -> None:
    """It can be encoded, and has no terminal codes."""
    clean = untrusted.sanitize(text)
    clean.encode()
    assert not {letter for letter in clean if untrusted._UNPRINTABLE.match(letter)}
    assert "\n" not in untrusted.single_line(text)


def test_plain_text_keeps_other_scripts() -> None:
    """Other scripts, and joined emoji."""
    for text in ("größer 日本語 مرحبا 👩‍💻 a\tb", "نمی‌خواهم"):
        assert untrusted.sanitize(text) == text


def test_brief_text_is_brief() -> None:
    """For any input."""
    assert len(untrusted.single_line("x" * 8_000_000)) < 3000
    assert untrusted.single_line("one\ntwo\x1b[2J") == "one two"


@mutate.examples(100)
@given(
    text=TEXTS,
    node=TEXTS,
    data=st.dictionaries(TEXTS, st.one_of(NUMBERS, st.lists(NUMBERS)), max_size=3),
)
def test_events_as_json(
    capsys: pytest.CaptureFixture[str], text: str, node: str, data: dict[str, Any]
) -> None:
    """One event is one line of strict JSON, in ASCII."""
    capsys.readouterr()
    JsonLines().show(
        Event(kind="step", text=text, node=node, state="ok", seconds=float("nan"), data=data)
    )
    out = capsys.readouterr().out
    (line,) = out.splitlines()
    assert out.isascii()
    assert "\x7f" not in out
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@mutate.examples(50)
@given(text=TEXTS, node=TEXTS)
def test_events_in_a_pipe(capsys: pytest.CaptureFixture[str], text: str, node: str) -> None:
    """One event is one line."""
    capsys.readouterr()
    with PlainLines() as lines:
        lines.show(Event(kind="note", text=f"a{text}", node=node))
    assert len(capsys.readouterr().err.split("\n")) == 2
    assert format_plain(Event(kind="stage", text="x", state="running")) == "== x"


def test_events_on_a_terminal() -> None:
    """Rich's codes are printed, the node's are not, and its markup is text."""
    stream = io.StringIO()
    shown = LiveLines()
    shown._console = Console(file=stream, force_terminal=True, width=4000, highlight=False)
    shown._live = shown._display()
    with shown:
        shown.show(Event(kind="step", node=f"n{EVIL}", text="doing", state="running"))
        shown.show(Event(kind="wait", text=f"waits {EVIL}", state="running"))
        shown.show(Event(kind="note", node=f"m{EVIL}", text=f"says {EVIL}"))
    drawn = stream.getvalue()
    assert "[red]EVIL[/red]" in drawn
    for code in (
        "\x1b]",
        "\x1bP",
        "\x9b",
        "\x9d",
        "\u202e",
        "\x07",
        "\x1b[2J",
        "\x1b[1;1H",
        "\nhint",
    ):
        assert code not in drawn


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """No line of a node's error becomes a hint, and long lines are cut."""
    terminal.show_error(
        NodeError(f"n{EVIL}", f"failed {EVIL}", evidence=[EVIL, "x" * 8_000_000], hint="do this")
    )
    err = capsys.readouterr().err
    harmless(err)
    assert len(err) < 20_000
    assert [line for line in err.splitlines() if line.startswith("hint")] == ["hint: do this"]


def test_a_defect_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """Its traceback quotes a node, and is sanitized too."""
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        main.print_traceback(type(error), error, error.__traceback__)
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "\x1b" not in err
    err.encode()


def test_hooks_for_defects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program prints tracebacks itself."""
    monkeypatch.setattr(main, "run_command", lambda _: 0)
    for module, name in ((sys, "excepthook"), (main.threading, "excepthook")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(main, "exit_process", lambda code: None)
    main.main([])
    assert sys.excepthook is main.print_traceback


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "[Infinity]",
        "1e999",
        "-1e999",
        "9" * 50,
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * 60 + "]" * 60,
        "",
        "{",
        '{"a": 1} x',
    ],
)
def test_absurd_json(text: str) -> None:
    """ValueError, in time."""
    began = time.thread_time()
    with pytest.raises(ValueError):
        untrusted.loads(text)
    assert time.thread_time() - began < 1


def test_ordinary_json() -> None:
    """Parsed unchanged, except that a lone surrogate becomes a question mark."""
    assert untrusted.loads('{"a": [1, 2.5, null, true, "\\ud83d\\ude00"]}') == {
        "a": [1, 2.5, None, True, "😀"]
    }
    assert untrusted.loads('["\\ud800x"]') == ["?x"]
    assert untrusted.loads("[" * 40 + "]" * 40)


def test_lines_are_cut() -> None:
    """At their ends, and only long ones."""
    assert untrusted.truncate("a\nb") == "a\nb"
    assert untrusted.truncate(f"{'x' * 9000}\nb") == f"{'x' * untrusted.MAX_LINE_LENGTH}\nb"


@mutate.examples(50)
@given(
    st.recursive(
        NUMBERS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)
        ),
    )
)
def test_json_lines(value: Any) -> None:
    """ASCII and strict JSON for any value."""
    text = dump_json(value)
    assert text.isascii()
    json.loads(text, parse_constant=pytest.fail)
