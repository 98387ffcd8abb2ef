"""`vlaunch export compose` on two practice hosts, without a launcher: the proof of the network, an
answer, and what becomes of a rank that dies, of a reboot, and of the end.

Each test stands on the one before.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from benchmarks.faults import host_faults
from launcher.lab.layout import Host
from tests import debian13
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
START = 900.0  # seconds for all of a start, on cores that others use, too


@dataclass(frozen=True)
class Composed:
    """Two hosts that have the files of the export, and docker compose."""

    practice: Practice

    def compose(self, host: Host, *words: str, timeout: float = 60) -> CompletedProcess[str]:
        """Run docker compose on a host; it may fail."""
        line = f'cd {SERVER} && exec ../docker-compose --file "$0.compose.yaml" "$@"'
        return host_faults.enter(host, "sh", "-c", line, host.name, *words, timeout=timeout)

    def up(self) -> list[CompletedProcess[str]]:
        """Start it on all hosts, as the files say; return how that ended."""
        return on_all(
            self.practice,
            lambda host: self.compose(host, "up", "--detach", "--wait", timeout=START),
        )

    def down(self) -> list[CompletedProcess[str]]:
        """End it on all hosts, as the files say."""
        return on_all(
            self.practice, lambda host: self.compose(host, "down", "--volumes", timeout=120)
        )


@pytest.fixture(scope="module")
def composed(practice: Practice) -> Iterator[Composed]:
    """Hosts with nothing on them but docker compose."""
    program = debian13.program("docker-compose")
    if program is None:
        pytest.skip(f"docker compose v2 {debian13.MISSING}")
    practice.write()
    assert practice.vlaunch("down", "--purge").code == 0
    for host in practice.lab.hosts:
        shutil.copy(program, host.root / "srv/docker-compose")
    made = Composed(practice)
    yield made
    made.down()
    clear(practice)


def test_nothing_starts_where_packets_are_dropped(composed: Composed, tmp_path: Path) -> None:
    """The proof of the network fails on both nodes, and the server is never started."""
    practice = composed.practice
    place(practice, written(practice, "compose", tmp_path / "server", "--timeout", "20"))
    one, two = practice.lab.hosts
    with host_faults.apart(one, two):
        ended = composed.up()

    assert [each.returncode != 0 for each in ended] == [True, True], ended
    for host in practice.lab.hosts:
        assert "FAIL" in composed.compose(host, "logs", "network").stdout
        states = practice.docker(host.name, "ps", "--all", "--format", "{{.Names}} {{.State}}")
        assert f"vlaunch-lab-{host.name} created" in states.splitlines()
    composed.down()
    assert list(left(practice)) == []


def test_up_ends_when_it_has_answered(
    composed: Composed, tmp_path: Path, answer_of_serve: Answer
) -> None:
    """With the words, the split and the settings of `vlaunch serve`; its log shows the engine's."""
    practice = composed.practice
    place(practice, written(practice, "compose", tmp_path / "server"))
    ended = composed.up()

    assert [each.returncode for each in ended] == [0, 0], ended
    assert ask(practice) == answer_of_serve
    assert "pp2" in answer_of_serve.fingerprint
    logs = composed.compose(practice.lab.hosts[0], "logs").stdout
    assert "PASS every link between the 2 nodes is proven" in logs
    assert "Application startup complete" in logs


def test_a_killed_rank_brings_all_back(composed: Composed) -> None:
    """By the agents, which tell of it; no container is started anew."""
    practice = composed.practice
    before = practice.containers()
    with asking(practice) as traffic:
        kill_one(practice, "VLLM::Worker", "node2")
        answers_again(traffic, within=START)

    until(lambda: observed(practice)["state"] == "ready", "the agent says ready", 60)
    fault = observed(practice)["faults"][-1]
    assert (fault["node"], fault["ready_again_after"] is not None) == ("node2", True)
    assert practice.containers() == before


def test_a_reboot(composed: Composed, answer_of_serve: Answer) -> None:
    """It is back, and nobody has typed a word."""
    practice = composed.practice
    on_all(practice, host_faults.power_off)
    for host in practice.lab.hosts:
        host_faults.power_on(practice.lab, host)
    until(lambda: answers(practice).ok, "it answers after a reboot", START)

    assert ask(practice) == answer_of_serve


def test_down_leaves_nothing(composed: Composed) -> None:
    """No container, volume or process on any host."""
    ended = composed.down()

    assert [each.returncode for each in ended] == [0, 0], ended
    assert list(left(composed.practice)) == []
