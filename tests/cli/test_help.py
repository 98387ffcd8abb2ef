"""Help of every command at 80 columns, compared with a golden file.

`VLAUNCH_WRITE_GOLDEN=1 pytest tests/cli/test_help.py` writes the file again: read its diff.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click

from launcher.cli.main import cli

GOLDEN = Path(__file__).parent / "golden" / "help.txt"
WIDTH = 80


def pages(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the help of a command and of those below it."""
    yield f"$ {context.command_path} --help\n{command.get_help(context)}\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from pages(child, child.context_class(child, info_name=name, parent=context))


def test_help_of_every_command() -> None:
    """No line is wider than 80 columns."""
    settings = {**cli.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(cli, info_name="vlaunch", **settings)
    text = "\n".join(pages(cli, context))
    if os.environ.get("VLAUNCH_WRITE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")

    assert max(map(len, text.splitlines())) <= WIDTH
    assert text == GOLDEN.read_text(encoding="utf-8")
