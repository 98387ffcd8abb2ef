"""Plain English in names, docstrings, help, messages, shell programs and data files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from launcher.cli.main import cli

ROOT = Path(__file__).parents[1]
LAUNCHER = ROOT / "launcher"
TREES = {path: ast.parse(path.read_text()) for path in sorted(LAUNCHER.rglob("*.py"))}

# Words that carry no meaning as a name. Few are left: keys of JSON, and names of libraries.
VAGUE = re.compile(
    "each|found|said|told|seen|asked|wanted|there|here|one|made|given|left|known|more|kept|lacking"
    "|whose|who|whom|wish|rests|words?|held|ways?|taken|begun|hear|heard|tells|speaks"
)
MOST = 20  # vague names per 10,000
RELATIVE = re.compile(r"(What|Which|Whether|Where|How|Why|When|Who|That)\b")
BANNED = re.compile(
    r"(?i)\b(nobody(?!:)|somebody|whoever|anew|strangers?|cannot be had|keepers?(?!:)"
    r"|practice (cluster|host|image)s?)\b"
)
DATA = sorted(
    path
    for folder in ("launcher", "scripts", "examples", "inventory")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".sh", ".yaml", ".yml", ".json")
)


def names(tree: ast.AST) -> Iterator[str]:
    """Yield every identifier of a module, once per place."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.alias(name=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node, clean=False) or ""


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the strings of several words that are not docstrings, with their lines."""
    documents = set(docstrings(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if " " in text and text not in documents:
                yield node.lineno, text


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield all commands below a command, with their full names."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, f"{path} {name}")


def test_names_say_what_they_are() -> None:
    identifiers = [name for tree in TREES.values() for name in names(tree)]
    vague = [
        name
        for name in identifiers
        if any(VAGUE.fullmatch(part.lower()) for part in re.findall("[A-Z]?[a-z]+|[A-Z]+", name))
    ]

    assert len(vague) / len(identifiers) <= MOST / 10_000, sorted(set(vague))


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.relative_to(LAUNCHER)))
def test_docstrings_start_with_a_noun_or_a_verb(path: Path) -> None:
    assert not [text for text in docstrings(TREES[path]) if RELATIVE.match(text)]


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.relative_to(LAUNCHER)))
def test_messages_use_plain_words(path: Path) -> None:
    assert not [(line, text) for line, text in messages(TREES[path]) if BANNED.search(text)]


@pytest.mark.parametrize("path", DATA, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_and_data_use_plain_words(path: Path) -> None:
    """Results of shell programs (`echo WORD`), which the launcher parses, do not count."""
    text = re.sub(r"\becho \w+;", "", path.read_text())

    assert not [line for line in text.splitlines() if BANNED.search(line)]


@pytest.mark.parametrize(("path", "command"), list(commands(cli, "vlaunch"))[1:])
def test_help_starts_with_a_verb(path: str, command: click.Command) -> None:
    """A capital, no article or pronoun, and no noun with a colon."""
    help_text = (command.help or "").strip()

    assert re.match(r"[A-Z][a-z]+[, ]", help_text), (path, help_text)
    assert not re.match(r"(The|A|An|All|It|This|That|What|Which|How|No)\b|\w+:", help_text), path
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            assert re.match(r"[A-Z\d`(]|vLLM", option.help or "Show"), (
                path,
                option.name,
                option.help,
            )
