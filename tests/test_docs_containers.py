"""docs/reference/containers.md against the containers in dry runs of `up`."""

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
# Options whose values are explained; the values of others come from the inventory.
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


def _rows(heading: str) -> dict[str, list[str]]:
    """Return the rows of the first table after a heading, by each name in their first cell."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    lines = dropwhile(lambda line: not line.startswith("|"), section.splitlines())
    table = list(takewhile(lambda line: line.startswith("|"), lines))[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name: row for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


OPTIONS = _rows("Options of `docker run`")
VARIABLES = _rows("Variables") | _rows("Compile caches")
RAY = _rows("Options of `ray start`")


def _starts(name: str) -> Iterator[list[str]]:
    """Yield the arguments of each `docker run` of a dry run that starts a node's container."""
    for line in (case.CASES / name / "expected.sh").read_text(encoding="utf-8").splitlines():
        if "docker run --detach" in line:
            argv = shlex.split(line.removesuffix(" &"))
            yield argv[argv.index("run") + 1 :]


def _options(argv: list[str], inventory: Inventory) -> Iterator[str]:
    """Yield the options before the image, without values that come from the inventory."""
    own = {*inventory.devices, *inventory.cap_add, *inventory.ulimits}
    own |= {*(inventory.logging.options or {})}
    before = argv[: argv.index("--entrypoint") + 1]
    for option, argument in pairwise([*before, ""]):
        if not option.startswith("--"):
            continue
        value = re.sub(r"(?<=^/dev/dri/renderD)\d+$", "N", argument)
        name = value.partition("=")[0]
        if option in COUNTED and name not in own:
            yield f"{option} {name}="
        elif option in EXPLAINED and value not in own:
            yield f"{option} {value}"
        else:
            yield option


def _variables(argv: list[str], inventory: Inventory) -> set[str]:
    names = {value.partition("=")[0] for option, value in pairwise(argv) if option == "--env"}
    return names - {name for node in inventory.nodes for name in node.env}


def _ray(argv: list[str]) -> set[str]:
    after = argv[argv.index("--") :] if "--" in argv else []
    return {argument for argument in after[1:] if argument.startswith("--")}


@pytest.mark.parametrize("name", case.names())
def test_everything_passed_is_documented(name: str) -> None:
    """Every option and variable of every dry run has a row."""
    inventory = load(case.CASES / name / "inventory.yaml")
    for argv in _starts(name):
        assert {*_options(argv, inventory)} - {*OPTIONS} == set()
        assert _variables(argv, inventory) - {*VARIABLES} == set()
        assert _ray(argv) - {*RAY} == set()


def test_everything_documented_is_passed() -> None:
    """By at least one dry run."""
    passed = set[str]()
    for name in case.names():
        inventory = load(case.CASES / name / "inventory.yaml")
        for argv in _starts(name):
            passed |= {*_options(argv, inventory), *_variables(argv, inventory), *_ray(argv)}

    assert {*OPTIONS, *VARIABLES, *RAY} - passed == set()


def test_every_row_has_a_reason_and_a_source() -> None:
    """No cell is empty; a source is a link, a file or a page."""
    for row in (*OPTIONS.values(), *VARIABLES.values(), *RAY.values()):
        assert all(cell.strip() for cell in row), row
    for row in (*OPTIONS.values(), *VARIABLES.values()):
        assert re.search(r"\]\(|`|\(\d\)|README|Guide", row[-1]), row
