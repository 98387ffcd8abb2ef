"""Diagnosis of logs: causes before effects, and resolved findings last."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.agent.observed import Fault, Wedge
from launcher.core import untrusted
from launcher.diagnose import doctor_view as ui
from launcher.diagnose.doctor import Diagnosis, diagnose
from launcher.tools.diagnosis import ContainerState, Log, NodeReport, format_time
from tests import supervision

NOW = 1795300000.0  # 2026-11-21 22:26:40 UTC
VLLM = Path(__file__).parent.parent / "fixtures" / "vllm"
GLOO = "RuntimeError: Gloo connectFullMesh failed with no error"
DEAD = "EngineCore encountered a fatal error."


def log(*lines: str | tuple[float, str], part: str = "engine-1", title: str = "server chat") -> Log:
    """Return the log of a server's engine; a line may have an age in seconds."""
    stamps = {
        number: format_time(NOW - line[0])
        for number, line in enumerate(lines)
        if isinstance(line, tuple)
    }
    return Log(
        part=part,
        title=title,
        lines=tuple(line if isinstance(line, str) else line[1] for line in lines),
        stamps=stamps,
    )


def diagnose_reports(
    *nodes: NodeReport | Log,
    rdma: bool = False,
    since: float | None = None,
    elsewhere: bool = False,
    **missing: str,
) -> Diagnosis:
    """Diagnose reports of nodes; a log becomes a report with this log only."""
    reports = {
        f"gpu{number:02d}": report if isinstance(report, NodeReport) else NodeReport(logs=(report,))
        for number, report in enumerate(nodes, 1)
    }
    return diagnose(reports, missing, rdma=rdma, now=NOW, since=since, elsewhere=elsewhere)


