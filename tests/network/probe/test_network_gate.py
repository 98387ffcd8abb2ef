"""The network check of exported pods: rejections, and its process."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher.network import archive as network_archive
from launcher.tools.shipped import zipapps
from tests.network.probe.conftest import FOLDER, PATH
from tests.ports import free_port
from tests.ssh import processes


@pytest.fixture
def gate(payload: SimpleNamespace) -> Iterator[ModuleType]:
    """The module with the archive's other modules."""
    assert payload
    yield importlib.import_module("network_gate")
    for name in ("network_gate", "network_links"):
        sys.modules.pop(name, None)


RANK = {"rank": 0, "phase": "done", "ended": True, "error": ""}
PAIR = {"source": "rank1", "target": "rank0", "local_rank": 0, "correct": True}
GOOD: dict[str, Any] = {
    "error": "",
    "backend": "nccl",
    "ranks": [RANK],
    "transfers": [{**PAIR, "bandwidth": 47e9, "latency": 12e-6, "error": ""}],
    "collective": {"ranks": 16, "busbw": 300e9, "correct": True, "error": ""},
}
LINK = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via {}\n"
DIRECT, RDMA, TCP = (LINK.format(f"NET/{link}") for link in ("IB/0/GDRDMA", "IB/0", "Socket/0"))


@pytest.mark.parametrize(
    ("require", "log", "messages"),
    [
        ("gdrdma", DIRECT, []),
        ("gdrdma", DIRECT + LINK.format("P2P/CUMEM"), []),
        ("gdrdma", LINK.format("P2P/MNNVL"), []),
        ("rdma", RDMA, []),
        ("any", TCP, []),
        ("any", "", []),
        ("gdrdma", DIRECT + RDMA, ["NET/IB on 1 links reaches `rdma`, but `gdrdma` is required"]),
        ("rdma", TCP * 2, ["NET/Socket on 2 links reaches `any`, but `rdma` is required"]),
        ("rdma", "", ["NCCL's log names no link between nodes, but `rdma` is required"]),
        (
            "rdma",
            "NET/OFI Selected provider is tcp (found 1 nics)\n" + LINK.format("NET/OFI/0"),
            ["NET/OFI on 1 links reaches `any`, but `rdma` is required"],
        ),
    ],
)
def test_every_link_must_reach_the_level(
    gate: ModuleType, require: str, log: str, messages: list[str]
) -> None:
    """By NCCL's log, not by speed."""
    assert gate.judge(GOOD, require, log) == messages


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"error": "the deadline of 9 s passed"}, "the check: the deadline of 9 s passed"),
        ({"ranks": [{**RANK, "ended": False, "error": ""}]}, "rank 0 in phase `done`: it did not"),
        ({"transfers": [{**PAIR, "error": "no end"}]}, "rank1 → rank0, local rank 0: no end"),
        ({"transfers": [{**PAIR, "correct": False}]}, "received other bytes than were sent"),
        ({"collective": None}, "no rank reached the all_reduce"),
        ({"collective": {"error": "not tried: bad"}}, "all_reduce: not tried: bad"),
        ({"collective": {"error": "", "correct": False}}, "all_reduce: wrong result"),
    ],
)
def test_incomplete_reports_fail(gate: ModuleType, part: dict[str, Any], expected: str) -> None:
    """For every part of the report."""
    (finding,) = gate.judge({**GOOD, **part}, "any", DIRECT)

    assert expected in finding


def test_cpus_have_no_rdma(gate: ModuleType) -> None:
    """Gloo uses TCP on any card."""
    assert gate.judge({**GOOD, "backend": "gloo"}, "any", "") == []
    assert gate.judge({**GOOD, "backend": "gloo"}, "rdma", "") != []


def test_the_figures_are_printed(gate: ModuleType) -> None:
    """A line per direction, and one for the collective."""
    assert gate.format_measurements(GOOD) == [
        "rank1 → rank0, local rank 0: 47.00 GB/s, 12 µs",
        "all_reduce over 16 ranks: 300.00 GB/s bus bandwidth",
    ]


