"""Line breaks in a narrow terminal, a wide one, and a pipe."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from launcher.app import terminal
from launcher.app.progress import LiveLines
from launcher.app.terminal import evidence_line, text_line
from launcher.cli import main
from launcher.core.errors import GateError, InventoryError, NodeError, VlaunchError
from launcher.core.events import Event
from tests import golden

GOLDEN = Path(__file__).parent / "golden"
ERROR = NodeError(
    "gpu02",
    "the Ray worker did not join within 120s, although its container runs and answers to Docker",
    evidence="2026-11-22 10:00:00 gcs_client.cc: Failed to connect to GCS at 10.0.0.11:6379 in 5s",
    hint=(
        "allow TCP 6379 from gpu02 to gpu01: `sudo ufw allow from 10.0.0.12 to any port 6379`, then"
        " run `vlaunch up` again\nsee what both nodes say: `vlaunch logs`"
    ),
)
FAILED = Event(
    kind="step",
    stage="workers",
    node="gpu[01-02]",
    text=(
        "starting the Ray worker: the driver is too old for the image's CUDA; install driver 580 or"
        " newer, or take an older image: `docker pull vllm/vllm-openai:v0.11.0`"
    ),
    state="failed",
    seconds=12.3,
)
CHUNKS = st.one_of(
    st.text("abc`節点é", min_size=1, max_size=12),
    st.sampled_from(["`sudo ufw allow from 10.0.0.12`", "(`a b`,", "x" * 90, "節" * 30]),
)
CASES = {
    "one-line": VlaunchError("it failed"),
    "full": NodeError(
        "gpu02",
        "Ray worker did not join within 120s",
        evidence="Could not connect to 10.0.0.11:6379",
        hint="allow TCP 6379 from gpu02 to gpu01, then run `vlaunch up` again",
    ),
    "several": GateError(
        "check failed: GPUs are there",
        evidence=["gpu01: none", "", "gpu02: none"],
        hint="do this\ndo that",
    ),
    "long": NodeError("a", "said much", evidence=[f"line {number}" for number in range(100)]),
    "hostile": NodeError(
        "a",
        "said \x1b[31mred\x1b[0m",
        evidence="\x1b]0;title\x07text\r\nnext\x08\x9b2J",
        hint="ask \x1b[2Jthe admin\x07",
    ),
}


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return true."""
        return True


def stderr(monkeypatch: pytest.MonkeyPatch, columns: int, **environment: str) -> Terminal:
    """Replace standard error by a terminal of some width."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"COLUMNS": str(columns), "TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    return screen


def printed(what: terminal.Line, width: int) -> list[str]:
    """Return a line as printed on a console of some width."""
    to = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    terminal.show(what, to)
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue().splitlines()


@pytest.mark.parametrize("columns", [80, 200])
def test_an_error(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Message and hints have a hanging indent; evidence is unchanged."""
    screen = stderr(monkeypatch, columns, NO_COLOR="1")
    terminal.show_error(ERROR)

    assert f"  {ERROR.evidence}\n" in screen.getvalue()
    golden.check(GOLDEN / f"terminal-error-{columns}.txt", screen.getvalue())


def test_mistakes_are_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike the output of a tool, with a hanging indent."""
    mistakes = [
        "inventory.yaml:7: nodes[1].gpus: should be a whole number from 1 to 128, the GPUs to use"
    ]
    screen = stderr(monkeypatch, 80, NO_COLOR="1")
    terminal.show_error(InventoryError("inventory.yaml has 1 mistake", mistakes))

    assert screen.getvalue().splitlines()[1:] == [
        "  inventory.yaml:7: nodes[1].gpus: should be a whole number from 1 to 128, the",
        "  GPUs to use",
    ]


@pytest.mark.parametrize("columns", [80, 200])
def test_a_failed_step(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cause continues after the mark and the nodes' names."""
    screen = stderr(monkeypatch, columns, NO_COLOR="1")
    with LiveLines() as live:
        live.show(FAILED)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", screen.getvalue())

    golden.check(GOLDEN / f"terminal-step-{columns}.txt", shown.rstrip() + "\n")


def test_a_step_in_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are equal, and nothing is redrawn; rich assumes 80 columns."""
    screen = stderr(monkeypatch, 80, TERM="dumb")
    with LiveLines() as live:
        live.show(FAILED)

    golden.check(GOLDEN / "terminal-step-80.txt", screen.getvalue())


def test_usage_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is an error like any other; in a terminal its message goes on below its beginning."""
    argv = ["serve", "--offline"]
    assert main.run_command(argv) == 2
    text = capsys.readouterr().err
    screen = stderr(monkeypatch, 30)
    assert main.run_command(argv) == 2

    assert text == "error: --offline requires --dry-run\n\nhint: see `vlaunch serve --help`\n"
    assert click.unstyle(screen.getvalue()).splitlines()[:2] == [
        "error: --offline requires",
        "       --dry-run",
    ]


