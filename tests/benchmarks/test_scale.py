"""The benchmark of growth runs, and what a person sees does not grow with the cluster."""

from __future__ import annotations

import json

import pytest

from benchmarks import scale

FEW, MANY = 20, 40


@pytest.mark.parametrize("name", scale.CASES)
def test_every_command_runs_and_says_what_it_took(name: str) -> None:
    """Two nodes are enough to see that the simulated ones know all that is asked."""
    took = scale.measure(scale.CASES[name], 2)

    assert took.cpu > 0
    assert took.lines > 0
    assert (took.trips > 0) == (took.commands > 0) == ("--log" not in name)


@pytest.mark.parametrize("name", scale.CASES)
def test_lines_and_round_trips_do_not_grow_with_the_nodes(name: str) -> None:
    """Equal nodes are one line, and all are asked at once. A slow machine shows a wait or repeats a
    query, whatever the number of nodes.
    """
    few, many = (scale.measure(scale.CASES[name], nodes) for nodes in (FEW, MANY))

    assert abs(many.lines - few.lines) <= 5
    assert abs(many.trips - few.trips) <= 5
    assert abs(many.commands - few.commands) <= 5


def test_memory_is_watched() -> None:
    """What the command held at once, and no time, for watching costs some."""
    took = scale.measure(scale.CASES["status"], 2, memory=True)

    assert 0 < took.memory < 100e6


def test_growth_is_by_what_the_work_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that nodes tell of each other is measured by directions, the others by nodes; one
    that takes more for each is named.
    """
    figures = {
        "status": {16: [scale.Figures(cpu=0.016)], 256: [scale.Figures(cpu=0.256)]},
        "check": {16: [scale.Figures(cpu=0.240)], 256: [scale.Figures(cpu=65.28)]},
        "down": {16: [scale.Figures(cpu=0.016)], 256: [scale.Figures(cpu=0.512)]},
    }

    assert scale.table(figures, [16, 256], 1) == 1
    output = capsys.readouterr().out
    assert "| `status`, per node, ms | 1.0 | 1.0 | 1.00× (1.00–1.00) |" in output
    assert "| `check`, per direction, µs | 1000.0 | 1000.0 | 1.00× (1.00–1.00) |" in output
    assert output.splitlines()[-1].endswith("missed by down")


def test_one_measurement_is_one_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is what each figure of the tables is read from."""
    monkeypatch.setattr("sys.argv", ["scale", "--case", "status", "--nodes", "3"])
    scale.main()

    assert scale.Figures(**json.loads(capsys.readouterr().out)).lines == 7
