"""`vlaunch lock`, with real local processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli.main import run_command
from launcher.core.domain import Answer
from tests.command_line import ANNA, INVENTORY, Cluster, is_locked
from tests.ssh import processes

pytestmark = pytest.mark.processes


def test_the_owner_is_one_line(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second line could imitate our output."""
    wild = json.dumps({"who": "a\nc: the lock is free", "pid": 4242})
    monkeypatch.setattr(
        cluster.world, "answer", lambda _: Answer(node="gpu01", code=0, out=f"held {wild}\n")
    )
    ran = cluster.run("lock")

    assert ran.code == 0
    assert len(ran.out.splitlines()) == 1


def test_hints_name_the_configured_folder(up: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the default one."""
    up.write(f"{INVENTORY}state_dir: /srv/state\n")
    up.lock = [Answer(node="gpu01", code=73, err="mkdir: cannot create: Read-only file system")]
    assert "`ls -ld /srv/state/locks`" in up.run("up").err
    monkeypatch.setattr(up.world, "answer", lambda _: Answer(node="gpu01", code=0, out="held \n"))

    assert "`fuser -v /srv/state/locks/c`" in up.run("lock", "break", "--yes").err


@pytest.mark.parametrize(
    ("owner", "answer", "expected"),
    [
        (
            ANNA,
            Answer(node="gpu01", code=77, err="kill: (4242): Operation not permitted"),
            "on gpu01, as its user or root: `kill 4242`",
        ),
        (
            ANNA,
            Answer(node="gpu01", code=0, out="changed\n"),
            "another operator has taken the lock",
        ),
        (
            ANNA,
            Answer(node="gpu01", code=0, out="stranger\n"),
            "process 4242 does not hold the lock",
        ),
        (
            "",
            Answer(node="gpu01", code=0, out="freed\n"),
            "cannot find the process that holds the lock",
        ),
    ],
)
def test_an_unbreakable_lock(
    cluster: Cluster, owner: str, answer: Answer, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another user, of a new owner, or of an unknown one: it is not reported as broken."""
    nodes = {"lock-look": Answer(node="gpu01", code=0, out=f"held {owner}\n"), "lock-break": answer}
    monkeypatch.setattr(cluster.world, "answer", lambda command: nodes[command.argv[3]])
    ran = cluster.run("lock", "break", "--yes")

    assert (ran.code, ran.out) == (1, "")
    assert expected in ran.err


def test_an_owner_that_is_missing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, not a free lock."""
    silent = Answer(
        node="gpu01", code=77, err="sh: cannot create /root/.vlaunch/locks/c: Permission denied"
    )
    monkeypatch.setattr(cluster.world, "answer", lambda _: silent)
    ran = cluster.run("lock")

    assert (ran.code, ran.out) == (1, "")
    assert "Permission denied" in ran.err


def test_a_broken_lock_stops_its_owner(
    local_cluster: Path,
    launch: Callable[..., subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner is shown, and stops before its next step; the head's audit trail has a line."""
    monkeypatch.setenv("LOGNAME", "eve")
    first = launch("down", "--yes")
    assert processes.awaited((local_cluster / "asked").exists)

    assert run_command(["lock", "break"]) == 2  # there is no terminal to ask in
    assert "held by anna@" in capsys.readouterr().err
    assert is_locked(capsys)
    assert run_command(["lock", "break", "--yes"]) == 0
    assert capsys.readouterr().out.startswith("c: lock released; it was held by anna@")
    assert not is_locked(capsys)
    (local_cluster / "go").touch()
    _, err = first.communicate(timeout=60)

    assert first.returncode == 1
    assert "error: me: eve@" in err and "broke the cluster's lock" in err
    (line,) = (local_cluster / "state/audit/c.ndjson").read_text().splitlines()
    assert (
        json.loads(line)["who"] == "eve"
        and "breaking the lock of anna@" in json.loads(line)["changes"][0]
    )


def test_a_free_lock_is_not_broken(local_cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is reported, and is no failure."""
    assert run_command(["lock", "break", "--yes"]) == run_command(["lock"]) == 0
    assert capsys.readouterr().out == "c: the lock is free\n" * 2
    assert run_command(["lock", "--yes"]) == 2