def kinds(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return kind and ID of all findings."""
    return [(finding.kind, finding.id) for finding in diagnosis.findings]


def record(
    name: str = "chat", state: str = "pausing", *faults: Fault, **fields: Any
) -> dict[str, Any]:
    """Return a server's files as written by the supervisor."""
    return {
        name: {
            "observed": supervision.make_record(
                name, state, faults=list(faults), **fields
            ).as_json()
        }
    }


def fault(**fields: Any) -> Fault:
    """Return a fault of a minute ago as recorded by the supervisor."""
    return supervision.make_fault(**{"at": NOW - 60, "cause": "", "evidence": "", **fields})


def test_a_cause_comes_before_its_effects() -> None:
    """Although it was written later: workers' lines reach the driver late."""
    diagnosis = diagnose_reports(log((50, DEAD), (40, GLOO)))

    assert kinds(diagnosis) == [("now", "gloo-interface"), ("after", "rank-died")]
    assert diagnosis.has_problem
    assert diagnosis.findings[0].docs == "docs/reference/failures.md#gloo-interface"


def test_of_two_causes_the_earlier_comes_first() -> None:
    """By the times of their lines, not by the table."""
    diagnosis = diagnose_reports(
        log((40, GLOO), (50, "Unsupported CPU attention configuration: head_dim=16"))
    )

    assert kinds(diagnosis) == [("now", "cpu-head-size"), ("now", "gloo-interface")]


def test_without_times_more_nodes_come_first_and_then_the_table() -> None:
    """Failures of several nodes are rarely coincidences."""
    torch_line, ray_line = "CUDA out of memory", "ray: command not found"
    diagnosis = diagnose_reports(
        log("OSError: No space left on device", torch_line, ray_line),
        log(ray_line),
        log(torch_line),
    )

    assert kinds(diagnosis) == [
        ("now", "gpu-out-of-memory"),
        ("now", "ray-missing"),
        ("now", "disk-full"),
    ]


NEW = "RuntimeError: the flux capacitor is not aligned"
TRACE = '  File "/usr/lib/python3/dist-packages/{}", line 9, in f'
EXIT = (
    "[2026-11-21 22:26:38,206 W 43 43] (gcs_server) gcs_worker_manager.cc:70: Reporting worker"
    " exit, worker id = {}, node id = 5a, address = 10.77.0.11, exit_type = SYSTEM_ERROR,"
    " exit_detail = Worker unexpectedly exits with a connection error code 2. End of file."
)


def test_an_error_without_an_entry_is_shown() -> None:
    """With its line; it is a problem, unlike a log without errors, and one of an earlier start."""
    diagnosis = diagnose_reports(log("INFO fine", f"(Worker pid=7) {NEW}"), elsewhere=True)
    (finding,) = diagnosis.findings

    assert (finding.id, finding.kind, diagnosis.has_problem) == ("unknown", "unknown", True)
    assert finding.evidence[0].line == f"(Worker pid=7) {NEW}"
    assert "NCCL_DEBUG=INFO" in finding.fix
    healthy = diagnose_reports(log(NEW, "Application startup complete."), elsewhere=True)
    assert not healthy.has_problem


def test_an_error_without_an_entry_is_described_by_its_code() -> None:
    """By the last line of its traceback; the finding has the entry's anchor."""
    lines = (
        "Traceback (most recent call last):",
        TRACE.format("vllm/v1/worker/x.py"),
        "  a()",
        NEW,
    )
    (finding,) = diagnose_reports(log(*lines), elsewhere=True).findings

    assert (finding.id, finding.kind) == ("other-vllm", "unknown")
    assert finding.cause.startswith("the first error in the logs is not a known failure; ")
    assert finding.evidence[0].line == NEW
    (other,) = diagnose_reports(
        log(lines[0], TRACE.format("ray/x.py"), NEW), elsewhere=True
    ).findings
    assert other.id == "other-ray"


def test_a_log_that_ends_without_an_error_may_show_a_hang() -> None:
    """Only a possible one, in a log from elsewhere, at its end."""
    step = "gpu01:9:9 [0] NCCL INFO comm 0x2 rank 0 nranks 2 cudaDev 0 - Init COMPLETE"

    assert kinds(diagnose_reports(log("a", step), elsewhere=True)) == [("perhaps", "stalled-nccl")]
    assert kinds(diagnose_reports(log("a", step))) == []
    assert kinds(diagnose_reports(log(step, *"abcdef"), elsewhere=True)) == []


def test_a_log_without_an_error_shows_its_first_warning() -> None:
    """As a possible one."""
    diagnosis = diagnose_reports(log("fine", "x_info: -61 (No data available)"), elsewhere=True)
    (finding,) = diagnosis.findings

    assert (finding.id, finding.kind, diagnosis.has_problem) == ("unknown", "perhaps", False)
    assert finding.evidence[0].line == "x_info: -61 (No data available)"
    assert "this line may matter" in finding.cause


def test_the_end_of_a_driver_is_no_failure() -> None:
    """Ray reports that of a job that worked like the death of a worker; a real worker's counts, and
    information of Ray explains nothing.
    """
    driver = EXIT.format("03000000" + "f" * 48)
    actor = (
        "[2026-11-21 22:26:38,176 I 43 43] (gcs_server) gcs_actor_manager.cc:1999: Node with actor"
        " is already dead, return status: Invalid: KillActor RPC failed for actor 8a: RpcError: RPC"
        " error: Cancelling all calls rpc_code: 14"
    )

    assert kinds(diagnose_reports(log(actor, driver))) == []
    worker = EXIT.format("03000000" + "f1" * 24)
    assert kinds(diagnose_reports(log(actor, worker))) == [("after", "ray-worker-died")]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_cluster_that_works_has_no_problem(elsewhere: bool) -> None:
    """Its warnings, recorded from starts, stops, replaced servers and batch jobs."""
    text = (VLLM.parent / "failures" / "cluster_ok.log").read_text()
    diagnosis = diagnose_reports(log(*text.splitlines(), part="ray-1"), elsewhere=elsewhere)

    assert {kind for kind, _ in kinds(diagnosis)} <= {"perhaps"}
    assert not diagnosis.has_problem


def test_an_error_without_an_entry_explains_an_effect() -> None:
    """Not if a cause is known, and not on a cluster where nothing failed."""
    assert kinds(diagnose_reports(log((9, NEW), (8, DEAD)))) == [
        ("unknown", "unknown"),
        ("after", "rank-died"),
    ]
    assert kinds(diagnose_reports(log((9, NEW), (8, GLOO)), elsewhere=True)) == [
        ("now", "gloo-interface")
    ]
    assert kinds(diagnose_reports(log(NEW))) == []


def test_evidence_shows_what_matched() -> None:
    """At the end of a long line, and on the lines below it."""
    long = diagnose_reports(log("x " * 300 + GLOO)).findings[0].evidence[0].line
    assert "connectFullMesh" in long
    assert len(long) <= 300


def test_a_possible_cause_is_no_failure() -> None:
    """The exit code follows `found`."""
    diagnosis = diagnose_reports(log((5, "OSError: [Errno 98] Address already in use")))

    assert kinds(diagnosis) == [("perhaps", "port-taken")]
    assert not diagnosis.has_problem


def test_a_line_counts_for_one_symptom_only() -> None:
    """The first in the table, which is the cause."""
    assert kinds(diagnose_reports(log(f"{DEAD} {GLOO}"))) == [("now", "gloo-interface")]


def test_equal_findings_of_several_nodes_are_merged() -> None:
    """With the earliest line of every node, and their number."""
    findings = diagnose_reports(
        log((9, GLOO), (8, GLOO)), log((7, GLOO + " either")), log("fine")
    ).findings

    assert [(finding.nodes, finding.count) for finding in findings] == [(("gpu01", "gpu02"), 3)]
    assert [(finding.node, finding.at) for finding in findings[0].evidence] == [
        ("gpu01", NOW - 9),
        ("gpu02", NOW - 7),
    ]


@pytest.mark.parametrize(
    "ready",
    [
        "INFO:     Application startup complete.",
        'OpenAI server is ready to accept requests bind_address="0.0.0.0:8000" scheme="http"',
    ],
)
def test_readiness_resolves_earlier_failures(ready: str) -> None:
    """On other nodes as well. The Rust front end has its own line."""
    diagnosis = diagnose_reports(log((90, DEAD), (60, ready)), log((100, GLOO)))

    assert kinds(diagnosis) == [("over", "gloo-interface"), ("over", "rank-died")]
    assert not diagnosis.has_problem
    assert diagnosis.ready == NOW - 60


def test_failures_after_readiness_count() -> None:
    """The server died later."""
    diagnosis = diagnose_reports(log((90, GLOO), (60, "Application startup complete."), (30, DEAD)))

    assert kinds(diagnosis) == [("after", "rank-died"), ("over", "gloo-interface")]


def test_old_failures_are_resolved() -> None:
    """If they are half an hour older than the last one."""
    assert kinds(diagnose_reports(log((90000, GLOO), (30, "CUDA out of memory")))) == [
        ("now", "gpu-out-of-memory"),
        ("over", "gloo-interface"),
    ]


def test_since_omits_older_lines() -> None:
    """But not lines without a time."""
    diagnosis = diagnose_reports(
        log("no space left on device"), log((500, GLOO), (30, DEAD)), since=60
    )

    assert kinds(diagnosis) == [("now", "disk-full"), ("after", "rank-died")]


def test_an_exit_after_sigterm_is_no_symptom() -> None:
    """Until the next start in the same log; a cause counts nevertheless."""
    sigterm, start = "*** SIGTERM received at time=1795299000", "vlaunch agent: starting the engine"

    assert kinds(diagnose_reports(log(sigterm, DEAD))) == []
    assert kinds(diagnose_reports(log(DEAD, sigterm))) == [("after", "rank-died")]
    assert kinds(diagnose_reports(log(sigterm, DEAD, start, DEAD))) == [("after", "rank-died")]
    assert kinds(diagnose_reports(log(sigterm, GLOO))) == [("now", "gloo-interface")]


@pytest.mark.parametrize(("rdma", "ids"), [(False, []), (True, [("perhaps", "rdma-unseen")])])
def test_tcp_is_a_fault_only_with_rdma(rdma: bool, ids: list[tuple[str, str]]) -> None:
    """On Ethernet NCCL has no devices."""
    assert kinds(diagnose_reports(log("NCCL INFO NET/IB : No device found."), rdma=rdma)) == ids


def test_an_unreachable_node_comes_first() -> None:
    """It explains the errors of others, however old, and resolves none."""
    diagnosis = diagnose_reports(
        log((9000, DEAD), (9001, GLOO)), gpu07="no answer from gpu07:22 within 10s"
    )

    assert kinds(diagnosis) == [
        ("now", "node-unreachable"),
        ("now", "gloo-interface"),
        ("after", "rank-died"),
    ]
    assert (
        diagnosis.findings[0].evidence[0].line
        == "node cannot be reached: no answer from gpu07:22 within 10s"
    )


def test_readiness_of_one_server_resolves_no_failure_of_another() -> None:
    """Lines of no server are resolved once all servers have been ready since."""
    chat = log((90, GLOO), (60, "Application startup complete."))
    embed = log((80, DEAD), part="engine-2", title="server embed")
    shared = log((85, "unhandled system error"), part="log-1", title="container")
    diagnosis = diagnose_reports(NodeReport(logs=(chat, embed, shared)))
    assert kinds(diagnosis) == [
        ("now", "nccl-system-error"),
        ("after", "rank-died"),
        ("over", "gloo-interface"),
    ]

    embed = log(
        (80, DEAD), (50, "Application startup complete."), part="engine-2", title="server embed"
    )
    assert [
        kind for kind, _ in kinds(diagnose_reports(NodeReport(logs=(chat, embed, shared))))
    ] == ["over"] * 3
    # A stopped server is not awaited.
    stopped = NodeReport(
        logs=(chat, log((80, "x"), part="engine-2", title="server embed"), shared),
        supervisor_files=record("embed", "stopped"),
    )
    assert [kind for kind, _ in kinds(diagnose_reports(stopped))] == ["over"] * 2


def test_a_stop_brings_no_resolved_failure_back() -> None:
    """The server was ready after it; a server that was never ready resolves nothing."""
    shared = log((85, "unhandled system error"), part="log-1", title="container")
    for engine, kind in (("Application startup complete.", "over"), ("x", "now")):
        report = NodeReport(
            logs=(shared, log((60, engine))), supervisor_files=record("chat", "stopped")
        )
        assert kinds(diagnose_reports(report)) == [(kind, "nccl-system-error")]


def test_the_supervisors_last_fault_comes_first() -> None:
    """With the server's name; the table knows its recorded lines too."""
    last_fault = fault(
        what="no completion came back", rank="PP1", cause="ValueError: odd", evidence=f"x\n{GLOO}"
    )
    diagnosis = diagnose_reports(
        NodeReport(supervisor_files=record("chat", "pausing", last_fault)), gpu09="gone"
    )

    assert kinds(diagnosis) == [
        ("now", "server-died"),
        ("now", "node-unreachable"),
        ("now", "gloo-interface"),
    ]
    assert (
        diagnosis.findings[0].evidence[0].line
        == "server chat: no completion came back (rank PP1 on gpu02):"
        " ValueError: odd"
    )
    assert diagnosis.findings[2].evidence[0].what == "server chat"


def test_a_known_cause_is_a_separate_finding() -> None:
    """The fault keeps its own finding."""
    diagnosis = diagnose_reports(
        NodeReport(
            supervisor_files=record(
                "chat", "pausing", fault(cause="torch.OutOfMemoryError: CUDA out of memory.")
            )
        )
    )

    assert kinds(diagnosis) == [("now", "server-died"), ("now", "gpu-out-of-memory")]
    assert (
        diagnosis.findings[0].evidence[0].line == "server chat: a rank is dead (rank PP1 on gpu02)"
    )


def test_an_unknown_cause_is_shown_with_its_process() -> None:
    """And its node, if the log has it."""
    last_fault = fault(
        what="vLLM ended with exit code 1",
        node="",
        rank="",
        cause="KeyError: 'x'",
        evidence="(Worker_PP1 pid=7, ip=gpu02) KeyError: 'x'",
    )
    finding = diagnose_reports(
        NodeReport(supervisor_files=record("chat", "failed", last_fault))
    ).findings[0]

    assert (
        finding.evidence[0].line == "server chat: vLLM ended with exit code 1 (Worker_PP1 pid=7 on"
        " gpu02): KeyError: 'x'"
    )


def test_a_failed_batch_job_has_a_cause() -> None:
    """Known or unknown, with the fix for a job."""
    driver = log(
        (
            NOW - 9,
            "ValueError: Free memory on device cuda:0 is less than desired GPU memory utilization",
        ),
        "batch job failed: the free GPU memory is less than the engine's share",
        part="driver-1",
        title="job driver",
    )
    cause, failed = diagnose_reports(NodeReport(logs=(driver,))).findings

    assert (cause.id, failed.id) == ("gpu-memory-held", "batch-failed")
    assert "engine: {args: …}" in cause.fix


def test_of_several_faults_the_last_is_shown_first() -> None:
    """Its line is the news."""
    (finding,) = diagnose_reports(
        NodeReport(
            supervisor_files=record(
                "chat", "pausing", fault(at=NOW - 200, what="old"), fault(what="new")
            )
        )
    ).findings

    assert "new" in finding.evidence[0].line


def test_a_supervisor_that_gave_up() -> None:
    """It has no restarts left."""
    report = NodeReport(
        supervisor_files=record(
            "chat", "gave-up", fault(), since=NOW - 10, doing="restart limit of 3 reached in 1 h"
        )
    )

    assert kinds(diagnose_reports(report)) == [("now", "server-died"), ("now", "server-gave-up")]


def test_a_fault_with_a_recovery_is_resolved() -> None:
    """Faults of other servers are not."""
    good = record("chat", "ready", fault(ready_again_after=40.0), ready_at=NOW - 20)
    diagnosis = diagnose_reports(NodeReport(supervisor_files=good))

    assert (kinds(diagnosis), diagnosis.has_problem) == ([("over", "server-died")], False)
    assert "ready again after 40 s" in diagnosis.findings[0].evidence[0].line
    assert diagnose_reports(
        NodeReport(supervisor_files={**good, **record("embed", "pausing", fault())})
    ).has_problem


@pytest.mark.parametrize(
    "strange",
    [[], "x", None, {"version": 2}, {"version": 2, "state": "ready", "faults": [1, None]}],
)
def test_an_invalid_record_is_tolerated(strange: object) -> None:
    """A container may write any content."""
    assert (
        diagnose_reports(NodeReport(supervisor_files={"chat": {"observed": strange}})).findings
        == ()
    )


@pytest.mark.parametrize(
    ("state", "ids"),
    [
        (ContainerState(name="c", role="head", status="running"), []),
        (
            ContainerState(name="c", role="worker", status="exited", exit_code=1),
            [("after", "container-ended")],
        ),
        (ContainerState(name="c", role="probe", status="exited", exit_code=1), []),
        (
            ContainerState(name="c", role="worker", status="restarting", restarts=9),
            [("after", "container-restarts")],
        ),
        (
            ContainerState(name="c", role="worker", status="exited", exit_code=137, oom=True),
            [("now", "kernel-oom"), ("after", "container-ended")],
        ),
        (
            ContainerState(
                name="c", role="head", status="created", error='could not select device driver ""'
            ),
            [("now", "gpu-runtime")],
        ),
    ],
)
def test_docker_s_state_of_containers_is_evidence(
    state: ContainerState, ids: list[tuple[str, str]]
) -> None:
    """Logs do not show why a container was killed."""
    assert kinds(diagnose_reports(NodeReport(states=(state,)))) == ids


def test_missing_docker_permission_is_a_finding() -> None:
    """Gaps are evidence, too."""
    diagnosis = diagnose_reports(
        NodeReport(
            gaps={
                "containers": (
                    "permission denied while trying to connect to the Docker daemon socket"
                )
            }
        )
    )

    assert kinds(diagnosis) == [("now", "docker-permission")]
    assert diagnosis.gaps == (
        (
            "gpu01",
            "containers",
            "permission denied while trying to connect to the Docker daemon socket",
        ),
    )


@pytest.mark.parametrize("path", sorted(VLLM.glob("*_ok.log")), ids=lambda path: path.stem)
def test_healthy_starts_have_no_findings(path: Path) -> None:
    """Warnings are resolved once the server is ready."""
    assert not diagnose_reports(log(*path.read_text(encoding="utf-8").splitlines())).has_problem


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("fail_gloo_loopback", "gloo-interface"),
        ("fail_netcut", "node-lost"),
        ("fail_rank_killed", "rank-died"),
        ("fail_cpu_platform_refuses_ray", "cpu-without-ray"),
    ],
)
def test_recorded_failures_give_their_cause(name: str, first: str) -> None:
    """Before all of its effects."""
    text = untrusted.sanitize((VLLM / f"{name}.log").read_text(encoding="utf-8"))

    assert diagnose_reports(log(*text.split("\n"))).findings[0].id == first


