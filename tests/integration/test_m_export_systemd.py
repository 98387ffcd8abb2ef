"""`vlaunch export systemd` on two practice hosts whose first process is systemd: the proof of the
network, enabled is answered, and what becomes of a container and a rank that die, of a reboot, and
of the end.

Each test stands on the one before.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from benchmarks.faults import host_faults
from launcher.lab.layout import Host
from tests.integration import practice_systemd
from tests.integration.batches import kill_one, until
from tests.integration.conftest import Practice
from tests.integration.exported import (
    SERVER,
    Answer,
    answers_again,
    ask,
    clear,
    left,
    observed,
    on_all,
    place,
    written,
)
from tests.integration.servers import answers, asking

pytestmark = [pytest.mark.lab, pytest.mark.long]
UNIT, NETWORK = "vlaunch-lab", "vlaunch-lab-network"
START = 900.0  # seconds for all of a start, on cores that others use, too


@pytest.fixture(scope="module")
def booted(practice: Practice, answer_of_serve: Answer) -> Iterator[Practice]:
    """Hosts with systemd and its docker.service, and nothing else on them."""
    if why := practice_systemd.missing():
        pytest.skip(why)
    practice.write()
    assert practice.vlaunch("down", "--purge").code == 0
    for host in practice.lab.hosts:
        practice_systemd.with_systemd(practice.lab, host)
    yield practice
    clear(practice)
    for host in practice.lab.hosts:
        practice_systemd.without_systemd(practice.lab, host)


def install(practice: Practice, folder: Path) -> None:
    """Bring an export to the hosts and install it, as its script does."""
    place(practice, folder)
    for host in practice.lab.hosts:
        done = practice_systemd.enter(host, "sh", f"{SERVER}/install.sh", host.name)
        assert done.returncode == 0, done.stderr


def systemctl(practice: Practice, *words: str) -> list[CompletedProcess[str]]:
    """Run systemctl on all hosts at once."""

    def on(host: Host) -> CompletedProcess[str]:
        return practice_systemd.enter(host, "systemctl", *words, timeout=START)

    return on_all(practice, on)


def is_active(practice: Practice) -> bool:
    """Tell whether the units of all hosts are active."""
    return [each.stdout.strip() for each in systemctl(practice, "is-active", UNIT)] == [
        "active",
        "active",
    ]


def unit_of(practice: Practice) -> str:
    """Return the unit of the head as it is installed."""
    return practice.on("node1", "cat", f"/etc/systemd/system/{UNIT}.service")


def test_the_proof_fails_where_packets_are_dropped(booted: Practice, tmp_path: Path) -> None:
    """On both nodes, with the reason in the journal."""
    install(booted, written(booted, "systemd", tmp_path / "server", "--timeout", "20"))
    one, two = booted.lab.hosts
    with host_faults.apart(one, two):
        ended = systemctl(booted, "start", NETWORK)

    assert [each.returncode != 0 for each in ended] == [True, True], ended
    for host in booted.lab.hosts:
        assert "FAIL" in practice_systemd.journal(host, NETWORK)
    systemctl(booted, "reset-failed")


def test_enabled_is_answered(booted: Practice, tmp_path: Path, answer_of_serve: Answer) -> None:
    """With the words, the split and the settings of `vlaunch serve`; its journal shows the engine's
    log.
    """
    install(booted, written(booted, "systemd", tmp_path / "server"))
    proven = systemctl(booted, "start", NETWORK)
    assert [each.returncode for each in proven] == [0, 0], proven
    ended = systemctl(booted, "enable", "--now", UNIT)

    assert [each.returncode for each in ended] == [0, 0], ended
    assert ask(booted) == answer_of_serve
    assert is_active(booted)
    head = booted.lab.hosts[0]
    assert "PASS every link" in practice_systemd.journal(head, NETWORK)
    assert "Application startup complete" in practice_systemd.journal(head, UNIT)


@pytest.mark.parametrize("restarts", [0, 1], ids=["a rank", "a container"])
def test_what_dies_comes_back(booted: Practice, restarts: int) -> None:
    """A rank by the agents, in containers that stay; a container's first process by systemd."""
    two = booted.lab.hosts[1]
    with asking(booted) as traffic:
        kill_one(booted, "vlaunch_agent.__main__" if restarts else "VLLM::Worker", "node2")
        answers_again(traffic, within=START)

    until(functools.partial(is_active, booted), "both units are active", 60)
    assert practice_systemd.shown(two, UNIT, "NRestarts") == str(restarts)
    until(lambda: observed(booted)["state"] == "ready", "the agent says ready", 60)
    assert observed(booted)["faults"][-1]["node"] == "node2"


def test_a_reboot(booted: Practice, answer_of_serve: Answer) -> None:
    """It is back, and nobody has typed a word."""
    on_all(booted, host_faults.power_off)
    on_all(booted, functools.partial(practice_systemd.boot, booted.lab))
    until(lambda: answers(booted).ok, "it answers after a reboot", START)

    until(functools.partial(is_active, booted), "both units are active", 60)
    assert ask(booted) == answer_of_serve


def test_stop_leaves_nothing(booted: Practice) -> None:
    """No container, volume or process on any host; no file once the line of the unit has run."""
    (line,) = re.findall("^# Its files: (rm .*)$", unit_of(booted), re.M)
    ended = systemctl(booted, "disable", "--now", UNIT)

    assert [each.returncode for each in ended] == [0, 0], ended
    assert list(left(booted)) == []
    for host in booted.lab.hosts:
        assert practice_systemd.enter(host, "sh", "-c", line).returncode == 0
        named = ("-name", "*vlaunch*", "-o", "-name", "*lab*")
        found = booted.on(host.name, "find", "/var/lib/vlaunch", "/etc/systemd", *named)
        assert found == "/var/lib/vlaunch\n"
