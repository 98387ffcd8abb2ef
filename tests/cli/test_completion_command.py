"""`vlaunch completion`: shell code, and its completions."""

from __future__ import annotations

import os
import subprocess

import pytest

from launcher.cli.main import run_command
from tests.command_line import VLAUNCH

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_the_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In valid shell code."""
    assert run_command(["completion", shell]) == 0
    out = capsys.readouterr().out

    assert "_VLAUNCH_COMPLETE" in out
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=out, text=True, check=False).returncode == 0


def test_completion_of_another_shell_is_a_usage_error() -> None:
    """With the supported ones."""
    assert run_command(["completion", "tcsh"]) == 2


def test_completing_a_command_works_from_end_to_end() -> None:
    """As called by bash."""
    env = {
        **os.environ,
        "_VLAUNCH_COMPLETE": "bash_complete",
        "COMP_WORDS": "vlaunch sta",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(VLAUNCH, env=env, capture_output=True, text=True, check=False)

    assert done.stdout.split() == ["plain,status"]