@pytest.mark.parametrize("variable", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_colour_needs_a_capable_terminal(
    variable: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are equal without colour."""
    bright = stderr(monkeypatch, 80)
    terminal.show_error(ERROR)
    dull = stderr(monkeypatch, 80, **variable)
    terminal.show_error(ERROR)

    assert "\x1b[31m" in bright.getvalue()
    assert "\x1b" not in dull.getvalue()
    assert click.unstyle(bright.getvalue()) == dull.getvalue()


def test_lines_are_not_wrapped_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Of any length, for `grep`."""
    argv = " ".join(["word"] * 1000)
    terminal.say(argv, lead="hint: ")
    terminal.print_field(f"network      {argv}")
    terminal.show(terminal.Line(Text(argv)))
    out, err = capsys.readouterr()

    assert err == f"hint: {argv}\n"
    assert out == f"network      {argv}\n{argv}\n"


def test_a_row_of_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value continues below itself, after the name."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    terminal.print_field("ready after  61.2s, of which 0.3s for the first answer")
    terminal.print_field("a word")

    assert sys.stdout.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "ready after  61.2s, of which 0.3s for",
        "             the first answer",
        "a word",
    ]


def test_commands_are_not_wrapped() -> None:
    """A long one starts further left; one wider than the terminal is left to it."""
    fits, wide = f"`{'a ' * 17}a`", f"`{'b ' * 30}b`"
    rows = printed(text_line(f"first run {fits}, then {wide} on it", lead="          fix: "), 40)

    assert rows == [
        "          fix: first run",
        f"  {fits},",
        "               then",
        f"               {wide}",
        "               on it",
    ]


def test_a_lead_wider_than_half_of_the_terminal() -> None:
    """The text continues in the middle, to have enough room."""
    rows = printed(text_line("one two three four five six", lead=f"{'gpu' * 8}: "), 40)

    assert rows == [f"{'gpu' * 8}: one two three", f"{' ' * 20}four five six"]


def test_a_line_of_a_log_is_unchanged() -> None:
    """For comparison and search."""
    argv = " ".join(["word"] * 30)

    assert printed(evidence_line(argv, margin=6), 40) == [f"      {argv}"]


def test_redrawn_rows_fit_the_terminal() -> None:
    """Long tokens are folded: rows wrapped by the terminal cannot be redrawn."""
    to = Console(file=io.StringIO(), width=40, color_system=None, highlight=False)
    to.print(text_line(f"see {'x' * 50}", lead="gpu01: "))
    assert isinstance(to.file, io.StringIO)

    assert [cell_len(row) for row in to.file.getvalue().splitlines()] == [10, 40, 17]


def test_wide_letters_take_two_cells() -> None:
    """Rows end at the terminal's edge."""
    label = "節点一"
    rows = printed(text_line(" ".join([label] * 5), lead="失敗  "), 30)

    assert rows == [f"失敗  {label} {label} {label}", f"      {label} {label}"]


@given(st.lists(CHUNKS, max_size=20).map(" ".join), st.integers(20, 100), st.integers(0, 60))
def test_wrapping_is_lossless(text: str, width: int, lead: int) -> None:
    """No row is too wide, unless a single token is."""
    whole = "a" * max(0, lead - 1) + " " * (lead > 0) + text
    results = [
        (whole[begin:end], margin) for begin, end, margin in terminal.wrap_rows(whole, lead, width)
    ]

    assert " ".join(row for row, _ in results).split() == whole.split()
    for row, margin in results:
        wide = margin + cell_len(row.rstrip()) > width
        assert (
            not wide or len(terminal._CHUNK.findall(row)) == 1 or row.startswith("a" * (lead - 1))
        )
        assert margin <= max(width // 2, 0)
    commands = re.findall(r"`[^`]*`", text)
    assert [command for command in commands if not any(command in row for row, _ in results)] == []


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_an_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error: long evidence is shortened in the middle, and all of it sanitized."""
    terminal.show_error(CASES[name])
    out, err = capsys.readouterr()

    assert out == ""
    assert not {"\x1b", "\x07", "\x9b", "\r", "\x08"} & set(err)
    golden.check(GOLDEN / f"error-{name}.txt", err)


@pytest.mark.processes
@pytest.mark.parametrize("no_color", [False, True])
def test_no_color(no_color: bool, tmp_path: Path) -> None:
    """A terminal has colour, except with NO_COLOR; the text is the same."""
    env = {**os.environ, "TERM": "xterm", "HOME": str(tmp_path)}
    env.pop("NO_COLOR", None)
    if no_color:
        env["NO_COLOR"] = "1"
    master, slave = pty.openpty()
    argv = [sys.executable, "-c", "from launcher.cli.main import main; main()"]
    process = subprocess.run(
        [*argv, "up", "/nowhere.yaml"],
        env=env,
        stderr=slave,
        stdout=slave,
        stdin=slave,
        check=False,
    )
    os.close(slave)
    text = os.read(master, 4096).decode()
    os.close(master)

    assert process.returncode == 2
    assert "/nowhere.yaml" in text
    assert ("\x1b[" in text) is not no_color
