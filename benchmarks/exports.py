"""Every export of every example inventory through every checker that is here, as one table.

    python -m benchmarks.exports          (`make exports`)

A cell says `ok` or `WRONG`; the last row of each kind is a broken copy, which the checker must
refuse. Checkers that are not here are named, with what would bring them. Exit code 1: something was
wrong, or a broken copy passed.
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
# By the kind of a group: what of it a broken copy has otherwise, by who must refuse that.
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
    """A checker: how it is called with files, which of an export it reads, and how a file is broken
    so that it must refuse it. `missing` says what would bring it here, empty where it is here.
    """

    name: str
    kind: str
    argv: tuple[str | Path, ...]
    reads: str
    broken: tuple[str, str]
    missing: str = ""


def of_kubernetes(kind: str) -> Iterator[Checker]:
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
        yield from of_kubernetes(kind)
    promtool = program("promtool")
    for words, reads, broken in (
        (("check", "config", "--syntax-only"), "prometheus.yml", ("job_name: vllm", "job: vllm")),
        (("check", "rules"), "alerts.yml", ("expr: ", "exprs: ")),
        (("test", "rules"), "alerts_test.yml", ("exp_alerts:", "exp_alert:")),
    ):
        yield Checker(
            name=f"promtool {words[0]} {words[1]}",
            kind="prometheus",
            argv=(promtool or "promtool", *words),
            reads=reads,
            broken=broken,
            missing="" if promtool else "Prometheus, which `make machine` unpacks",
        )


def export(kind: str, case: str, folder: Path) -> str:
    """Write an export into a folder; return why that was refused."""
    if kind == BATCH:
        return written(job(folder, case), folder / "export.yaml")
    kind, _, group = kind.partition(" ")
    name, flags = CASES[case]
    at = ("-i", str(EXAMPLES / f"{name}.yaml"))
    if kind == "prometheus":
        return written(["export", kind, *at, "-o", str(folder)], None)
    return written(["export", kind, *at, *KINDS[group], *flags], folder / "export.yaml")


def written(words: list[str], printed: Path | None) -> str:
    """Run the launcher, and keep what it prints; return why it refuses."""
    done = subprocess.run([BIN / "vlaunch", *words], capture_output=True, text=True, check=False)
    if printed is not None:
        printed.write_text(done.stdout)
    return "" if done.returncode == 0 else done.stderr.splitlines()[0]


def judged(checker: Checker, folder: Path, change: Callable[[str], str]) -> bool:
    """Run a checker over changed copies of its files, beside the files; true when it passes all."""
    passed = True
    for file in sorted(folder.glob(checker.reads)):
        text = change(file.read_text())
        copy = folder / f"copy-{file.name}"
        copy.write_text(text)
        done = subprocess.run([*checker.argv, copy], capture_output=True, check=False)
        copy.unlink()
        passed = passed and done.returncode == 0
    return passed


def rows(kind: str, used: list[Checker], base: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield a row for each case of a kind, and one of broken copies."""
    group = kind.removeprefix(KUBERNETES)
    folder = base
    for case in JOB_CASES if kind == BATCH else cases(group):
        folder = base / f"{kind}-{case}"
        folder.mkdir()
        if wrong := export(kind, case, folder):
            yield case, [f"refused: {wrong}"] * len(used)
            continue
        yield case, ["ok" if judged(each, folder, str) else "WRONG" for each in used]

    def refused(checker: Checker) -> str:
        old, new = checker.broken
        passed = judged(checker, folder, lambda text: text.replace(old, new, 1))
        return "PASSED" if passed else "refused"

    yield "a broken copy", [refused(each) for each in used]


def main() -> int:
    """Print the table."""
    known, wrong = list(checkers()), False
    with tempfile.TemporaryDirectory() as base:
        for kind in dict.fromkeys(each.kind for each in known):
            used = [each for each in known if each.kind == kind and not each.missing]
            if not used:
                continue
            width = max(22, *(len(each.name) + 2 for each in used))
            print(f"{kind:24}" + "".join(f"{each.name:{width}}" for each in used))
            for case, cells in rows(kind, used, Path(base)):
                print(f"  {case:22}" + "".join(f"{cell:{width}}" for cell in cells), flush=True)
                wrong = wrong or any(cell in ("WRONG", "PASSED") for cell in cells)
    for each in known:
        if each.missing:
            print(f"SKIP {each.kind} {each.name}: {each.missing}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
