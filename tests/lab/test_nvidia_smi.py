"""Simulated `nvidia-smi`, run as a program and read by the parsers for the real one."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.agent.processes import gpu as agent
from launcher.agent.processes import inspection
from launcher.core import shell
from launcher.lab import gpus, layout, nvidia_smi
from launcher.tools.host import gpu_survey
from launcher.tools.host.survey import GpuProcess

CSV = "--format=csv,noheader,nounits"


class Smi:
    """A host's `nvidia-smi` and its data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.document_dir = folder / "gpus"
        self.document_dir.mkdir()

    def configure(self, *troubles: str, gpus_: int = 8, model: str = "h100") -> list[str]:
        """Simulate GPUs of the host; return their UUIDs."""
        lab = layout.make_lab(
            name=f"lab{os.getpid()}",  # excludes claims of concurrent tests
            directory=self.folder,
            subnet="10.77.0.0/24",
            nodes=1,
            gpus=gpus_,
            accelerator="nvidia",
            gpu_model=model,
            troubles=[f"node1:{trouble}" for trouble in troubles],
        )
        document = gpus.smi_document(lab, lab.hosts[0])
        (self.document_dir / "gpus.json").write_text(json.dumps(document))
        return [trouble["uuid"] for trouble in json.loads(json.dumps(document))["gpus"]]

    @contextmanager
    def occupied(self, index: int, pid: int) -> Iterator[None]:
        """Occupy a GPU's memory with a process inside the block."""
        file = self.document_dir / f"held-{index}"
        file.write_text(f"{pid}\n")
        with file.open() as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            yield

    def expose(self, *uuids: str) -> None:
        """Simulate a container that has these GPUs."""
        (self.folder / "gpus.visible").write_text("\n".join(uuids))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, nvidia_smi.__file__, *arguments],
            env={**os.environ, "PRACTICE_GPUS": str(self.document_dir)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def on_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the program on the PATH."""
        program = self.folder / "nvidia-smi"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {nvidia_smi.__file__} "$@"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")
        monkeypatch.setenv("PRACTICE_GPUS", str(self.document_dir))


@pytest.fixture
def smi(tmp_path: Path) -> Smi:
    return Smi(tmp_path)


def queried_fields(program: str) -> str:
    """Return the fields that a shell program queries."""
    text = Path(shell.__file__).with_name(f"{program}.sh").read_text()
    match = re.search(r"(?:query|fields|--query-gpu)=([a-z_.,]+)", text)
    assert match is not None
    return match[1]


@pytest.mark.parametrize("program", ["probe", "survey", "survey_fabric"])
def test_all_gpu_queries_are_answered(smi: Smi, program: str) -> None:
    """New fields of a query must exist here as well."""
    smi.configure()
    answer = smi.run(f"--query-gpu={queried_fields(program)}", CSV)

    assert (answer.returncode, len(answer.stdout.splitlines())) == (0, 8)


def test_the_probe_reads_every_gpu(smi: Smi) -> None:
    """A line per GPU; the name marks a simulated one."""
    uuids = smi.configure()
    answer = smi.run(f"--query-gpu={queried_fields('probe')}", CSV)

    assert answer.stdout.splitlines()[7] == (
        f"7, NVIDIA H100 80GB HBM3 (practice), 81559, 4, 580.95.05, {uuids[7]}"
    )


def test_the_survey_reads_errors_and_topology(smi: Smi) -> None:
    """`--query-gpu` and `topo -m`, through the functions that read the real one."""
    smi.configure("ecc:3")
    gpus = gpu_survey.parse_gpu_states(
        smi.run(f"--query-gpu={queried_fields('survey')}", CSV).stdout, smi.run("topo", "-m").stdout
    )

    assert [gpu.ecc_errors for gpu in gpus] == [0, 0, 0, 2, 0, 0, 0, 0]
    assert smi.run("topo", "-m").stdout.count("NV18") == 8 * 7


def test_a_process_is_listed_until_it_exits(smi: Smi) -> None:
    """Its memory is in use while it runs."""
    uuids = smi.configure()
    apps = (f"--query-compute-apps={queried_fields('gpu_processes')}", CSV)
    with smi.occupied(5, pid=4711):
        reported = gpu_survey.parse_processes(smi.run(*apps).stdout)
        used = smi.run("--query-gpu=memory.used", CSV).stdout.split()

    assert reported == (GpuProcess(gpu=uuids[5], pid=4711, name=nvidia_smi.HOLDER, memory=61169),)
    assert used == ["4", "4", "4", "4", "4", "61173", "4", "4"]
    assert smi.run(*apps).stdout == ""
    assert smi.run("--query-gpu=memory.used", CSV).stdout.split() == ["4"] * 8


def test_claims_of_ranks_are_in_use(smi: Smi) -> None:
    """In addition to another process, while they run, with their own process ids."""
    uuids = smi.configure(gpus_=2)
    apps = (f"--query-compute-apps={queried_fields('gpu_processes')}", CSV)
    claim = os.memfd_create(f"gpu-memory:{uuids[0]}:20000")
    try:
        with smi.occupied(0, pid=4711):
            reported = gpu_survey.parse_processes(smi.run(*apps).stdout)
            used = smi.run("--query-gpu=memory.used", CSV).stdout.split()
    finally:
        os.close(claim)

    assert [(process.gpu, process.pid, process.memory) for process in reported] == [
        (uuids[0], 4711, 61169),
        (uuids[0], os.getpid(), 20000),
    ]
    assert "python" in reported[1].name
    assert used == ["81173", "4"]
    assert smi.run(*apps).stdout == ""


def test_a_lost_gpu_leaves_a_gap(smi: Smi) -> None:
    """The others keep their numbers, and the message is on standard error."""
    smi.configure("lost:3")
    answer = smi.run("--query-gpu=index", CSV)

    assert answer.stdout.split() == ["0", "1", "2", "4", "5", "6", "7"]
    assert answer.stderr == (
        "Unable to determine the device handle for GPU3: 0000:61:00.0: Unknown Error\n"
    )
    assert answer.returncode == 255


def test_a_container_sees_its_gpus_renumbered(smi: Smi) -> None:
    """In bus order; processes of other namespaces have no names."""
    uuids = smi.configure()
    smi.expose(uuids[5], uuids[4])
    with smi.occupied(5, pid=4711):
        listed = smi.run("-L").stdout
        apps = smi.run("--query-compute-apps=gpu_uuid,process_name", CSV).stdout

    assert listed == (
        f"GPU 0: NVIDIA H100 80GB HBM3 (practice) (UUID: {uuids[4]})\n"
        f"GPU 1: NVIDIA H100 80GB HBM3 (practice) (UUID: {uuids[5]})\n"
    )
    assert apps == f"{uuids[5]}, [Not Found]\n"


def test_the_agents_gate_names_the_busy_gpu(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the agent's own commands; a server that needs fewer GPUs does not wait."""
    smi.configure()
    smi.on_path(monkeypatch)

    assert agent.free_gpus(0.92, None, 8) == (8, "")
    with smi.occupied(3, pid=4711):
        assert agent.free_gpus(0.92, None, 7) == (7, "")
        assert agent.free_gpus(0.92, None, 8) == (
            7,
            "7 of 8 GPUs have 92% of their memory free, 8 needed: GPU 3 has 59.7 of 79.6 GiB in"
            f" use, by {nvidia_smi.HOLDER} (pid 4711, 59.7 GiB)",
        )


def test_the_agent_detects_a_lost_gpu(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the message of the real program; a server on the others starts."""
    smi.configure("lost:0")
    smi.on_path(monkeypatch)

    with pytest.raises(agent.GpuLost, match="Unable to determine the device handle for GPU0"):
        agent.free_gpus(0.92, None, 8)
    assert agent.free_gpus(0.92, [1, 2], 2) == (2, "")


def test_a_display_is_reported(smi: Smi) -> None:
    """Both that one is attached and that it is in use."""
    smi.configure("display:1", gpus_=2)

    assert smi.run("--query-gpu=display_attached,display_active", CSV).stdout.splitlines() == [
        "No, Disabled",
        "Yes, Enabled",
    ]


def test_units_and_headings_are_optional(smi: Smi) -> None:
    """Included without `nounits` and `noheader`, in the format of the real program."""
    smi.configure(gpus_=1)

    assert smi.run("--query-gpu=index,memory.total,memory.free", "--format=csv").stdout == (
        "index, memory.total [MiB], memory.free [MiB]\n0, 81559 MiB, 81555 MiB\n"
    )


def test_a_gpu_that_shares_the_hosts_memory_reports_none(smi: Smi) -> None:
    """As a GB10."""
    smi.configure(gpus_=1, model="gb10")

    output = smi.run("--query-gpu=name,memory.total,memory.used", CSV).stdout
    assert output == "NVIDIA GB10 (practice), [N/A], [N/A]\n"


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (("--query-gpu=index,wings", CSV), 'Field "wings" is not a valid field to query.', 2),
        (("--query-gpu=index",), '"--format=" switch is missing', 2),
        (("--id=9", "-L"), "No devices were found", 6),
        (("--gpu-reset",), "does not support `--gpu-reset`", 2),
    ],
)
def test_unsupported_arguments_are_errors(
    smi: Smi, arguments: tuple[str, ...], message: str, status: int
) -> None:
    """Never an empty output that looks valid."""
    smi.configure()
    answer = smi.run(*arguments)

    assert message in answer.stdout
    assert answer.returncode == status


def test_a_single_gpu_can_be_queried(smi: Smi) -> None:
    """By number or UUID."""
    uuids = smi.configure()

    assert smi.run("-i", "3", "--query-gpu=uuid", CSV).stdout == f"{uuids[3]}\n"
    assert smi.run(f"--id={uuids[3]}", "--query-gpu=index", CSV).stdout == "3\n"


def test_container_without_gpus(smi: Smi) -> None:
    """A list is empty and exits with 0, a query fails, as with the real program (driver 580)."""
    smi.configure()
    smi.expose()
    listed, queried = smi.run("-L"), smi.run("--query-gpu=index", CSV)

    assert (listed.returncode, listed.stdout) == (0, "No devices found.\n")
    assert (queried.returncode, queried.stdout) == (6, "No devices were found\n")


def test_load_is_read_by_the_agent(smi: Smi) -> None:
    """An inspection reads figures without units."""
    smi.configure(gpus_=1)
    answer = smi.run(*inspection._NVIDIA[1:])

    assert answer.stdout == "0, 0, 0, 62.00, 700.00\n"


def test_a_host_without_a_driver(smi: Smi) -> None:
    """Without data it fails as the real program does without a driver."""
    answer = smi.run("-L")

    assert (answer.returncode, "couldn't communicate" in answer.stdout) == (9, True)
