"""Known failures: entries, their examples, and recorded and public logs."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import yaml

from launcher.diagnose.doctor import diagnose
from launcher.diagnose.log_files import read_logs
from launcher.failures import data
from launcher.failures.explain import explain
from launcher.failures.frames import split_lines
from launcher.failures.match import describe_end, describe_error, find_failures, first_failure
from launcher.failures.table import MODES, Failure, load_failures, parse_patterns

LOGS = Path(__file__).parent.parent / "fixtures" / "vllm"
FAILURES = load_failures().values()
MATCHED = [failure for failure in FAILURES if failure.match and failure.kind != "unknown"]
GENERAL = [failure for failure in FAILURES if failure.kind == "unknown"]


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(LOGS.glob("*_ok.log")), ids=lambda path: path.stem)
def test_healthy_starts_have_no_fatal_line(path: Path) -> None:
    """Warnings of a successful start, together or singly, do not stop the wait for it."""
    text = path.read_text(encoding="utf-8")

    assert [match for line in text.splitlines() if (match := explain(line)) and match.fatal] == []


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("fail_cpu_platform_refuses_ray", "this image's CPU build has no Ray platform plugin"),
        ("fail_cpu_shm_across_hosts", "the engine failed"),
        ("fail_gloo_loopback", "Gloo uses the wrong network interface"),
        ("fail_enforce_eager", "a rank died"),
        ("fail_rank_killed", "a rank died"),
        (
            "fail_netcut",
            "the head lost contact with the node: a one-way firewall, an overloaded node, or its"
            " raylet or container ended",
        ),
        ("fail_mp_headless_killed", "another rank ended or hangs, so Gloo lost it"),
    ],
)
def test_failures_give_their_cause(name: str, cause: str) -> None:
    """It comes before its consequences, is fatal, and shows its line without colour codes."""
    match = explain(log(name))

    assert match is not None
    assert (cause, True) == (match.cause, match.fatal)
    assert "\x1b" not in match.line
    assert match.fix


def test_a_waiting_placement_group_is_not_fatal() -> None:
    """A node may still join: only a wait of thirty seconds is worth a message."""
    match = explain(log("pending_placement_group_ok"))

    assert match is not None
    assert not match.fatal
    assert "too few free GPUs" in match.cause
    assert (
        explain("Waiting for creating a placement group of specs for 10 seconds. specs=[]") is None
    )


@pytest.mark.parametrize(
    "line",
    [
        "requests.exceptions.HTTPError: 401 Client Error: Unauthorized",
        "OSError: [Errno 98] Address already in use",
        "gpu01:155:921 [0] ibvwrap.cc:171 NCCL WARN Call to ibv_reg_mr failed with error Cannot"
        " allocate memory",
        "WARNING 11-20 20:14:02 [x.py:1] RuntimeError: CUDA error: an illegal memory access",
    ],
)
def test_optional_or_repeated_steps_are_not_fatal(line: str) -> None:
    """An optional file may be missing, the next port may be free, and NCCL may use TCP: a server
    that needs them exits by itself.
    """
    match = explain(line)

    assert match is not None
    assert not match.fatal


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "vllm serve: error: unrecognized arguments: --nope 3",
            "vLLM rejected an argument: `--nope 3`",
        ),
        ("OSError: [Errno 98] Address already in use", "a port is already in use"),
        ("/bin/sh: 1: nvcc: not found", None),
        ("WARNING 11-24 11:15:42 [x.py:1] eager: RuntimeError: Could not find nvcc", None),
        (
            "(Worker pid=7) ERROR 11-24 11:15:42 [x.py:1] RuntimeError: Could not find nvcc and"
            " default cuda_home='/usr/local/cuda' doesn't exist",
            "no nvcc is found, with which FlashInfer and DeepGEMM compile kernels at run time (the"
            " image has no CUDA toolkit, or CUDA_HOME is wrong)",
        ),
        ("Port 8000 is already in use, trying port 8001", None),
        ("bash: ray: command not found", "the image has no Ray"),
        (
            'docker: could not select device driver "" with capabilities: [[gpu]].',
            "Docker cannot expose GPUs to containers",
        ),
        (
            "Failed core proc(s): {'EngineCore': -9}",
            "the engine was killed, most likely for lack of host memory",
        ),
        (
            "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running low",
            "a node ran out of host memory, and Ray killed a process: loading weights, CPU offload"
            " or sleep mode of several engines, or another program needs too much",
        ),
        (
            "torch.AcceleratorError: CUDA error: device-side assert triggered",
            "a kernel crashed on the GPU: a bug in vLLM or torch, perhaps triggered by a request",
        ),
        (
            "torch.AcceleratorError: CUDA error: invalid device ordinal",
            "a rank uses the number of a GPU that its container does not have",
        ),
        (  # vLLM 0.33
            "ValueError: The worker already uses 5.2 GiB (model weights and runtime), more than the"
            " 4.0 GiB of CPU memory reserved for it on node 0, leaving none for the KV cache.",
            "no memory is left for a KV cache of the model's context",
        ),
        (
            "ValueError: Available memory on node 0 (1.0/8.0 GiB) on kv cache allocation is less"
            " than requested memory for kv (4.0 GiB).",
            "the free host memory is less than the engine's share",
        ),
        (
            "Node is dead because the health check failed.",
            "the head lost contact with the node: a one-way firewall, an overloaded node, or its"
            " raylet or container ended",
        ),
        (
            "NCCL WARN socketPollConnect: connect to 10.0.0.12<43007> returned Connection refused,"
            " exceeded error retry count after 34 attempts",
            "NCCL cannot reach the address 10.0.0.12 of another rank: a wrong interface, or a"
            " firewall",
        ),
        ("INFO: everything is fine", None),
        ("vlaunch: an engine of batch job prompts-7990e1e1", None),
    ],
)
def test_lines(line: str, cause: str | None) -> None:
    """Single lines as logged."""
    match = explain(line)

    assert cause == (match.cause if match else None)


@pytest.mark.parametrize("failure", MATCHED, ids=lambda failure: failure.id)
def test_every_entry_knows_its_example(failure: Failure) -> None:
    """No other entry is more specific."""
    mode = next(iter(failure.batch), "") if failure.layer == "batch" else ""
    lines = split_lines(failure.example)
    matches = find_failures(lines, rdma=failure.rdma, mode=mode)

    assert failure.id in [match.failure.id for match in matches]
    first = min(matches, key=lambda match: match.rank)
    assert first.failure.id == failure.id


@pytest.mark.parametrize("failure", GENERAL, ids=lambda failure: failure.id)
def test_errors_without_an_entry_are_described_by_their_code(failure: Failure) -> None:
    """Or by the step at which a log ends. The entries before it do not match its example."""
    origin, bar, error = failure.example.partition(" | ")
    found = describe_error(error, origin) if bar else describe_error(origin, "")
    match = describe_end(split_lines(failure.example)) if failure.last else found

    assert match is not None
    assert match.failure.id == failure.id
    assert "{0}" not in match.cause


def test_other_lines_count_only_near_a_failure() -> None:
    """Those of another start explain nothing; a later success excludes, an earlier one does not."""
    error, place, success = (
        "torch.OutOfMemoryError: CUDA out of memory.",
        '  File "/vllm/v1/worker/gpu_model_runner.py", line 9, in profile_run',
        "Application startup complete.",
    )
    retry = load_failures()["rendezvous-retry"].example
    far = ["fine"] * 600

    def ids(*lines: str) -> set[str]:
        return {match.failure.id for match in find_failures(lines)}

    assert "profile-out-of-memory" in ids(place, error)
    assert "profile-out-of-memory" not in ids(place, *far, error)
    assert "rendezvous-retry" in ids(success, *far, retry)
    assert "rendezvous-retry" not in ids(retry, *far, success)


def test_an_rdma_failure_counts_only_with_rdma() -> None:
    """On Ethernet NCCL has no devices."""
    line = load_failures()["rdma-unseen"].example

    assert first_failure([line]) is None


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.id)
def test_entries_are_complete(failure: Failure) -> None:
    """Ids are headings of the documentation; texts are clauses."""
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", failure.id)
    assert failure.source and failure.example
    assert failure.fix or failure.vlaunch or failure.batch
    assert set(failure.batch) <= {"*", *MODES}
    for text in (failure.cause, failure.fix, failure.vlaunch, *failure.batch.values()):
        assert not text.endswith(".")
        assert "  " not in text
    if "{0}" in failure.cause + failure.fix + failure.vlaunch:
        assert any(
            pattern.regex.groups for text in failure.match for pattern in parse_patterns(text)
        )


@pytest.mark.parametrize("failure", MATCHED, ids=lambda failure: failure.id)
def test_patterns_have_a_literal(failure: Failure) -> None:
    """A pattern is only tried on lines that have it; without one, all lines would be tried."""
    for text in (*failure.match, *failure.unless, *failure.needs):
        for pattern in parse_patterns(text):
            assert len(pattern.literal.strip()) > 2, text


def test_ids_are_unique() -> None:
    """In all files together, and each has a file."""
    entries = data.load_entries()

    assert len(entries) == len(FAILURES)
    assert {path.stem for path in data.FOLDER.glob("*.yaml")} == set(data.LAYERS)


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        (r"no (?:CUDA|HIP) GPUs are available", " gpus are available"),
        (r"Errors? 80[34]: system", ": system"),
        (r"colou?r \(x\)", "r (x)"),
        (r"(?:an upstream text) of (?:one|two) kinds", "an upstream text of "),
        (r"^a+b{2,3}c\.so$", "c.so"),
        (r"unset(?: it)?", "unset"),
    ],
)
def test_the_literal_of_a_pattern(pattern: str, literal: str) -> None:
    """It is in every line that matches, in lower case."""
    assert parse_patterns(pattern)[0].literal == literal


def test_the_most_specific_pattern_wins() -> None:
    """A full disk is no cause where the message names /dev/shm; effects come last."""
    line = (
        "NCCL WARN Error: failed to extend /dev/shm/nccl-Ab12 to 33030532 bytes, error: No space"
        " left on device (28)"
    )
    match = first_failure(["EngineDeadError: x", line])

    assert match is not None
    assert (match.failure.id, match.line) == ("shm-too-small", 1)


def _public(folder: str) -> list[dict[str, str]]:
    root = Path(__file__).parent.parent / "fixtures" / "failures"
    paths = sorted((root / folder).glob("*.yaml")) if folder else [root / "healthy.yaml"]
    return [entry for path in paths for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("entry", _public(""), ids=lambda entry: entry["source"])
def test_healthy_public_logs_have_no_failure(entry: dict[str, str], tmp_path: Path) -> None:
    """Warnings of servers that work, and the ends of those that were stopped; none stops the wait
    for a start.
    """
    path = tmp_path / "server.log"
    path.write_text(entry["log"], encoding="utf-8")
    reports = read_logs((str(path),))
    diagnosis = diagnose(reports, {}, rdma=False, now=time.time(), elsewhere=True)

    running = entry["log"].partition("[shutdown]")[0].splitlines()
    assert not diagnosis.has_problem, diagnosis.findings
    assert [line for line in running if (match := explain(line)) and match.fatal] == []


@pytest.mark.parametrize(("folder", "least"), [("known", 0.97), ("held_out", 0.75)])
def test_most_public_failures_have_a_finding(folder: str, least: float) -> None:
    """A cause or a possible one; tests/fixtures/failures/README.md has judged figures."""
    found = [first_failure(split_lines(entry["log"], copied=True)) for entry in _public(folder)]
    named = [match for match in found if match and match.failure.kind != "effect"]

    assert len(named) / len(found) >= least
