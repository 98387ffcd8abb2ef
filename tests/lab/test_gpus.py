"""Files of simulated GPUs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher.lab import gpus, layout
from launcher.lab.layout import Lab


def lab(folder: Path, *troubles: str, accelerator: str = "nvidia") -> Lab:
    return layout.make_lab(
        name="lab",
        directory=folder,
        subnet="10.77.0.0/24",
        nodes=2,
        gpus=8,
        accelerator=accelerator,
        troubles=troubles,
    )


def programs(lab_spec: Lab) -> list[str]:
    return sorted(path.name for path in lab_spec.hosts[0].programs.iterdir())


def test_a_host_gets_both_programs_and_reboots(tmp_path: Path) -> None:
    """Only the first time."""
    lab_spec = lab(tmp_path)

    assert gpus.prepare(lab_spec, lab_spec.hosts[0])
    assert not gpus.prepare(lab_spec, lab_spec.hosts[0])
    assert programs(lab_spec) == ["nvidia-container-runtime-hook", "nvidia-smi"]
    assert all(os.access(path, os.X_OK) for path in lab_spec.hosts[0].programs.iterdir())


def test_a_changed_toolkit_requires_a_reboot(tmp_path: Path) -> None:
    """dockerd looks for it only when it starts."""
    lab_spec, without = lab(tmp_path), lab(tmp_path, "node1:no-toolkit")
    gpus.prepare(lab_spec, lab_spec.hosts[0])

    assert gpus.prepare(without, without.hosts[0])
    assert programs(without) == ["nvidia-smi"]
    assert gpus.prepare(lab_spec, lab_spec.hosts[0])
    assert programs(lab_spec) == ["nvidia-container-runtime-hook", "nvidia-smi"]


def test_other_trouble_requires_no_reboot(tmp_path: Path) -> None:
    """`nvidia-smi` reads its data every time."""
    lab_spec, broken = lab(tmp_path), lab(tmp_path, "node1:lost:3", "node2:lost:4")
    gpus.prepare(lab_spec, lab_spec.hosts[0])

    assert not gpus.prepare(broken, broken.hosts[0])
    document = json.loads((lab_spec.hosts[0].root / "etc/practice-gpus/gpus.json").read_text())
    assert [gpu["lost"] for gpu in document["gpus"]] == [index == 3 for index in range(8)]


def test_hosts_without_gpus_have_no_programs(tmp_path: Path) -> None:
    """Lab hosts with slots are not affected."""
    lab_spec = lab(tmp_path, accelerator="cpu")

    assert not gpus.prepare(lab_spec, lab_spec.hosts[0])
    assert not lab_spec.hosts[0].programs.exists()


@pytest.mark.parametrize("other", [1, 0])
def test_gpus_have_different_identities(tmp_path: Path, other: int) -> None:
    """On one host and on two hosts; the UUIDs are stable from one `lab up` to the next."""
    lab_spec = lab(tmp_path)
    documents = [gpus.smi_document(lab_spec, lab_spec.hosts[index]) for index in (0, other)]
    uuids = [gpu["uuid"] for text in documents for gpu in json.loads(json.dumps(text))["gpus"]]

    assert len(set(uuids)) == (16 if other else 8)
