"""Strength of the unit tests: the share of mutants that they kill.

    make mutants [MUTANTS="--count 200 --seed 1"]

A mutant is one change of the code. cosmic-ray finds the places and makes the changes; a seed
chooses a sample of them. A mutant is tested in a copy of the checkout: first by the test file of
its module, then by that file's folder, at last by all unit tests. It survives when none fails.
Results are saved, one JSON object per line, and a second run continues them; `--retry` tests only
the survivors.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cosmic_ray.mutating
import cosmic_ray.plugins
import parso.python.tree
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.operators.operator import Operator

ROOT = Path(__file__).parents[1]
# Only lab tests cover the lab hosts and vLLM's plugin.
UNTESTED = ("launcher/lab/", "launcher/lab/cpu_platform/")
OPERATORS = (
    *(
        f"core/ReplaceComparisonOperator_{before}_{after}"
        for before, after in (
            ("Eq", "NotEq"),
            ("NotEq", "Eq"),
            ("Lt", "GtE"),
            ("GtE", "Lt"),
            ("Gt", "LtE"),
            ("LtE", "Gt"),
            ("Is", "IsNot"),
            ("IsNot", "Is"),
        )
    ),
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/ReplaceBinaryOperator_Add_Sub",
    "core/ReplaceBinaryOperator_Sub_Add",
    "core/ReplaceUnaryOperator_Delete_Not",
)
FILE_SECONDS, FOLDER_SECONDS, SUITE_SECONDS = 120, 300, 900


class DropReturnValue(Operator):
    """Return None instead of a value."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        """Yield the value of a `return`."""
        if (
            isinstance(node, parso.python.tree.ReturnStmt)
            and node.children[-1].get_code() != " None"
        ):
            yield node.children[-1].start_pos, node.children[-1].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Replace the value."""
        node.children[-1] = parso.parse(" None")
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """Return nothing: cosmic-ray uses examples for its own tests."""
        return ()


def operator(name: str) -> Operator:
    """Return an operator of cosmic-ray, or our own, by name."""
    return (
        DropReturnValue() if name == "DropReturnValue" else cosmic_ray.plugins.get_operator(name)()
    )


def list_places() -> list[tuple[str, str, int]]:
    """Return all places that can be mutated: file, operator, and its occurrence in the file."""
    operators = {name: operator(name) for name in (*OPERATORS, "DropReturnValue")}
    rows = []
    for path in sorted((ROOT / "launcher").rglob("*.py")):
        module = str(path.relative_to(ROOT))
        if module.startswith(UNTESTED):
            continue
        counts = dict.fromkeys(operators, 0)
        for node in ast_nodes(get_ast(path.read_text())):
            for name, op in operators.items():
                for _ in op.mutation_positions(node):
                    rows.append((module, name, counts[name]))
                    counts[name] += 1
    return rows


# Their tests are marked `processes`: they start programs.
_NODE_PROGRAMS = (
    "launcher/agent/",
    "launcher/batch/driver/",
    "launcher/distribute/node/",
    "launcher/network/probe/",
)


def test_stages(module: str) -> list[tuple[list[str], int]]:
    """Return the arguments of each pytest run, in order, with its time limit in seconds."""
    folder = Path("tests") / Path(module).parent.relative_to("launcher")
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    own = folder / f"test_{Path(module).stem}.py"
    unit = ["-m", "not lab and not processes"]
    near = ["-m", "not lab"] if module.startswith(_NODE_PROGRAMS) else unit
    stages = [(["-m", "not lab", str(own)], FILE_SECONDS)] if (ROOT / own).exists() else []
    if folder != Path("tests"):
        stages.append(([*near, str(folder)], FOLDER_SECONDS))
    return [*stages, ([*unit, "-n", "auto", "--dist", "worksteal"], SUITE_SECONDS)]


def kill(copy: Path, module: str) -> str:
    """Return the tests that killed the mutant in a copy of the checkout; empty when it survived."""
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": ""}
    for arguments, seconds in test_stages(module):
        command = [str(ROOT / ".venv/bin/python"), "-m", "pytest", "-q", "-x", *arguments]
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return f"{arguments[-1]} (timeout)"
        if code not in (0, 5):  # 5: no test was collected
            return arguments[2] if len(arguments) == 3 else "all unit tests"
    return ""


def mutate(copy: Path, module: str, name: str, occurrence: int) -> str:
    """Write a mutant into the copy; return the difference in lines."""
    before = (ROOT / module).read_text()
    after = cosmic_ray.mutating.mutate_code(before, operator(name), occurrence)
    (copy / module).write_text(after)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def main() -> int:
    """Test a sample of mutants; return 1 when fewer than nine in ten were killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=ROOT / ".venv/mutants.jsonl")
    parser.add_argument("--retry", action="store_true", help="test the survivors once more")
    args = parser.parse_args()

    results = {}
    if args.results.exists():
        for line in args.results.read_text().splitlines():
            row = json.loads(line)
            results[row["module"], row["operator"], row["occurrence"]] = row
    if args.retry:
        sample = [key for key, row in results.items() if not row["killed"]]
    else:
        sample = random.Random(args.seed).sample(list_places(), args.count)
        sample = [key for key in sample if key not in results]
    copy = ROOT / ".venv/mutants"
    shutil.rmtree(copy, ignore_errors=True)
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=ignored)
    if failed := kill(copy, "launcher/core/domain.py"):
        print(f"the tests fail without a mutant: {failed}")
        return 2
    for number, (module, name, occurrence) in enumerate(sample, 1):
        diff = mutate(copy, module, name, occurrence)
        killed = kill(copy, module)
        (copy / module).write_text((ROOT / module).read_text())
        row = {
            "module": module,
            "operator": name,
            "occurrence": occurrence,
            "killed": killed,
            "diff": diff,
        }
        results[module, name, occurrence] = row
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{number}/{len(sample)} {module}: {killed or 'SURVIVED'}\n{diff}", flush=True)
    share = sum(bool(row["killed"]) for row in results.values()) / max(1, len(results))
    print(f"{len(results)} mutants, {share:.1%} killed; survivors:")
    for row in results.values():
        if not row["killed"]:
            print(f"{row['module']}\n{row['diff']}")
    return 0 if share >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
