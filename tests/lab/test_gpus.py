"""Stand-in GPUs of practice hosts: the files that make them."""

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


def programs(made: Lab) -> list[str]:
    return sorted(path.name for path in made.hosts[0].programs.iterdir())


def test_a_host_gets_both_programs_and_boots_for_them(tmp_path: Path) -> None:
    """Once; the second time everything is there."""
    made = lab(tmp_path)

    assert gpus.prepare(made, made.hosts[0])
    assert not gpus.prepare(made, made.hosts[0])
    assert programs(made) == ["nvidia-container-runtime-hook", "nvidia-smi"]
    assert all(os.access(path, os.X_OK) for path in made.hosts[0].programs.iterdir())


def test_a_toolkit_that_goes_or_comes_takes_a_boot(tmp_path: Path) -> None:
    """dockerd looks for it at its start alone."""
    made, without = lab(tmp_path), lab(tmp_path, "node1:no-toolkit")
    gpus.prepare(made, made.hosts[0])

    assert gpus.prepare(without, without.hosts[0])
    assert programs(without) == ["nvidia-smi"]
    assert gpus.prepare(made, made.hosts[0])
    assert programs(made) == ["nvidia-container-runtime-hook", "nvidia-smi"]


def test_other_trouble_takes_none(tmp_path: Path) -> None:
    """`nvidia-smi` reads what it tells each time."""
    made, broken = lab(tmp_path), lab(tmp_path, "node1:lost:3", "node2:lost:4")
    gpus.prepare(made, made.hosts[0])

    assert not gpus.prepare(broken, broken.hosts[0])
    told = json.loads((made.hosts[0].root / "etc/practice-gpus/gpus.json").read_text())
    assert [each["lost"] for each in told["gpus"]] == [index == 3 for index in range(8)]


def test_hosts_without_gpus_have_nothing_of_it(tmp_path: Path) -> None:
    """What a practice host with slots is made of stays as it is."""
    made = lab(tmp_path, accelerator="cpu")

    assert not gpus.prepare(made, made.hosts[0])
    assert not made.hosts[0].programs.exists()


@pytest.mark.parametrize("other", [1, 0])
def test_no_two_gpus_have_one_identity(tmp_path: Path, other: int) -> None:
    """Neither of a host nor of two hosts; and it stays from one `lab up` to the next."""
    made = lab(tmp_path)
    documents = [gpus.smi_document(made, made.hosts[index]) for index in (0, other)]
    uuids = [each["uuid"] for text in documents for each in json.loads(json.dumps(text))["gpus"]]

    assert len(set(uuids)) == (16 if other else 8)