def test_many_lines_are_fast_and_few_are_shown() -> None:
    """A node may repeat a line for hours; lines are counted up to a limit per log."""
    (finding,) = diagnose_reports(log(*[GLOO] * 20000)).findings

    assert (finding.count, len(finding.evidence)) == (200, 1)


WEDGE = Wedge(
    since=NOW - 70,
    rank="TP1",
    node="gpu02",
    frame="_spin (worker.py:13)",
    observations=["TP0 on gpu01: waiting for other ranks in all_reduce (x.py:1)"],
)
SUSPECT = {
    "verdict": "suspect",
    "reason": f"no step has ended for 70 s: {WEDGE.location}",
    "wedge": WEDGE,
    "written": NOW,
    "ready_at": NOW - 600,
}


def test_a_hanging_rank() -> None:
    """It is named with its node and frame, ahead of its effects."""
    diagnosis = diagnose_reports(
        NodeReport(supervisor_files=record("chat", "ready", **SUSPECT)),
        log((9, "No available shared memory broadcast block found in 60 seconds")),
    )

    assert kinds(diagnosis) == [("now", "rank-hangs"), ("perhaps", "rank-silent")]
    assert diagnosis.findings[0].evidence[0].line == (
        "server chat hangs: no step has ended for 70 s: rank TP1 on gpu02 in _spin (worker.py:13)"
    )
    assert diagnosis.has_problem


