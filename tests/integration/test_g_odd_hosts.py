"""Hosts that are unlike those of a laboratory: each works, or is refused with one sentence.

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
from tests.integration.catalogue import check
from tests.integration.conftest import Practice

pytestmark = [pytest.mark.lab, pytest.mark.long]

Document = dict[str, Any]


def _as_ops(document: Document) -> None:
    for node in document["nodes"]:
        node["ssh"] = {"user": "ops"}
    document["docker"] = ["sudo", "-n", "docker"]


@contextmanager
def _line(host: Host, path: str, text: str) -> Iterator[None]:
    """Add a line to a file of a host, and take it out again."""
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
def _mounted(host: Host, *words: str, at: str) -> Iterator[None]:
    """Mount something on a host for a while."""
    done = host_faults.enter(host, "mount", *words, at)
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        host_faults.enter(host, "umount", "--lazy", at)


@pytest.fixture
def node2(practice: Practice) -> Iterator[Host]:
    """A host to spoil, in a cluster that is not up."""
    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0
    yield practice.lab.host("node2")
    practice.write()


@pytest.mark.parametrize(
    "line", ["echo welcome; echo hint >&2", "echo before; return 0", "sleep 2", "cd /tmp; ls"]
)
def test_a_login_that_talks_is_not_listened_to(practice: Practice, node2: Host, line: str) -> None:
    """What a shell's start-up files print is none of a command's output."""
    with _line(node2, "root/.bashrc", line):
        ran = practice.vlaunch("exec", "--host", "-n", "node2", "--", "echo", "only this")

    assert (ran.code, "welcome" in ran.said, "only this" in ran.out) == (0, False, True), ran.said


REFUSED: dict[str, tuple[Callable[[Host], AbstractContextManager[None]], str, str, str]] = {
    "requiretty": (
        lambda host: _line(host, "etc/sudoers", "Defaults requiretty"),
        "sudo",
        "sudo runs `sudo -n docker` only from a terminal",
        "Defaults:ops !requiretty",
    ),
    "full home": (
        lambda host: _mounted(
            host, "-t", "tmpfs", "-o", "size=1m,mode=700,uid=1000", "small", at="/home/ops/.vlaunch"
        ),
        "state-dir",
        "1 MiB free for /home/ops/.vlaunch/lab, 64 MiB needed",
        "`state_dir:`",
    ),
    "read-only": (
        lambda host: _mounted(host, "-t", "tmpfs", "-o", "ro", "locked", at="/home/ops/.vlaunch"),
        "state-dir",
        "/home/ops/.vlaunch/lab is on a read-only file system",
        "`state_dir:`",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_work_is_refused_by_check_and_by_up(
    practice: Practice, node2: Host, how: str
) -> None:
    """With one sentence and a fix, before anything is written."""
    spoil, id_, text, fix = REFUSED[how]
    practice.write(_as_ops)
    practice.on("node2", "install", "-d", "-o", "ops", "/home/ops/.vlaunch")
    with spoil(node2):
        found = check(practice, code=1).one(id_)
        ran = practice.vlaunch("up")

    assert found["node"] == "node2"
    assert text in found["text"], found
    assert fix in found["fix"], found
    assert ran.code == 1
    assert text in ran.err
    assert practice.containers() == {}


def test_noexec_on_tmp_is_no_trouble(practice: Practice, node2: Host) -> None:
    """Nothing of the launcher's is started from there."""
    with _mounted(node2, "-t", "tmpfs", "-o", "noexec,mode=1777", "noexec", at="/tmp"):
        ran = practice.vlaunch("up", timeout=400)
        assert ran.code == 0, ran.said
        assert practice.vlaunch("down", "--yes").code == 0


@pytest.mark.parametrize("slow", [False, True])
def test_a_name_server_that_does_not_answer(practice: Practice, node2: Host, slow: bool) -> None:
    """The check names it; the network probe goes on all the same, and warns of it."""
    spoil = host_faults.lost_names(practice.lab, node2) if slow else nullcontext()
    with spoil:
        ran = practice.vlaunch("check", "--json", "--only", "names-resolve")
        assert practice.vlaunch("up", timeout=400).code == 0
        network = practice.vlaunch("check-nccl", "--json", timeout=500)
    rows = json.loads(ran.out)["checks"][0]["findings"]

    assert [(each["node"], each["status"]) for each in rows] == (
        [("node1", "pass"), ("node2", "warn")] if slow else [("node[1-2]", "pass")]
    )
    assert network.code == 0, network.said
    warned = [each for each in json.loads(network.out)["findings"] if each["status"] == "warn"]
    assert any("names of node1" in each["text"] for each in warned) is slow
