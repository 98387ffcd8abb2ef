"""docs/reference/containers.md has everything that dry runs of `up` give to containers, and nothing
else.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path

import pytest

from launcher.core.domain import Inventory
from launcher.inventory.load import load
from tests import plan_case as case

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "containers.md"
# What these options are given is ours to explain; of the others it is the inventory's.
EXPLAINED = {
    "--network",
    "--ipc",
    "--tmpfs",
    "--restart",
    "--device",
    "--cap-add",
    "--group-add",
    "--security-opt",
}
COUNTED = {"--ulimit", "--log-opt"}  # NAME=VALUE, of which the name is explained


def _told(heading: str) -> dict[str, list[str]]:
    """Return the rows of the first table behind a heading, by each thing that their first cell
    names.
    """
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    lines = dropwhile(lambda line: not line.startswith("|"), section.splitlines())
    table = list(takewhile(lambda line: line.startswith("|"), lines))[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name: row for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


OPTIONS = _told("Options of `docker run`")
VARIABLES = _told("Variables") | _told("Compile caches")
RAY = _told("Options of `ray start`")


def _starts(name: str) -> Iterator[list[str]]:
    """Yield the words of each `docker run` of a dry run that starts a node's container."""
    for line in (case.CASES / name / "expected.sh").read_text(encoding="utf-8").splitlines():
        if "docker run --detach" in line:
            words = shlex.split(line.removesuffix(" &"))
            yield words[words.index("run") + 1 :]


def _options(words: list[str], inventory: Inventory) -> Iterator[str]:
    """Yield the options before the image; those that the inventory itself names by the option."""
    own = {*inventory.devices, *inventory.cap_add, *inventory.ulimits}
    own |= {*(inventory.logging.options or {})}
    before = words[: words.index("--entrypoint") + 1]
    for option, given in pairwise([*before, ""]):
        if not option.startswith("--"):
            continue
        value = re.sub(r"(?<=^/dev/dri/renderD)\d+$", "N", given)
        name = value.partition("=")[0]
        if option in COUNTED and name not in own:
            yield f"{option} {name}="
        elif option in EXPLAINED and value not in own:
            yield f"{option} {value}"
        else:
            yield option


def _variables(words: list[str], inventory: Inventory) -> set[str]:
    given = {value.partition("=")[0] for option, value in pairwise(words) if option == "--env"}
    return given - {name for node in inventory.nodes for name in node.env}


def _ray(words: list[str]) -> set[str]:
    after = words[words.index("--") :] if "--" in words else []
    return {word for word in after[1:] if word.startswith("--")}


@pytest.mark.parametrize("name", case.names())
def test_whatever_is_given_is_told(name: str) -> None:
    """Each option and variable of each dry run has its row."""
    inventory = load(case.CASES / name / "inventory.yaml")
    for words in _starts(name):
        assert {*_options(words, inventory)} - {*OPTIONS} == set()
        assert _variables(words, inventory) - {*VARIABLES} == set()
        assert _ray(words) - {*RAY} == set()


def test_whatever_is_told_is_given() -> None:
    """By a dry run among the cases."""
    given = set[str]()
    for name in case.names():
        inventory = load(case.CASES / name / "inventory.yaml")
        for words in _starts(name):
            given |= {*_options(words, inventory), *_variables(words, inventory), *_ray(words)}

    assert {*OPTIONS, *VARIABLES, *RAY} - given == set()


def test_each_has_its_reason_and_its_source() -> None:
    """No cell is empty; a source is a link, a file or a page."""
    for row in (*OPTIONS.values(), *VARIABLES.values(), *RAY.values()):
        assert all(cell.strip() for cell in row), row
    for row in (*OPTIONS.values(), *VARIABLES.values()):
        assert re.search(r"\]\(|`|\(\d\)|README|Guide", row[-1]), row
