"""How an error reads."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.app import error_text
from launcher.core.errors import GateError, NodeError, VlaunchError
from tests import golden

pytestmark = pytest.mark.processes

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "one-line": VlaunchError("it failed"),
    "full": NodeError(
        "gpu02",
        "Ray worker did not join within 120s",
        evidence="Could not connect to 10.0.0.11:6379",
        hint="allow TCP 6379 from gpu02 to gpu01, then run `vlaunch up` again",
    ),
    "several": GateError(
        "not true: GPUs are there",
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


@pytest.mark.parametrize("name", CASES)
def test_an_error_says_where_what_evidence_and_what_to_do(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error; long evidence is shortened in its middle, and what nodes say draws
    nothing.
    """
    error_text.show(CASES[name])
    out, err = capsys.readouterr()

    assert out == ""
    assert not {"\x1b", "\x07", "\x9b", "\r", "\x08"} & set(err)
    golden.check(GOLDEN / f"error-{name}.txt", err)


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_is_for_terminals_that_want_it(no_color: bool, tmp_path: Path) -> None:
    """In a terminal there is colour, with NO_COLOR there is none; the words are the same."""
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
    said = os.read(master, 4096).decode()
    os.close(master)

    assert process.returncode == 2
    assert "/nowhere.yaml" in said
    assert ("\x1b[" in said) is not no_color
