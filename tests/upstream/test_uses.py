"""Agreement of the data files with the code that uses them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launcher.upstream import PROGRAMS, entries
from launcher.upstream.entries import Entry

ROOT = Path(__file__).parents[2]
REFERENCE = re.compile(rf"(?:{'|'.join(PROGRAMS)})\.[a-z0-9-]+")
# Names of modules and files that look like references.
OTHERS = {"ray.data", "ray.llm", "docker.io", "docker.pid", "docker.sock"}
ENTRIES = {
    f"{name}.{entry.id}": entry
    for name in PROGRAMS
    for entry in entries.load_program(name).entries.values()
}
# Texts in a log or an answer, which the code must take from the data files.
TEXTS = ("log_line", "exit_text", "metric")


@cache
def literals(file: str) -> frozenset[str]:
    """Return the strings of a module, without docstrings."""
    tree = ast.parse((ROOT / file).read_text())
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return frozenset(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    )


def modules() -> Iterator[str]:
    """Yield the modules of the launcher."""
    for path in sorted((ROOT / "launcher").rglob("*.py")):
        if path.parent.name != "upstream":
            yield path.relative_to(ROOT).as_posix()


@cache
def references() -> dict[str, set[str]]:
    """Return the modules, and the files of known failures, that refer to each entry."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "launcher/failures").glob("*.yaml"):
        for text in re.findall(r"@\{([\w.-]+)\}", path.read_text()):
            found[text].add(path.relative_to(ROOT).as_posix())
    for file in modules():
        for text in literals(file):
            if REFERENCE.fullmatch(text):
                found[text].add(file)
    return found


def uses_name(entry: Entry, file: str) -> bool:
    """Return True if a file has the name of an entry: the last part of a qualified name, an option
    as the keyword of a function that makes options, a metric without its suffix.
    """
    name = entry.source if entry.kind in ("function", "class") and entry.source else entry.text
    name = re.sub(r"_(?:total|bucket|count|sum)$", "", name) if entry.kind == "metric" else name
    tail = re.split(r"[./](?=\w)", name)[-1] if entry.kind in ("class", "function") else name
    last = [name.rstrip("/").rpartition("/")[2]] if entry.kind in ("route", "file") else []
    keyword = name.lstrip("-").replace("-", "_") if entry.kind == "flag" else name
    content = (ROOT / file).read_text()
    names = (tail, keyword, *last, f"--no-{name[2:]}" if name.startswith("--") else name)
    return any(re.search(rf"(?<!\w){re.escape(text)}", content) for text in names)


@pytest.mark.parametrize("reference", ENTRIES)
def test_entry_is_used_where_it_says(reference: str) -> None:
    """Each file that an entry names loads it from the data file, or has its name."""
    entry, users = ENTRIES[reference], references().get(reference, set())
    assert entry.used_by
    for file in entry.used_by:
        assert (ROOT / file).is_file(), file
        if file not in users:
            assert entry.kind not in TEXTS or not file.endswith(".py"), f"{file}: {reference}"
            assert uses_name(entry, file), f"{file}: {entry.text}"
    assert users <= set(entry.used_by)


def test_references_exist() -> None:
    """Code refers to no entry that is missing."""
    assert references().keys() - OTHERS <= ENTRIES.keys()


@pytest.mark.parametrize("file", tuple(modules()))
def test_no_text_is_written_twice(file: str) -> None:
    """A text of a log is in its data file alone."""
    texts = [e.text for e in ENTRIES.values() if e.kind in TEXTS and len(e.text) > 15]
    copies = [text for literal in literals(file) for text in texts if text in literal]
    assert not copies


@pytest.mark.parametrize("name", PROGRAMS)
def test_ids_are_unique(name: str) -> None:
    """JSON keeps the last of two entries with one id."""
    text = (entries.FOLDER / f"{name}.json").read_text(encoding="utf-8")
    ids = re.findall(r'^    "([\w-]+)": \{$', text, re.MULTILINE)
    assert ids == list(entries.load_program(name).entries)


@pytest.mark.parametrize("reference", ENTRIES)
def test_pattern_matches_its_source(reference: str) -> None:
    """A pattern compiles; the contract relies on the source where a pattern cannot be searched."""
    entry = ENTRIES[reference]
    if entry.kind in ("log_line", "exit_text"):
        assert not re.compile(entry.text).search("")


def test_variables_and_options_are_listed() -> None:
    """Every variable of vLLM, Ray and NCCL in the code, and every option in the modules that make
    command lines, has an entry.
    """
    texts = {entry.text for entry in ENTRIES.values()}
    variable = re.compile(r"(?:VLLM|RAY|NCCL)_(?:[A-Z0-9_]*[A-Z0-9]|[a-z][a-z_]*[a-z])")
    missing = set()
    for file in modules():
        missing |= {name for name in literals(file) if variable.fullmatch(name)} - texts
    for file in ("launcher/tools/docker/__init__.py", "launcher/planner/flags.py"):
        options = {text for text in literals(file) if re.fullmatch(r"--[a-z][a-z-]+", text)}
        missing |= {name for name in options if not {name, name.replace("--no-", "--", 1)} & texts}
    assert missing <= {"--kv-cache-memory"}  # which argparse completes
