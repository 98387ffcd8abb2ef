"""Files of simulated devices, read by the parsers for the kernel's."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.core import shell
from launcher.lab import devices, host_configs, layout
from launcher.lab.layout import Lab
from launcher.tools.host.survey import Gid, RdmaDevice
from launcher.tools.host.survey_output import parse_rdma


def lab(folder: Path, **changes: Any) -> Lab:
    options = {"gpus": 2, "accelerator": "cpu", **changes}
    return layout.make_lab(name="lab", directory=folder, subnet="10.77.0.0/24", nodes=1, **options)


def read_devices(lab_spec: Lab) -> tuple[RdmaDevice, ...]:
    """Query the files with the survey's script, and parse its output."""
    devices.prepare(lab_spec, lab_spec.hosts[0])
    program = shell.program_text("survey_rdma")
    assert "/sys/class/infiniband" in program
    folder = lab_spec.hosts[0].dir / devices.CLASSES / "infiniband"
    script = program.replace("/sys/class/infiniband", str(folder))
    completed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    return parse_rdma(completed.stdout)


def test_cards_are_read_as_those_of_the_kernel(tmp_path: Path) -> None:
    """Port, rate and the address of the host in the GID table."""
    first, second = read_devices(lab(tmp_path, rdma="roce"))

    assert (first.name, first.model, first.numa) == ("mlx5_0", "MT4129", 0)
    assert (second.name, second.numa, second.netdevs) == ("mlx5_1", 1, ("eth0",))
    (port,) = first.ports
    assert (port.state, port.rate, port.link_layer) == ("ACTIVE", 400.0, "Ethernet")
    address = "0000:0000:0000:0000:0000:ffff:0a4d:000b"
    assert port.gids[-1] == Gid(index=3, value=address, kind="RoCE v2", netdev="eth0")


def test_infiniband_has_no_address_and_no_interface(tmp_path: Path) -> None:
    """Only an entry of its own fabric."""
    first, *_ = read_devices(lab(tmp_path, rdma="infiniband"))

    assert (first.ports[0].link_layer, first.netdevs) == ("InfiniBand", ())
    assert [gid.index for gid in first.ports[0].gids] == [0]


def test_storage_has_its_own_card(tmp_path: Path) -> None:
    """As fast as the others, but near no GPU."""
    lab_spec = lab(tmp_path, accelerator="nvidia", rdma="infiniband")

    assert len(read_devices(lab_spec)) == 3
    assert devices.gpu_affinity(lab_spec, 1) == {"mlx5_0": "SYS", "mlx5_1": "PIX", "mlx5_2": "SYS"}
    assert "fabric: infiniband, hca: [mlx5_0, mlx5_1]}" in host_configs.inventory(lab_spec)


def test_amds_gpus_are_counted_as_those_of_the_kernel(tmp_path: Path) -> None:
    """By their render nodes; the entry of the CPU does not count."""
    lab_spec = lab(tmp_path, accelerator="amd", gpus=4)
    devices.prepare(lab_spec, lab_spec.hosts[0])
    classes = lab_spec.hosts[0].dir / devices.CLASSES
    render_nodes = [
        f"{path}:{path.read_text()}"
        for path in sorted(classes.glob("kfd/kfd/topology/nodes/*/properties"))
    ]

    assert sum("simd_count 1216" in text for text in render_nodes) == 4
    nodes = (lab_spec.hosts[0].dir / devices.NODES).read_text().split("\n")
    assert nodes == ["kfd 240 0", *(f"dri/renderD{at} 226 {at}" for at in range(128, 132)), ""]
    assert "accelerator: amd" in host_configs.inventory(lab_spec)


def test_a_host_reboots_only_for_other_devices(tmp_path: Path) -> None:
    """Their files are mounted at boot."""
    lab_spec = lab(tmp_path, rdma="roce")
    (only,) = lab_spec.hosts

    assert devices.prepare(lab_spec, only)
    assert not devices.prepare(lab_spec, only)
    assert devices.prepare(lab(tmp_path, rdma="roce", gpus=3), only)
    assert layout.load_lab(tmp_path) is None
    layout.save_lab(lab_spec)
    assert layout.load_lab(tmp_path) == lab_spec


def test_hosts_without_devices_have_no_files(tmp_path: Path) -> None:
    """Other lab hosts are not affected."""
    lab_spec = lab(tmp_path)

    assert not devices.prepare(lab_spec, lab_spec.hosts[0])
    assert not lab_spec.hosts[0].dir.exists()


@pytest.mark.parametrize(("gpus", "cards"), [(0, 1), (1, 1), (40, 15)])
def test_slots_of_any_number_have_cards(tmp_path: Path, gpus: int, cards: int) -> None:
    """At least one, up to the number of PCI slots."""
    assert len(devices.rdma_devices(lab(tmp_path, gpus=gpus, rdma="roce"))) == cards
