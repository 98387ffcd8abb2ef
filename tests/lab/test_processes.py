"""Recognition of lab processes by the kernel's data, which is empty during exec(2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.lab import layout, processes

LAB = layout.make_lab(
    name="vlaunch-lab", directory=Path("/var/lib/x"), subnet="10.77.0.0/24", nodes=2, gpus=1
)


def write_process(proc: Path, pid: int, name: str, environment: str, nspid: str) -> None:
    """Write the `/proc` entry of a process."""
    (proc / f"{pid}/ns").mkdir(parents=True, exist_ok=True)
    (proc / f"{pid}/ns/net").touch()
    (proc / f"{pid}/environ").write_text(environment)
    (proc / f"{pid}/status").write_text(f"Name:\t{name}\nNSpid:\t{nspid}\n")


@pytest.mark.parametrize(
    ("name", "environment", "booted"),
    [
        ("sh", "PATH=/bin\0VLAUNCH_LAB=vlaunch-lab/node1\0", False),  # one more exec(2) to come
        ("env", "PATH=/bin\0VLAUNCH_LAB=vlaunch-lab/node1\0", False),
        ("sleep", "", False),  # during exec(2)
        ("sleep", "PATH=/bin\0VLAUNCH_LAB=vlaunch-lab/node1\0", True),
        ("sleep", "PATH=/bin\0VLAUNCH_LAB=vlaunch-lab/node2\0", False),
    ],
)
def test_a_host_has_booted_when_no_exec_can_hide_its_first_process(
    name: str, environment: str, booted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that enter a host right after its boot must always see its init process."""
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    write_process(tmp_path, 71, "unshare", "VLAUNCH_LAB=vlaunch-lab/node1\0", "71")
    write_process(tmp_path, 72, name, environment, "72\t1")

    assert processes.is_booted(LAB.hosts[0]) is booted
    assert processes.init_pid(LAB.hosts[0]) == (72 if "node1" in environment else None)
