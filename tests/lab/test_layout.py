"""Names and addresses of lab hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.core.errors import RequestError
from launcher.lab import layout
from launcher.lab.layout import Lab


def make(tmp_path: Path, **changes: object) -> Lab:
    values = {
        "name": "vlaunch-lab",
        "directory": tmp_path,
        "subnet": "10.77.0.0/24",
        "nodes": 2,
        "gpus": 1,
        **changes,
    }
    return layout.make_lab(**values)  # type: ignore[arg-type]


def test_hosts_are_numbered_from_eleven(tmp_path: Path) -> None:
    """The first host has .11, and the machine itself .1."""
    lab = make(tmp_path, nodes=3)

    assert [(host.name, host.ip) for host in lab.hosts] == [
        ("node1", "10.77.0.11"),
        ("node2", "10.77.0.12"),
        ("node3", "10.77.0.13"),
    ]
    assert lab.gateway == "10.77.0.1"


def test_interface_names_fit_into_linux(tmp_path: Path) -> None:
    """However long the lab's name, its interfaces have at most 15 characters and differ from
    another lab's.
    """
    long = make(tmp_path, name="a" + "b" * 30, nodes=200)
    other = make(tmp_path, name="a" + "b" * 29)

    assert max(len(name) for name in (long.bridge, *(host.link for host in long.hosts))) <= 15
    assert long.bridge != other.bridge


def test_another_labs_namespace_is_ignored() -> None:
    """A lab may be called `vlaunch-lab-node1`; its hosts are not those of `vlaunch-lab`."""
    assert layout.is_netns("vlaunch-lab-node1", "vlaunch-lab")
    assert not layout.is_netns("vlaunch-lab-node1-node1", "vlaunch-lab")
    assert layout.is_netns("vlaunch-lab-node1-node1", "vlaunch-lab-node1")


def test_a_lab_with_gpus_is_loaded_as_it_was(tmp_path: Path) -> None:
    """Their model and their troubles too."""
    changes = {"accelerator": "nvidia", "gpu_model": "l4", "troubles": ("node2:lost:1",)}
    lab = make(tmp_path, gpus=4, **changes)
    layout.save_lab(lab)

    assert layout.load_lab(tmp_path) == lab
    assert lab.troubles


def test_a_record_without_gpus_has_slots(tmp_path: Path) -> None:
    """A running lab survives an upgrade."""
    record = '{"name": "x", "subnet": "10.0.0.0/24", "nodes": 1, "gpus": 1}'
    (tmp_path / layout.RECORD).write_text(record)
    lab = layout.load_lab(tmp_path)

    assert lab is not None
    assert (lab.accelerator, lab.troubles) == ("cpu", ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"troubles": ("node1:lost",)}, "needs GPUs"),
        ({"accelerator": "nvidia", "gpus": 0}, "1 to 16"),
        ({"accelerator": "nvidia", "gpus": 17}, "1 to 16"),
        ({"accelerator": "nvidia", "gpu_model": "h1000"}, "cannot simulate"),
        ({"accelerator": "nvidia", "troubles": ("node9:lost",)}, "no host"),
    ],
)
def test_invalid_gpus_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    """Before anything is created."""
    with pytest.raises(RequestError, match=message):
        make(tmp_path, **changes)


def test_a_saved_lab_is_loaded_as_it_was(tmp_path: Path) -> None:
    """`status` reads the lab of `up`."""
    lab = make(tmp_path, nodes=3, gpus=4)
    layout.save_lab(lab)

    assert layout.load_lab(tmp_path) == lab


@pytest.mark.parametrize(
    "record", ["", "[]", "{}", '{"name": "x/y", "subnet": "10.0.0.0/24", "nodes": 1, "gpus": 1}']
)
def test_an_unreadable_record_is_no_lab(tmp_path: Path, record: str) -> None:
    """An incomplete record does not stop `down`."""
    (tmp_path / layout.RECORD).write_text(record)

    assert layout.load_lab(tmp_path) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "../etc"},
        {"name": "Lab"},
        {"name": ""},
        {"subnet": "10.77.0.5/24"},
        {"subnet": "nonsense"},
        {"nodes": 0},
        {"nodes": 245},
        {"subnet": "10.77.0.0/29"},
        {"gpus": -1},
    ],
)
def test_invalid_labs_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    """Names, subnets and counts are validated before anything is created."""
    with pytest.raises(RequestError):
        make(tmp_path, **wrong)
