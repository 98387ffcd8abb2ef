"""Every export of every example inventory through every installed checker, as one table.

    python -m benchmarks.exports          (`make exports`)

A cell says `ok` or `WRONG`; the last row of each kind is a broken copy, which the checker must
refuse. Missing checkers are listed with the way to install them. Exits with 1 when an export is
wrong, or a broken copy passes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.export.exports import CASES, EXAMPLES, JOB_CASES, KINDS, cases, job
from tests.prometheus_programs import program

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
CRDS = os.environ.get("VLAUNCH_CRDS", "")
KUBERNETES, BATCH = "kubernetes ", "batch"
# By kind and checker: a text of the export, and the change that the checker must refuse.
BROKEN: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "lws": {
        "CRDs": ("startupProbe:", "startupProbes:"),
        "kubernetes-validate": ("targetPort: http", "targetPorts: http"),
    },
    "kuberay": {
        "CRDs": ("rayVersion:", "rayVersions:"),
        "kubernetes-validate": ("targetPort: http", "targetPorts: http"),
    },
    BATCH: {
        "CRDs": ("entrypoint:", "entrypoints:"),
        "kubernetes-validate": ("policyTypes:", "policyType:"),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checker:
    """A checker: its command, the files of an export that it reads, and a change to a file that it
    must refuse. `missing` says how to install it; empty when it is installed.
    """

    name: str
    kind: str
    argv: tuple[str | Path, ...]
    reads: str
    broken: tuple[str, str]
    missing: str = ""


def manifest_checkers(kind: str) -> Iterator[Checker]:
    """Yield the checkers of one kind of manifests."""
    crds = (Path(CRDS) / "validate.py", *sorted(Path(CRDS).glob("*.crd.yaml")), "--")
    argvs: Mapping[str, tuple[str | Path, ...]] = {
        "CRDs": (sys.executable, *crds),
        "kubernetes-validate": (BIN / "kubernetes-validate", "--strict", "-k", "1.37.0"),
    }
    lacks = {"CRDs": "" if CRDS else "VLAUNCH_CRDS, a folder with definitions and validate.py"}
    for name, broken in BROKEN[kind].items():
        yield Checker(
            name=name,
            kind=BATCH if kind == BATCH else f"{KUBERNETES}{kind}",
            argv=argvs[name],
            reads="export.yaml",
            broken=broken,
            missing=lacks.get(name, ""),
        )


def checkers() -> Iterator[Checker]:
    """Yield all checkers."""
    for kind in (*KINDS, BATCH):
        yield from manifest_checkers(kind)
    promtool = program("promtool")
    for command, reads, broken in (
        (("check", "config", "--syntax-only"), "prometheus.yml", ("job_name: vllm", "job: vllm")),
        (("check", "rules"), "alerts.yml", ("expr: ", "exprs: ")),
        (("test", "rules"), "alerts_test.yml", ("exp_alerts:", "exp_alert:")),
    ):
        yield Checker(
            name=f"promtool {command[0]} {command[1]}",
            kind="prometheus",
            argv=(promtool or "promtool", *command),
            reads=reads,
            broken=broken,
            missing="" if promtool else "Prometheus, which `make machine` unpacks",
        )


def export(kind: str, case: str, folder: Path) -> str:
    """Write an export into a folder; return the error message."""
    if kind == BATCH:
        return run_vlaunch(job(folder, case), folder / "export.yaml")
    kind, _, group = kind.partition(" ")
    name, flags = CASES[case]
    inventory = ("-i", str(EXAMPLES / f"{name}.yaml"))
    if kind == "prometheus":
        return run_vlaunch(["export", kind, *inventory, "-o", str(folder)], None)
    return run_vlaunch(["export", kind, *inventory, *KINDS[group], *flags], folder / "export.yaml")


def run_vlaunch(arguments: list[str], output_file: Path | None) -> str:
    """Run the launcher and save its output; return the error message."""
    completed = subprocess.run(
        [BIN / "vlaunch", *arguments], capture_output=True, text=True, check=False
    )
    if output_file is not None:
        output_file.write_text(completed.stdout)
    return "" if completed.returncode == 0 else completed.stderr.splitlines()[0]


def accepts(checker: Checker, folder: Path, change: Callable[[str], str]) -> bool:
    """Run a checker over changed copies of its files; return whether it accepts all."""
    passed = True
    for file in sorted(folder.glob(checker.reads)):
        text = change(file.read_text())
        copy = folder / f"copy-{file.name}"
        copy.write_text(text)
        completed = subprocess.run([*checker.argv, copy], capture_output=True, check=False)
        copy.unlink()
        passed = passed and completed.returncode == 0
    return passed


def table_rows(kind: str, columns: list[Checker], base: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield a row for each case of a kind, and one for broken copies."""
    group = kind.removeprefix(KUBERNETES)
    folder = base
    for case in JOB_CASES if kind == BATCH else cases(group):
        folder = base / f"{kind}-{case}"
        folder.mkdir()
        if wrong := export(kind, case, folder):
            yield case, [f"refused: {wrong}"] * len(columns)
            continue
        yield case, ["ok" if accepts(column, folder, str) else "WRONG" for column in columns]

    def refused(checker: Checker) -> str:
        old, new = checker.broken
        passed = accepts(checker, folder, lambda text: text.replace(old, new, 1))
        return "PASSED" if passed else "refused"

    yield "a broken copy", [refused(column) for column in columns]


def main() -> int:
    """Print the table."""
    all_checkers, wrong = list(checkers()), False
    with tempfile.TemporaryDirectory() as base:
        for kind in dict.fromkeys(checker.kind for checker in all_checkers):
            installed = [
                checker for checker in all_checkers if checker.kind == kind and not checker.missing
            ]
            if not installed:
                continue
            width = max(22, *(len(checker.name) + 2 for checker in installed))
            print(f"{kind:24}" + "".join(f"{checker.name:{width}}" for checker in installed))
            for case, cells in table_rows(kind, installed, Path(base)):
                print(f"  {case:22}" + "".join(f"{cell:{width}}" for cell in cells), flush=True)
                wrong = wrong or any(cell in ("WRONG", "PASSED") for cell in cells)
    for checker in all_checkers:
        if checker.missing:
            print(f"SKIP {checker.kind} {checker.name}: {checker.missing}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
