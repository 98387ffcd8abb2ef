"""`vlaunch lock`: who holds the cluster's lock, and how it is broken, with real processes on this
machine.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli.main import run_command
from launcher.core.domain import Answer
from tests.command_line import ANNA, INVENTORY, Cluster, held
from tests.ssh import processes

pytestmark = pytest.mark.processes


def test_nor_does_it_make_two_lines_of_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second would pass for one of ours."""
    wild = json.dumps({"who": "a\nc: the lock is free", "pid": 4242})
    monkeypatch.setattr(
        cluster.world, "answer", lambda _: Answer(node="gpu01", code=0, out=f"held {wild}\n")
    )
    ran = cluster.run("lock")

    assert ran.code == 0
    assert len(ran.out.splitlines()) == 1


def test_hints_name_the_folder_that_the_inventory_chose(
    up: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the one that it would have been."""
    up.write(f"{INVENTORY}state_dir: /srv/state\n")
    up.lock = [Answer(node="gpu01", code=73, err="mkdir: cannot create: Read-only file system")]
    assert "`ls -ld /srv/state/locks`" in up.run("up").err
    monkeypatch.setattr(up.world, "answer", lambda _: Answer(node="gpu01", code=0, out="held \n"))

    assert "`fuser -v /srv/state/locks/c`" in up.run("lock", "--break", "--yes").err


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
def test_a_lock_that_cannot_be_broken(
    cluster: Cluster, owner: str, answer: Answer, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another login, of somebody else by now, or of nobody knows whom: it is not called
    broken.
    """
    nodes = {"lock-look": Answer(node="gpu01", code=0, out=f"held {owner}\n"), "lock-break": answer}
    monkeypatch.setattr(cluster.world, "answer", lambda command: nodes[command.argv[3]])
    ran = cluster.run("lock", "--break", "--yes")

    assert (ran.code, ran.out) == (1, "")
    assert expected in ran.err


def test_a_head_that_does_not_say_who_holds_the_lock(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is an error, and not a lock that nobody holds."""
    silent = Answer(
        node="gpu01", code=77, err="sh: cannot create /root/.vlaunch/locks/c: Permission denied"
    )
    monkeypatch.setattr(cluster.world, "answer", lambda _: silent)
    ran = cluster.run("lock")

    assert (ran.code, ran.out) == (1, "")
    assert "Permission denied" in ran.err


def test_a_broken_lock_stops_its_owner_and_says_who_did_it(
    here: Path,
    launch: Callable[..., subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose it is is shown; there is a line about it on the head; the owner learns it before the
    next step.
    """
    monkeypatch.setenv("LOGNAME", "eve")
    first = launch("stop")
    assert processes.awaited((here / "asked").exists)

    assert run_command(["lock", "--break"]) == 2  # there is no terminal to ask in
    assert "held by anna@" in capsys.readouterr().err
    assert held(capsys)
    assert run_command(["lock", "--break", "--yes"]) == 0
    assert capsys.readouterr().out.startswith("c: lock released; it was held by anna@")
    assert not held(capsys)
    (here / "go").touch()
    _, err = first.communicate(timeout=30)

    assert first.returncode == 1
    assert "error: me: eve@" in err and "broke the cluster's lock" in err
    (line,) = (here / "state/audit/c.ndjson").read_text().splitlines()
    assert (
        json.loads(line)["who"] == "eve"
        and "breaking the lock of anna@" in json.loads(line)["changes"][0]
    )


def test_a_lock_that_nobody_holds_needs_no_breaking(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said, and is no failure."""
    assert run_command(["lock", "--break", "--yes"]) == run_command(["lock"]) == 0
    assert capsys.readouterr().out == "c: the lock is free\n" * 2
    assert run_command(["lock", "--yes"]) == 2