def test_a_hang_of_an_unknown_rank() -> None:
    """The activity of all ranks is listed instead."""
    reason = "no step has ended for 70 s: rank unknown"
    unknown = {**SUSPECT, "reason": reason, "wedge": replace(WEDGE, rank="", node="")}
    diagnosis = diagnose_reports(NodeReport(supervisor_files=record("chat", "ready", **unknown)))

    assert diagnosis.findings[0].evidence[0].line == (
        f"server chat hangs: {reason}; {WEDGE.observations[0]}"
    )


def test_a_quiet_server() -> None:
    """A long step is no failure."""
    quiet = {**SUSPECT, "verdict": "quiet", "wedge": None}

    assert kinds(
        diagnose_reports(NodeReport(supervisor_files=record("chat", "ready", **quiet)))
    ) == [("perhaps", "server-quiet")]
    assert (
        kinds(
            diagnose_reports(
                NodeReport(supervisor_files=record("chat", "ready", **{**quiet, "verdict": "busy"}))
            )
        )
        == []
    )


def test_a_fault_of_a_hanging_rank() -> None:
    """The record keeps its name, also after the server has recovered."""
    text = "no step had ended for 300 s: rank TP1 on gpu02 in _spin (worker.py:13)"
    hang = fault(what=text, rank="TP1", node="gpu02", evidence=WEDGE.observations[0])
    line = f"server chat: {text}"

    diagnosis = diagnose_reports(NodeReport(supervisor_files=record("chat", "pausing", hang)))
    assert kinds(diagnosis) == [("now", "rank-hangs")]
    assert diagnosis.findings[0].evidence[0].line == line

    diagnosis = diagnose_reports(
        NodeReport(supervisor_files=record("chat", "ready", hang, ready_at=NOW - 5))
    )
    assert kinds(diagnosis) == [("over", "rank-hangs")]
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(ui.render_diagnosis(diagnosis))
    assert line in console.export_text()


