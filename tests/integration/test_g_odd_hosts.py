"""Unusual hosts: each works, or is refused with one sentence.

docs/how-to/prepare-hosts.md lists them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

from benchmarks.faults import host_faults
from launcher.lab.layout import Host
from tests.integration.catalogue import run_checks
from tests.integration.conftest import LabCluster

pytestmark = [pytest.mark.lab, pytest.mark.long]

Document = dict[str, Any]


def _as_ops(document: Document) -> None:
    for node in document["nodes"]:
        node["ssh"] = {"user": "ops"}
    document["docker"] = ["sudo", "-n", "docker"]


@contextmanager
def _added_line(host: Host, path: str, text: str) -> Iterator[None]:
    """Add a line to a file of a host inside the block."""
    file = host.root / path
    before = file.read_text() if file.exists() else None
    mode = file.stat().st_mode if before is not None else 0o644
    file.chmod(0o644) if before is not None else None
    file.write_text(f"{text}\n{before or ''}")
    file.chmod(mode)
    try:
        yield
    finally:
        file.write_text(before) if before is not None else file.unlink()


@contextmanager
def _mounted(host: Host, *options: str, target: str) -> Iterator[None]:
    """Mount a file system on a host inside the block."""
    completed = host_faults.enter(host, "mount", *options, target)
    assert completed.returncode == 0, completed.stderr
    try:
        yield
    finally:
        host_faults.enter(host, "umount", "--lazy", target)


@pytest.fixture
def node2(lab_cluster: LabCluster) -> Iterator[Host]:
    """A host to change, in a cluster that is down."""
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0
    yield lab_cluster.lab.host("node2")
    lab_cluster.write()


@pytest.mark.parametrize(
    "line", ["echo welcome; echo hint >&2", "echo before; return 0", "sleep 2", "cd /tmp; ls"]
)
def test_output_of_a_login_shell_is_ignored(
    lab_cluster: LabCluster, node2: Host, line: str
) -> None:
    """The output of a shell's start-up files is no part of a command's output."""
    with _added_line(node2, "root/.bashrc", line):
        result = lab_cluster.vlaunch("exec", "--host", "-n", "node2", "--", "echo", "only this")

    assert (result.code, "welcome" in result.output, "only this" in result.out) == (
        0,
        False,
        True,
    ), result.output


REFUSED: dict[str, tuple[Callable[[Host], AbstractContextManager[None]], str, str, str]] = {
    "requiretty": (
        lambda host: _added_line(host, "etc/sudoers", "Defaults requiretty"),
        "sudo",
        "sudo runs `sudo -n docker` only from a terminal",
        "Defaults:ops !requiretty",
    ),
    "full home": (
        lambda host: _mounted(
            host,
            "-t",
            "tmpfs",
            "-o",
            "size=1m,mode=700,uid=1000",
            "small",
            target="/home/ops/.vlaunch",
        ),
        "state-dir",
        "1 MiB free for /home/ops/.vlaunch/lab, 64 MiB needed",
        "`state_dir:`",
    ),
    "read-only": (
        lambda host: _mounted(
            host, "-t", "tmpfs", "-o", "ro", "locked", target="/home/ops/.vlaunch"
        ),
        "state-dir",
        "/home/ops/.vlaunch/lab is on a read-only file system",
        "`state_dir:`",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_an_unusable_host_is_refused_by_check_and_up(
    lab_cluster: LabCluster, node2: Host, how: str
) -> None:
    """With one sentence and a fix, before anything is written."""
    spoil, id_, text, fix = REFUSED[how]
    lab_cluster.write(_as_ops)
    lab_cluster.on("node2", "install", "-d", "-o", "ops", "/home/ops/.vlaunch")
    with spoil(node2):
        finding = run_checks(lab_cluster, code=1).only_finding(id_)
        result = lab_cluster.vlaunch("up")

    assert finding["node"] == "node2"
    assert text in finding["text"], finding
    assert fix in finding["fix"], finding
    assert result.code == 1
    assert text in result.err
    assert lab_cluster.containers() == {}


def test_noexec_on_tmp_is_no_trouble(lab_cluster: LabCluster, node2: Host) -> None:
    """The launcher starts nothing from it."""
    with _mounted(node2, "-t", "tmpfs", "-o", "noexec,mode=1777", "noexec", target="/tmp"):
        result = lab_cluster.vlaunch("up", timeout=400)
        assert result.code == 0, result.output
        assert lab_cluster.vlaunch("down", "--yes").code == 0


@pytest.mark.parametrize("slow", [False, True])
def test_a_name_server_that_does_not_answer(
    lab_cluster: LabCluster, node2: Host, slow: bool
) -> None:
    """The check names it; the network check continues, with a warning."""
    spoil = host_faults.broken_dns(lab_cluster.lab, node2) if slow else nullcontext()
    with spoil:
        result = lab_cluster.vlaunch("check", "--json", "--only", "names-resolve")
        assert lab_cluster.vlaunch("up", timeout=400).code == 0
        network = lab_cluster.vlaunch("check-nccl", "--json", timeout=500)
    rows = json.loads(result.out)["checks"][0]["findings"]

    assert [(row["node"], row["status"]) for row in rows] == (
        [("node1", "pass"), ("node2", "warn")] if slow else [("node[1-2]", "pass")]
    )
    assert network.code == 0, network.output
    warned = [row for row in json.loads(network.out)["findings"] if row["status"] == "warn"]
    assert any("names of node1" in row["text"] for row in warned) is slow
