"""The practice cluster that the lab tests share: real sshd, real dockerd, real Ray, real vLLM on
two practice hosts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.faults import host_faults
from launcher.lab import layout, processes, removal
from launcher.lab.layout import Lab

NAME = "vlaunch-test"
SUBNET = "10.78.0.0/24"
VLAUNCH = str(Path(sys.executable).parent / "vlaunch")

# Made up for the tests; they must never be seen anywhere but in the files that carry them.
HF_TOKEN = "hf_practiceTokenThatMustStayHidden01"
API_KEY = "practice-api-key-that-must-stay-hidden"


@dataclass(frozen=True)
class Ran:
    """What a command line did."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events that `--json` printed."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def said(self) -> str:
        """Everything it printed."""
        return self.out + self.err


@dataclass(frozen=True)
class Practice:
    """The practice cluster and an inventory of it that the tests may change, of the first `nodes`
    of its hosts.
    """

    lab: Lab
    folder: Path
    nodes: int
    said: list[str] = field(default_factory=list)

    @property
    def inventory(self) -> Path:
        """The inventory with secrets."""
        return self.folder / "inventory.yaml"

    def write(
        self, change: Callable[[dict[str, Any]], None] | None = None, name: str = "inventory.yaml"
    ) -> Path:
        """Write the lab's inventory, with secrets, changed as asked."""
        document = yaml.safe_load(self.lab.inventory.read_text())
        document["nodes"] = document["nodes"][: self.nodes]
        document["secrets"] = {
            "HF_TOKEN": {"env": "PRACTICE_HF_TOKEN"},
            "VLLM_API_KEY": {"file": "api.key"},
        }
        if change is not None:
            change(document)
        path = self.folder / name
        path.write_text(yaml.safe_dump(document))
        return path

    def bring_up_anew(self, change: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Bring the cluster of a changed inventory up, of which nothing is left from before."""
        self.write(change)
        assert self.vlaunch("down", "--yes").code == 0
        up = self.vlaunch("up")
        assert up.code == 0, up.said

    def environment(self) -> dict[str, str]:
        """The environment of commands: a home of their own, and the one secret that comes from
        it.
        """
        env = {key: value for key, value in os.environ.items() if not key.startswith("VLAUNCH_")}
        return {
            **env,
            "PRACTICE_HF_TOKEN": HF_TOKEN,
            "VLAUNCH_INVENTORY": str(self.inventory),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "NO_COLOR": "1",
            "PYTHONFAULTHANDLER": "1",
        }

    def vlaunch(self, *words: str, timeout: float = 600, stdin: str | None = None) -> Ran:
        """Run `vlaunch` as a user would; what it said is kept for the search for secrets."""
        began = time.monotonic()
        done = subprocess.run(
            [VLAUNCH, *words],
            env=self.environment(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        self.said.append(done.stdout + done.stderr)
        return Ran(
            code=done.returncode, out=done.stdout, err=done.stderr, seconds=time.monotonic() - began
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start `vlaunch` and go on; the caller ends it."""
        return subprocess.Popen(
            [VLAUNCH, *words],
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def on(self, host: str, *argv: str, timeout: float = 60) -> str:
        """Run a command on a practice host, past SSH, and return what it printed."""
        return host_faults.enter(self.lab.host(host), *argv, timeout=timeout).stdout

    def docker(self, host: str, *words: str) -> str:
        """Run docker on a practice host, past SSH."""
        return self.on(host, "docker", *words)

    def containers(self) -> dict[str, str]:
        """Return the id of each of the cluster's containers by name, on all hosts."""
        found = {}
        for host in self.lab.hosts:
            listing = self.docker(
                host.name,
                "ps",
                "-a",
                "--no-trunc",
                "--filter",
                "label=vlaunch.cluster",
                "--format",
                "{{.Names}} {{.ID}}",
            )
            found |= dict(line.split() for line in listing.splitlines())
        return found

    def command_lines(self) -> str:
        """Return the command line of every process of the practice hosts, as `ps -ef` on them
        would.
        """
        lines = []
        for process in processes.lab_processes(self.lab.name):
            try:
                lines.append(
                    Path(f"/proc/{process.pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
            except OSError:
                continue
        return "\n".join(lines)


@pytest.fixture(scope="session")
def practice(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Practice]:
    """Two practice hosts with the vLLM image; removed at the end, and nothing of them may be left.

    Beside a run that has those, `make lab-tests` sets the variable for two of the hosts of `trio`.
    """
    if os.environ.get("VLAUNCH_PAIR_OF_TRIO"):
        yield replace(request.getfixturevalue("trio"), nodes=2)
    else:
        yield from _practice(tmp_path_factory, NAME, SUBNET, nodes=2)


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Practice]:
    """Three practice hosts, so that a bad pair has others beside it; what they are like is for each
    module to say.
    """
    yield from _practice(tmp_path_factory, "vlaunch-net", "10.79.0.0/24", nodes=3)


@pytest.fixture(scope="module")
def bare(trio: Practice) -> Practice:
    """Three practice hosts that have the image and nothing else."""
    trio.write()
    ran = trio.vlaunch("down", "--yes")
    assert ran.code == 0, ran.said
    return trio


@pytest.fixture
def three(bare: Practice) -> Iterator[Practice]:
    """Hosts and an inventory without a fault, before and after."""
    bare.write()
    yield bare
    for host in bare.lab.hosts:
        host_faults.heal(host)
        host_faults.set_mtu(host, 1500)
    bare.write()


@pytest.fixture(scope="module")
def with_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Practice]:
    """Two practice hosts with eight stand-in GPUs each."""
    more = ("--gpus", "8", "--accelerator", "nvidia")
    yield from _practice(tmp_path_factory, "vlaunch-gpus", "10.90.0.0/24", *more, nodes=2)


@pytest.fixture(scope="module")
def with_cards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Practice]:
    """Two practice hosts with two stand-in GPUs and three RDMA cards each."""
    more = ("--gpus", "2", "--accelerator", "nvidia", "--rdma", "roce")
    yield from _practice(tmp_path_factory, "vlaunch-rdma", "10.91.0.0/24", *more, nodes=2)


@pytest.fixture(scope="module")
def with_amd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Practice]:
    """Two practice hosts with the files of four AMD GPUs each."""
    more = ("--gpus", "4", "--accelerator", "amd")
    yield from _practice(tmp_path_factory, "vlaunch-amd", "10.92.0.0/24", *more, nodes=2)


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Practice]:
    """Four practice hosts without the image."""
    yield from _practice(tmp_path_factory, "vlaunch-copy", "10.93.0.0/24", "--no-image", nodes=4)


