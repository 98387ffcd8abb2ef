"""The documentation keeps up with the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.main import COMMANDS, run

README = Path(__file__).parent.parent / "README.md"
SHOWN = [name for name, (_, _, help_) in COMMANDS.items() if help_]


@pytest.mark.parametrize("name", SHOWN)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a sentence, not only with flags."""
    assert run([name, "--help"]) == 0
    out = capsys.readouterr().out

    assert f"vlaunch {name}" in out
    assert len(out.split("\n\n")[1].strip()) > 20


@pytest.mark.parametrize("name", SHOWN)
def test_every_command_is_in_the_readme(name: str) -> None:
    """As one types it."""
    assert f"vlaunch {name}" in README.read_text()