def options(rank: int, port: int, wait: float = 30) -> list[str]:
    """Return the options of one of two pods."""
    return [
        *("--rank", str(rank), "--size", "2", "--master", "127.0.0.1", "--port", str(port)),
        *("--nonce", "pair", "--ranks-per-node", "1", "--backend", "gloo", "--require", "any"),
        *("--wait", f"{wait:g}", "--deadline", "30", "--"),
    ]


def start(program: list[str | Path], *args: str, **env: str) -> subprocess.Popen[str]:
    """Start a check."""
    return subprocess.Popen(
        [sys.executable, *program, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PATH, "VLLM_HOST_IP": "127.0.0.1", **env},
    )


def judged(wrong: list[str]) -> list[str | Path]:
    """Return a program with a fake measurement and this verdict."""
    return [
        "-c",
        f"import network_gate as gate; gate.check_network = lambda _: {wrong}; gate.main()",
    ]


@pytest.mark.processes
def test_a_passed_check_becomes_the_command() -> None:
    """In the same process, with the usual signals."""
    command = "echo $$; kill -PIPE $$; echo it lives"
    with start(judged([]), *options(0, 1), "sh", "-c", command) as process:
        out, _ = process.communicate(timeout=60)

    assert out.splitlines() == [
        "look network check of pod 0 of 2",
        "PASS every link between the 2 pods reaches `any`",
        str(process.pid),
    ]
    assert process.returncode == -signal.SIGPIPE


@pytest.mark.processes
def test_a_failed_check_waits() -> None:
    """With the reason in its log, until the pod is deleted; the command does not start."""
    with start(judged(["too slow"]), *options(0, 1), "echo", "started") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.terminate()
        rest, _ = process.communicate(timeout=60)

    assert lines[1:] == [
        "FAIL too slow\n",
        "FAIL `echo` is not started; this log stays until the pod restarts\n",
    ]
    assert (rest, process.returncode) == ("", 128 + signal.SIGTERM)


@pytest.mark.processes
def test_an_archive_measures(tmp_path: Path) -> None:
    """Two pods connect; without torch their ranks fail, and both report the reason."""
    archive, port = tmp_path / "network.pyz", free_port()
    archive.write_bytes(zipapps.pack(network_archive.files()))
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    env = {"PYTHONPATH": str(tmp_path)}
    pods = [start([archive], *options(rank, port), "echo", "started", **env) for rank in (0, 1)]
    for rank, process in enumerate(pods):
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while lines[-1] and "is not started" not in lines[-1]:
            lines.append(process.stdout.readline())
        assert f"FAIL rank {rank} in phase `importing torch`: " in "".join(lines)
        assert "no torch here" in "".join(lines)
    for process in pods:
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.processes
def test_a_deleted_pod_stops_the_check(tmp_path: Path) -> None:
    """At once, without a verdict."""
    imported = tmp_path / "imported"
    (tmp_path / "torch.py").write_text(
        f"import pathlib, time; pathlib.Path({str(imported)!r}).touch(); time.sleep(600)"
    )
    path = f"{PATH}:{tmp_path}"
    with start([FOLDER], *options(0, free_port()), "echo", "started", PYTHONPATH=path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert processes.awaited(imported.exists)
        process.terminate()
        rest, _ = process.communicate(timeout=60)

    assert (rest, process.returncode) == ("", 128 + signal.SIGTERM)


def test_names_are_resolved_at_every_attempt(
    payload: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS records of pods appear late; a missing one fails the check."""
    answers = iter([socket.gaierror(-2, "Name or service not known"), "connected"])

    def connect(*_: object, **__: object) -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(payload.start.socket, "create_connection", connect)
    monkeypatch.setattr(payload.start, "PAUSE", 0.0)
    assert payload.start.connect("pair-0.pair", 1, 5.0) == "connected"
    answers = iter([socket.gaierror(-2, "Name or service not known")] * 100_000)
    with pytest.raises(
        payload.start.RendezvousError, match=r"pair-0\.pair:1 within 0 s: name or service"
    ):
        payload.start.connect("pair-0.pair", 1, 0.1)
