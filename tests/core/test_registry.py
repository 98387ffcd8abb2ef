"""Tables in which packages register."""

from __future__ import annotations

from launcher.core.registry import entries, program_files


def test_every_registered_program_has_files() -> None:
    """By names that no other program has; another name has none."""
    names = [name for _, name, _ in entries("NODE_PROGRAMS")]

    assert sorted(names) == ["batch.pyz", "network.pyz", "vlaunch_cpu_ray"]
    assert all(map(program_files, names))
    assert program_files("other.pyz") == {}
