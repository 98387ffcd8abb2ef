"""Lab clusters that the tests share: real sshd, dockerd, Ray and vLLM on lab hosts."""

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

# Fictitious. They must appear nowhere but in the files that carry them.
HF_TOKEN = "hf_practiceTokenThatMustStayHidden01"
API_KEY = "practice-api-key-that-must-stay-hidden"


@dataclass(frozen=True)
class CommandResult:
    """The result of a command."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events that `--json` printed."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def output(self) -> str:
        """Standard output and standard error."""
        return self.out + self.err


def assert_error(result: CommandResult, *texts: str, codes: tuple[int, ...] = (1,)) -> None:
    """Check the form of an error: its exit code, its names, a hint, and no traceback."""
    assert result.code in codes, result.output
    assert "Traceback" not in result.output
    assert result.err.count("error: ") == 1
    assert "hint: " in result.err
    for text in texts:
        assert text in result.err, result.err


@dataclass(frozen=True)
class LabCluster:
    """A lab cluster, and an inventory of its first `nodes` hosts that the tests may change. Only
    tests of the front have one.
    """

    lab: Lab
    folder: Path
    nodes: int
    outputs: list[str] = field(default_factory=list)

    @property
    def inventory(self) -> Path:
        """The inventory with secrets."""
        return self.folder / "inventory.yaml"

    def write(
        self, change: Callable[[dict[str, Any]], None] | None = None, name: str = "inventory.yaml"
    ) -> Path:
        """Write the lab's inventory with secrets, after a change."""
        document = yaml.safe_load(self.lab.inventory.read_text())
        document["nodes"] = document["nodes"][: self.nodes]
        del document["front"]
        document["secrets"] = {
            "HF_TOKEN": {"env": "PRACTICE_HF_TOKEN"},
            "VLLM_API_KEY": {"file": "api.key"},
        }
        if change is not None:
            change(document)
        path = self.folder / name
        path.write_text(yaml.safe_dump(document))
        return path

    def recreate(self, change: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Recreate the cluster from a changed inventory."""
        self.write(change)
        assert self.vlaunch("down", "--yes").code == 0
        up = self.vlaunch("up")
        assert up.code == 0, up.output

    def assert_healthy(self) -> None:
        """Assert that `doctor` finds no problem."""
        doctor = self.vlaunch("doctor")
        assert doctor.code == 0, doctor.output

    def environment(self) -> dict[str, str]:
        """Return the environment of commands: a home of their own, and the one secret from a
        variable.
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

    def vlaunch(
        self, *arguments: str, timeout: float = 600, stdin: str | None = None
    ) -> CommandResult:
        """Run `vlaunch` as a user would; its output is recorded for the search for secrets.

        `up` gets more time: Ray starts again and again on a machine that is too busy for it.
        """
        began = time.monotonic()
        if arguments[0] == "up" and "--join-timeout" not in arguments:
            arguments = (*arguments, "--join-timeout", "7m")
        completed = subprocess.run(
            [VLAUNCH, *arguments],
            env=self.environment(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        self.outputs.append(completed.stdout + completed.stderr)
        return CommandResult(
            code=completed.returncode,
            out=completed.stdout,
            err=completed.stderr,
            seconds=time.monotonic() - began,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `vlaunch` in the background; the caller ends it."""
        return subprocess.Popen(
            [VLAUNCH, *arguments],
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def on(self, host: str, *argv: str, timeout: float = 60) -> str:
        """Run a command on a lab host, without SSH, and return its output."""
        return host_faults.enter(self.lab.host(host), *argv, timeout=timeout).stdout

    def docker(self, host: str, *arguments: str) -> str:
        """Run docker on a lab host, without SSH."""
        return self.on(host, "docker", *arguments)

    def containers(self) -> dict[str, str]:
        """Return the id of each of the cluster's containers by name, on all hosts."""
        ids = {}
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
            ids |= dict(line.split() for line in listing.splitlines())
        return ids

    def command_lines(self) -> str:
        """Return the command line of every process of the lab hosts, like `ps -ef`."""
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
def lab_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LabCluster]:
    """Two lab hosts with the vLLM image; removed at the end, without leftovers.

    `make lab-tests` sets the variable to run on two of the hosts of `trio` beside another run.
    """
    if os.environ.get("VLAUNCH_PAIR_OF_TRIO"):
        yield replace(request.getfixturevalue("trio"), nodes=2)
    else:
        yield from _start_cluster(tmp_path_factory, NAME, SUBNET, nodes=2)


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabCluster]:
    """Three lab hosts, so that a bad pair has good ones beside it; each module sets their state."""
    yield from _start_cluster(tmp_path_factory, "vlaunch-net", "10.79.0.0/24", nodes=3)


@pytest.fixture(scope="module")
def bare(trio: LabCluster) -> LabCluster:
    """Three lab hosts that have only the image."""
    trio.write()
    result = trio.vlaunch("down", "--yes")
    assert result.code == 0, result.output
    return trio


@pytest.fixture
def three(bare: LabCluster) -> Iterator[LabCluster]:
    """Healthy hosts and inventory, before and after."""
    bare.write()
    yield bare
    for host in bare.lab.hosts:
        host_faults.heal(host)
        host_faults.set_mtu(host, 1500)
    bare.write()


@pytest.fixture(scope="module")
def with_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabCluster]:
    """Two lab hosts with eight simulated GPUs each."""
    options = ("--gpus", "8", "--accelerator", "nvidia")
    yield from _start_cluster(tmp_path_factory, "vlaunch-gpus", "10.90.0.0/24", *options, nodes=2)


@pytest.fixture(scope="module")
def with_cards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabCluster]:
    """Two lab hosts with two simulated GPUs and three RDMA cards each."""
    options = ("--gpus", "2", "--accelerator", "nvidia", "--rdma", "roce")
    yield from _start_cluster(tmp_path_factory, "vlaunch-rdma", "10.91.0.0/24", *options, nodes=2)


