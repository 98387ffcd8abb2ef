"""Exports against the schemas of Kubernetes and of the controllers.

CRDs stay outside of the project: VLAUNCH_CRDS names a folder with `*.crd.yaml` and the checker
`validate.py`, which agrees with a real API server (its README). `kubernetes-validate` has the
built-in kinds.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.main import run_command
from tests.export.exports import CASES, JOB_CASES, KINDS, PAIRS, inventory, job

VERSION = "1.37.0"
FOLDER = os.environ.get("VLAUNCH_CRDS", "")
needs_crds = pytest.mark.skipif(
    not FOLDER, reason="VLAUNCH_CRDS names no folder with CRDs (`kubectl get crd NAME -o yaml`)"
)


def exported(case: str, kind: str = "lws") -> str:
    """Return the export of a case."""
    argv = (*KINDS[kind], *CASES[case][1])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run_command(["export", "kubernetes", "-i", str(inventory(case)), *argv]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The exports of all examples and kinds, one file per export."""
    result, folder = [], tmp_path_factory.mktemp("exports")
    for kind, case in PAIRS:
        path = folder / f"{kind}-{case}.yaml"
        path.write_text(exported(case, kind))
        result.append(path)
    for case in JOB_CASES:
        argv = job(folder, case)
        path = folder / f"batch-{case}.yaml"
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert run_command(argv) == 0
        path.write_text(out.getvalue())
        result.append(path)
    return result


def crds(*paths: Path) -> subprocess.CompletedProcess[str]:
    """Validate the custom resources in files."""
    schemas = sorted(Path(FOLDER).glob("*.crd.yaml"))
    return subprocess.run(
        [sys.executable, Path(FOLDER) / "validate.py", *schemas, "--", *paths],
        capture_output=True,
        text=True,
        check=False,
    )


def built_in(*paths: Path) -> subprocess.CompletedProcess[str]:
    """Validate the built-in kinds in files."""
    program = Path(sys.executable).with_name("kubernetes-validate")
    return subprocess.run(
        [program, "--strict", "-k", VERSION, *paths], capture_output=True, text=True, check=False
    )


@needs_crds
@pytest.mark.processes
def test_custom_resources_fit_their_definitions(every: list[Path]) -> None:
    """Those of the controllers; unknown kinds fail."""
    result = crds(*every)
    text = result.stdout.splitlines()

    assert result.returncode == 0, [line for line in text if line.startswith("FAIL")]
    assert len([line for line in text if line.startswith("PASS")]) >= len(CASES)
    assert not [line for line in text if line.startswith("SKIP") and "x-k8s.io" in line]


@pytest.mark.processes
def test_built_in_kinds_fit_their_schemas(every: list[Path]) -> None:
    """Strictly: an unknown field is an error."""
    result = built_in(*every)

    assert result.returncode == 0, result.stdout + result.stderr
    programs = sum(path.read_text().count("-programs\n  labels") for path in every)
    assert result.stdout.count("resource configmap/") == programs + len(JOB_CASES) > len(JOB_CASES)


@needs_crds
@pytest.mark.processes
def test_a_broken_copy_is_rejected(tmp_path: Path) -> None:
    """By both checkers: an unknown field, an invalid value, a number as text."""
    path = tmp_path / "export.yaml"
    for kind, changes in BROKEN.items():
        text = exported("h100", kind)
        for old, new, check in changes:
            assert old in text
            path.write_text(text.replace(old, new))
            assert check(path).returncode != 0, (kind, new)


BROKEN = {
    "lws": [
        ("startupProbe:", "startupProbes:", crds),
        ("RecreateGroupAfterStart", "RecreateGroup", crds),
        ("size: 2", "size: two", crds),
        ("targetPort: http", "targetPorts: http", built_in),
        ("policyTypes:", "policyType:", built_in),
    ],
    "kuberay": [
        ("rayVersion:", "rayVersions:", crds),
        ("backoffLimit: ", "backoffLimit: so-", crds),
        ("mode: token", "mode: tokens", crds),
    ],
}