@pytest.mark.parametrize(
    ("lines", "version"),
    [
        (["[pynccl.py:111] vLLM is using nccl==2.28.9", "Model: \t\t NVIDIA GB10"], "2.28.9"),
        (["[pynccl.py:111] vLLM is using nccl==2.28.9", "Model: \t\t NVIDIA H100 80GB HBM3"], ""),
        (["NCCL version 2.29.2+cuda13.0"], "2.29.2+cuda13.0"),
        (["NCCL version 2.30.4+cuda13.0", "NCCL INFO NET/IB : Using [0]mlx5_0:1/IB"], "2.30.4"),
        (["NCCL version 2.30.4+cuda13.0", "NCCL INFO NET/Socket : Using [0]eth0"], ""),
        (["NCCL version 2.30.7+cuda13.0", "NCCL INFO NET/IB : Using [0]mlx5_0:1/IB"], ""),
        (
            [
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.05  Release Build "
                " (dvs-builder@U22)"
            ],
            "driver 560.35.05",
        ),
        (["NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Release Build"], ""),
    ],
)
def test_versions_with_known_hangs(lines: list[str], version: str) -> None:
    """They are reported only when a rank hangs."""
    suspect = NodeReport(supervisor_files=record("chat", "ready", **SUSPECT))
    findings = [
        finding
        for finding in diagnose_reports(suspect, log(*lines)).findings
        if finding.id == "known-to-hang"
    ]

    assert [finding.kind for finding in findings] == (["perhaps"] if version else [])
    assert not version or version in findings[0].evidence[0].line
    assert kinds(diagnose_reports(log(*lines))) == []