@pytest.fixture(scope="module")
def with_amd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabCluster]:
    """Two lab hosts with the files of four AMD GPUs each."""
    options = ("--gpus", "4", "--accelerator", "amd")
    yield from _start_cluster(tmp_path_factory, "vlaunch-amd", "10.92.0.0/24", *options, nodes=2)


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabCluster]:
    """Four lab hosts without the image."""
    yield from _start_cluster(
        tmp_path_factory, "vlaunch-copy", "10.93.0.0/24", "--no-image", nodes=4
    )


@pytest.fixture
def light_eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabCluster]:
    """Eight lab hosts without the image."""
    yield from _start_cluster(
        tmp_path_factory, "vlaunch-eight", "10.95.0.0/24", "--no-image", nodes=8
    )


def _start_cluster(
    tmp_path_factory: pytest.TempPathFactory, name: str, subnet: str, *options: str, nodes: int
) -> Iterator[LabCluster]:
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
        *options,
    ]
    log = tmp_path_factory.mktemp("lab") / "up.log"
    with log.open("w") as out:
        completed = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, timeout=1500, check=False
        )
    assert completed.returncode == 0, log.read_text()[-3000:]
    lab = layout.load_lab(layout.default_dir(name))
    assert lab is not None
    folder = tmp_path_factory.mktemp("practice")
    (folder / "api.key").write_text(API_KEY + "\n")
    (folder / "api.key").chmod(0o600)
    lab_cluster = LabCluster(lab=lab, folder=folder, nodes=nodes)
    lab_cluster.write()
    yield lab_cluster
    if os.environ.get("VLAUNCH_KEEP_LAB"):
        return
    completed = subprocess.run(
        [VLAUNCH, "lab", "down", "--name", name],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert removal.leftovers(name, lab.dir) == []


@pytest.fixture(scope="module")
def cleared(lab_cluster: LabCluster) -> None:
    """Remove the cluster before a module."""
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0


@pytest.fixture
def down(lab_cluster: LabCluster, cleared: None) -> Iterator[LabCluster]:
    """A lab cluster that is down, before and after; `down` itself checks for leftovers."""
    lab_cluster.write()
    yield lab_cluster
    lab_cluster.write()
    result = lab_cluster.vlaunch("down", "--yes")
    assert result.code == 0, result.output


@pytest.fixture(scope="session")
def answer_of_serve(lab_cluster: LabCluster) -> object:
    """The answer of a server that `vlaunch serve` started over both nodes; it is stopped again.

    It is an `exported.Answer`; exports of the same server must give the same.
    """
    from tests.integration import exported, servers

    lab_cluster.recreate(lambda document: document.update(ray="none"))
    servers.serve(lab_cluster, "--backend", "mp", *exported.PARALLELISM)
    answer = exported.query_server(lab_cluster)
    down = lab_cluster.vlaunch("down", "--yes", "--purge")
    assert down.code == 0, down.output
    return answer


def wait_for_output(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """Return the output of a process of `start` at its end; one that hangs shows its stacks."""
    try:
        return process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        output = process.communicate(timeout=30)
    pytest.fail(f"it has not ended after {timeout:.0f}s\n{''.join(output)}")


def kill_session(process: subprocess.Popen[str]) -> None:
    """Kill a process of `start`, with its whole session."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
