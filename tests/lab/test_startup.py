"""Requests that `lab up` refuses before it creates anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.core.errors import RequestError
from launcher.lab import layout, startup
from launcher.lab.layout import Lab


def lab(directory: Path, *, nodes: int = 2, subnet: str = "10.77.0.0/24") -> Lab:
    return layout.make_lab(
        name="vlaunch-lab", directory=directory, subnet=subnet, nodes=nodes, gpus=1
    )


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    """`down` would have to remove them."""
    (tmp_path / "thesis.txt").touch()

    with pytest.raises(RequestError, match="not the folder of a lab cluster"):
        startup.check_directory(lab(tmp_path))


def test_an_empty_or_absent_directory_is_accepted(tmp_path: Path) -> None:
    """As on a fresh machine."""
    short = Path("/tmp") / f"vl-{tmp_path.name[-8:]}"

    startup.check_directory(lab(short))


def test_another_subnet_or_fewer_hosts_need_a_fresh_start(tmp_path: Path) -> None:
    """More hosts are fine; a change that would orphan hosts is not."""
    layout.save_lab(lab(tmp_path))

    with pytest.raises(RequestError, match=r"subnet 10.77.0.0/24, not 10.78.0.0/24"):
        startup.check_directory(lab(tmp_path, subnet="10.78.0.0/24"))
    with pytest.raises(RequestError, match="2 hosts, more than 1"):
        startup.check_directory(lab(tmp_path, nodes=1))


def test_slots_do_not_become_gpus(tmp_path: Path) -> None:
    """Programs of GPUs need a mount that is created at boot."""
    layout.save_lab(lab(tmp_path))
    gpus = layout.make_lab(
        name="vlaunch-lab",
        directory=tmp_path,
        subnet="10.77.0.0/24",
        nodes=2,
        gpus=1,
        accelerator="nvidia",
    )

    with pytest.raises(RequestError, match="accelerator cpu, not nvidia"):
        startup.check_directory(gpus)


def test_a_directory_too_deep_for_sockets_is_refused() -> None:
    """Socket addresses are limited to 107 characters."""
    with pytest.raises(RequestError, match="too long"):
        startup.check_directory(lab(Path("/" + "deep/" * 20)))


def test_concurrent_starts_are_refused(tmp_path: Path) -> None:
    """The second process fails, and the lock ends with its owner."""
    with (
        startup.lab_lock(tmp_path),
        pytest.raises(RequestError, match="another"),
        startup.lab_lock(tmp_path),
    ):
        pass
    with startup.lab_lock(tmp_path):
        pass
