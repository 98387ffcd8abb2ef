"""Whether a process of this machine is dead: said only when it is certain."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launcher.app import process
from tests.ssh import processes


def of(pid: int) -> str:
    """Return what the process would say of itself."""
    place = process.own().rpartition(":")[0].rpartition(":")[0]
    return f"{place}:{pid}:{process._start(pid)}"


def test_one_that_lives_is_not_dead() -> None:
    """We ourselves, and a child."""
    with subprocess.Popen(["sleep", "60"]) as child:
        assert (process.dead(process.own()), process.dead(of(child.pid))) == (False, False)
        child.kill()


def test_one_that_has_ended_is_dead() -> None:
    """Also while nobody has asked for its exit code, and when its number belongs to another one by
    now.
    """
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) as child:
        text = of(child.pid)
        child.kill()
        assert child.stdout is not None
        assert child.stdout.read() == b""
        assert processes.awaited(lambda: process.dead(text), within=10)
    assert process.dead(text)
    assert process.dead(f"{process.own().rpartition(':')[0]}:1")


def test_where_others_processes_are_hidden_nobody_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `hidepid` a launcher of another user looks as if it had ended."""
    text = process.own()
    for name in ("sys/kernel/random", "self/ns"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_bytes(
        Path("/proc/sys/kernel/random/boot_id").read_bytes()
    )
    (tmp_path / "self/ns/pid").symlink_to(Path("/proc/self/ns/pid").readlink())
    monkeypatch.setattr(process, "_PROC", tmp_path)

    assert not process.dead(text)
    assert process.own() == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "::",
        "x:1:2",
        "another-boot:pid:[4026531836]:1:2",
        "{place}::2",
        "{place}:\N{SUPERSCRIPT TWO}:2",
        "{place}:-1:2",
    ],
)
def test_of_others_nothing_is_known(text: str) -> None:
    """Another machine, an earlier start of this one, another container, or no words of ours."""
    place = process.own().rpartition(":")[0].rpartition(":")[0]

    assert not process.dead(text.replace("{place}", place))
