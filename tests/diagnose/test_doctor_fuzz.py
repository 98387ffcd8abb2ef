"""Any answers after a failure: a printable diagnosis, and no exception."""

from __future__ import annotations

import io
import json

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launcher.diagnose.doctor import diagnose
from launcher.diagnose.doctor_view import diagnosis_json, render_diagnosis
from launcher.failures.table import load_failures
from launcher.tools.diagnosis import parse_report
from tests.fuzz import quick

MARK = "@@f00d"
NAMES = (
    "clock",
    "ids",
    "state",
    "servers",
    "observed-1",
    "observed-2",
    "desired-1",
    "engine-1",
    "kernel",
    "zone",
    "inspect",
    "nccl",
    "driver-1",
    "worker-2",
    "ray-3",
    "log-0",
    "log-1",
    "log-9",
    "rc 0",
    "rc 1",
    "rc 999",
    "",
    "x",
    "../x",
)
KEYS = (
    "name",
    "role",
    "state",
    "restarts",
    "Status",
    "ExitCode",
    "OOMKilled",
    "Error",
    "StartedAt",
    "FinishedAt",
    "faults",
    "at",
    "what",
    "node",
    "rank",
    "evidence",
    "ready_again_after",
    "since",
    "doing",
    "ready_at",
    "version",
    "cause",
)
VALUES = (
    "gave-up",
    "ready",
    "exited",
    "restarting",
    "head",
    "rank",
    "2026-11-21T20:14:02Z",
    "9999-12-31T23:59:59-23:59",
    "\ud800",
)
LINES = (
    "EngineDeadError",
    "connectFullMesh",
    "*** SIGTERM received",
    "Application startup complete",
    "INFO 11-21 20:14:02 [x] y",
    "2026-11-21T20:14:02.1Z no space left on device",
    "0000-00-00 00:00:00",
    "container x ended",
    "keeper: gave up",
    "chat",
    "9999-12-31T23:59:59.9+99:99 x",
    "\x1b[2J\x07",
    "[bold]",
    "+9999",
    "1" * 50,
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=9),
    st.sampled_from(VALUES),
)
objects = st.recursive(
    st.dictionaries(st.sampled_from(KEYS), scalars, max_size=6),
    lambda inner: st.dictionaries(
        st.sampled_from(KEYS), st.one_of(inner, st.lists(inner, max_size=3), scalars), max_size=6
    ),
    max_leaves=6,
)
bodies = st.one_of(
    objects.map(json.dumps),
    st.lists(st.sampled_from(LINES), max_size=6).map("\n".join),
    st.text(max_size=30),
)
answers = st.lists(st.tuples(st.sampled_from(NAMES), bodies), max_size=12)


@given(answers, st.booleans())
@quick
def test_any_answer_gives_a_diagnosis(parts: list[tuple[str, str]], rdma: bool) -> None:
    """Only of entries of the table, and without terminal codes."""
    report = parse_report(
        "".join(f"\n{MARK} {name}\n{body}\n{MARK} rc 0\n" for name, body in parts), MARK
    )
    diagnosis = diagnose(
        {"gpu01": report, "gpu02": report},
        {"gpu03": "away"},
        rdma=rdma,
        now=1795300000.0,
        since=None,
    )
    to = Console(file=io.StringIO(), width=200)
    to.print(render_diagnosis(diagnosis))

    assert {finding.id for finding in diagnosis.findings} <= {"unknown", *load_failures()}
    assert diagnosis.findings[0].id in ("node-unreachable", "server-died", "server-gave-up")
    assert b"\x1b" not in to.file.getvalue().encode()  # type: ignore[attr-defined]
    json.dumps(diagnosis_json(diagnosis), allow_nan=False)