@pytest.fixture
def light_eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Practice]:
    """Eight practice hosts without the image."""
    yield from _practice(tmp_path_factory, "vlaunch-eight", "10.95.0.0/24", "--no-image", nodes=8)


def _practice(
    tmp_path_factory: pytest.TempPathFactory, name: str, subnet: str, *more: str, nodes: int
) -> Iterator[Practice]:
    command = [
        VLAUNCH,
        "lab",
        "up",
        "--install-missing",
        "--name",
        name,
        "--subnet",
        subnet,
        "--nodes",
        str(nodes),
        *more,
    ]
    log = tmp_path_factory.mktemp("lab") / "up.log"
    with log.open("w") as out:
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, timeout=1500, check=False
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    lab = layout.load_lab(layout.default_dir(name))
    assert lab is not None
    folder = tmp_path_factory.mktemp("practice")
    (folder / "api.key").write_text(API_KEY + "\n")
    (folder / "api.key").chmod(0o600)
    practice = Practice(lab=lab, folder=folder, nodes=nodes)
    practice.write()
    yield practice
    if os.environ.get("VLAUNCH_KEEP_LAB"):
        return
    done = subprocess.run(
        [VLAUNCH, "lab", "down", "--name", name],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert removal.leftovers(name, lab.dir) == []


@pytest.fixture(scope="module")
def cleared(practice: Practice) -> None:
    """Begin a module with nothing on the practice cluster."""
    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0


@pytest.fixture
def down(practice: Practice, cleared: None) -> Iterator[Practice]:
    """A practice cluster with nothing on it, before and after; `down` itself proves the absence."""
    practice.write()
    yield practice
    practice.write()
    ran = practice.vlaunch("down", "--yes")
    assert ran.code == 0, ran.said


@pytest.fixture(scope="session")
def answer_of_serve(practice: Practice) -> object:
    """What a server answers that `vlaunch serve` has started over both nodes; it has ended.

    It is `exported.Answer`, which exports of the same server must give, too.
    """
    from tests.integration import exported, servers

    practice.bring_up_anew(lambda document: document.update(ray="none"))
    servers.serve(practice, "--backend", "mp", *exported.SPLIT)
    answer = exported.ask(practice)
    down = practice.vlaunch("down", "--yes", "--purge")
    assert down.code == 0, down.said
    return answer


def ended(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """Return what a process that `start` started has said by its end; one that hangs tells
    where.
    """
    try:
        return process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        said = process.communicate(timeout=30)
    pytest.fail(f"it has not ended after {timeout:.0f}s\n{''.join(said)}")


def kill(process: subprocess.Popen[str]) -> None:
    """End a process that `start` started, at once, with its whole session."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
