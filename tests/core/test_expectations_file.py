"""Expectations per GPU and network card: ours with sources, and a user's file on top."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launcher.core.errors import RequestError
from launcher.core.expectations import Expectations
from launcher.core.expectations_file import DATA, FILES, load_expectations


@pytest.mark.parametrize("name", FILES)
def test_every_figure_of_ours_has_a_source(name: str) -> None:
    """An address, or the name of the publication."""
    entries = next(iter(yaml.safe_load((DATA / name).read_text()).values()))

    assert entries
    assert all(len(entry["source"]) > 15 for entry in entries)
    assert len({entry["model"] for entry in entries}) == len(entries)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 2080", "GeForce"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H20-3e", "H20"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A30", "A30"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L20", "L20"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100S-PCIE-32GB", "V100"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA RTX 4000 SFF Ada Generation", None),
    ],
)
def test_a_gpu_matches_its_name_in_nvidia_smi(name: str, model: str | None) -> None:
    """The entry of its own model, even if a name is part of another."""
    gpu = load_expectations().gpu(name)

    assert (gpu.model if gpu else None) == model


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("MT4129", "ConnectX-7"),
        ("MT4123", "ConnectX-6"),
        ("efa_0", "EFA"),
        ("virtio_net", "Ethernet"),
    ],
)
def test_a_network_card_matches_its_device_model(name: str, model: str) -> None:
    """An unknown one is judged by the speed of its link."""
    nic = load_expectations().nic(name)

    assert nic is not None
    assert nic.model == model
    assert 0 < nic.share_tcp <= nic.share <= 1


def test_gpudirect_is_not_expected_of_unsupported_gpus() -> None:
    """GB10 shares the host's memory; GeForce does not support it."""
    ours = load_expectations()

    without = [gpu.model for gpu in ours.gpus if not gpu.gpudirect]
    assert "GB10" in without
    assert {model.split()[0] for model in without} == {"GB10", "GeForce"}


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("NVIDIA H100 80GB HBM3", 79.18),
        ("H100", 79.18),
        ("NVIDIA A100-SXM4-40GB", 39.39),
        ("NVIDIA A100-SXM4-80GB", 79.25),
        ("A100 80 GB", 79.25),
        ("NVIDIA GeForce RTX 4090", 23.55),
        ("NVIDIA H20", None),
    ],
)
def test_sizes_in_names_of_gpus(name: str, gib: float | None) -> None:
    """Of two cards of a name the smaller one, unless the name has the size."""
    gpu = load_expectations().gpu(name)

    assert gpu is not None
    assert gpu.reported_gib(name) == gib


def test_a_users_file_changes_only_its_keys(tmp_path: Path) -> None:
    """The rest of an entry is ours; a new model comes first and matches its own name."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "gpus:\n- {model: H100, driver: 999}\n- {model: H100 80GB HBM3e, memory: 94}\n"
        "nics:\n- {model: ConnectX-7, share: 0.8}\n"
    )
    ours, mine = load_expectations(), load_expectations(path)
    before, after = ours.gpu("NVIDIA H100 PCIe"), mine.gpu("NVIDIA H100 PCIe")

    assert before is not None
    assert after == replace(before, driver=999)
    assert [entry.memory for entry in (mine.gpu("NVIDIA H100 80GB HBM3e"),) if entry] == [94]
    assert [(entry.share, entry.rate) for entry in (mine.nic("MT4129"),) if entry] == [(0.8, 400)]


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        ("gpus: [{model: H100, memory: eight}]", [r"gpus\[H100\]\.memory: .*not 'eight'"]),
        (
            "gpus: [{model: H100, memroy: 8}]\nnics: [{model: EFA, share: 2}]",
            [
                r"gpus\[H100\]\.memroy: unknown key",
                r"nics\[EFA\]\.share: .*less than or equal to 1.*not 2",
            ],
        ),
        ("gpus: [{model: X, match: '('}]", [r"gpus\[X\]\.match: should be a regular expression"]),
        ("gpus: [H100]", [r"gpus\[0\]: should be a mapping with a `model`"]),
        ("gpus: [{memory: 8}]", [r"gpus\[0\]: should be a mapping with a `model`"]),
        ("gpus: 8", ["gpus: should be a list"]),
        ("gpu: []", ["gpu: unknown key"]),
        ("- 1", ["should be a mapping"]),
        ("a: [", ["not valid YAML"]),
        ("\x00", ["not valid YAML"]),
        ("x" * 300_000, ["is larger than 256 KiB"]),
        (None, ["cannot be read: no such file or directory"]),
    ],
)
def test_every_mistake_of_a_users_file_has_its_location(
    text: str | None, mistakes: list[str], tmp_path: Path
) -> None:
    """An invalid request, without changes."""
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RequestError) as caught:
        load_expectations(path)
    lines = caught.value.evidence.splitlines()

    assert len(lines) == len(mistakes)
    for line, pattern in zip(lines, mistakes, strict=True):
        assert line.startswith(f"{path}: ")
        assert re.search(pattern, line)


def test_unknown_hardware_has_no_expectations() -> None:
    """No figures, no judgement."""
    assert Expectations().gpu("NVIDIA H100") is None
    assert Expectations().nic("MT4129") is None
