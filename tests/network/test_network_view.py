"""The network between nodes in a narrow terminal, a wide one and a pipe."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from rich.console import Console

from launcher.app import terminal
from launcher.core.check import Finding
from launcher.core.domain import Level
from launcher.network import network_view
from launcher.network.network_shape import Cell, Verdict
from launcher.network.probe_command import Collective
from tests import golden

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = "\x1b[31m<script>alert(1)</script>[bold]\x07\x9b2J\"'&"


def verdict(nodes: int, *, bad: bool = True) -> Verdict:
    """Return a verdict on a cluster with RDMA; when `bad`, one pair uses TCP, one is slow and one
    is cut.
    """
    names = tuple(f"gpu{number:02}" for number in range(1, nodes + 1))
    cells = []
    for index, (source, target) in enumerate(permutations(names, 2)):
        cells.append(
            Cell(
                source=source,
                target=target,
                status="pass",
                transport="NET/IB/GDRDMA",
                device="mlx5_0:1/RoCE",
                level="gdrdma",
                bandwidth=24.9e9 - index * 37 % 11 * 5e7,
                latency=8.2e-6 + index * 13 % 7 * 1e-7,
                size=256_000_000,
            )
        )
    findings: tuple[Finding, ...] = (Finding(node="gpu01", status="pass", text="not to be seen"),)
    if bad:
        tcp = "NET/Socket is below the required level: RDMA with GPUDirect"
        cells[1] = replace(
            cells[1],
            status="fail",
            transport="NET/Socket",
            device="",
            level="any",
            bandwidth=1.17e9,
            latency=4.31e-5,
            text=tcp,
        )
        cells[3] = replace(
            cells[3],
            status="warn",
            bandwidth=11.9e9,
            text="11.9 GB/s, where other pairs have 24.8 GB/s",
        )
        cells[-1] = replace(
            cells[-1],
            status="fail",
            transport="",
            device="",
            level=None,
            bandwidth=None,
            latency=None,
            text="was not measured",
        )
        findings = (
            *findings,
            Finding(
                node="gpu03",
                status="fail",
                text=f"no RDMA device in the container; from gpu01: {tcp}",
                evidence="gpu03:412:530 [0] NCCL INFO NET/IB : No device found.",
                fix=(
                    "give the container /dev/infiniband: `vlaunch up` with `network: {fabric:"
                    " roce}`"
                ),
            ),
            Finding(
                node="",
                status="warn",
                text=f"{cells[3].source} → {cells[3].target}: {cells[3].text}",
            ),
        )
    return Verdict(
        backend="nccl",
        nodes=names,
        required="gdrdma",
        why="`fabric: roce`, and NVIDIA H100 supports GPUDirect",
        cells=tuple(cells),
        findings=findings,
        collective=Collective(
            ranks=nodes * 8, latency=3.1e-5, size=2**30, algbw=45.2e9, busbw=84.7e9
        ),
        ranks=nodes * 8,
        seconds=21.4,
        versions={"torch": "2.9.1+cu130", "nccl": "2.28.9"},
    )


def slow(nodes: int) -> Verdict:
    """Return a verdict on lab hosts with Gloo; one pair is limited to 100 Mbit/s."""
    healthy = verdict(nodes, bad=False)
    cells = [
        replace(
            cell,
            transport="Gloo/TCP",
            device="eth0",
            level="any",
            bandwidth=2.31e9,
            latency=1.08e-4,
        )
        for cell in healthy.cells
    ]
    cells[0] = replace(
        cells[0],
        status="fail",
        bandwidth=11.8e6,
        latency=2.4e-2,
        text="11.8 MB/s, where other pairs have 2.3 GB/s",
    )
    cells = [
        replace(cell, bandwidth=940.0, latency=None) if cell is cells[3] else cell for cell in cells
    ]
    return replace(
        healthy,
        backend="gloo",
        required="any",
        why="CPUs use Gloo, which is TCP",
        cells=tuple(cells),
    )


def drawn(what: Verdict, width: int, *, colour: bool = False) -> str:
    """Return a verdict as printed on a console of some width."""
    file = io.StringIO()
    to = Console(
        file=file,
        width=width,
        color_system="standard" if colour else None,
        force_terminal=colour,
        highlight=False,
    )
    terminal.show(network_view.render(what), to)
    return file.getvalue()


CASES = {
    "two": verdict(2, bad=False),
    "four": verdict(4),
    "six": verdict(6),
    "twenty-four": verdict(24),
    "gloo": slow(3),
}


@pytest.mark.parametrize("width", [80, 200, 1000], ids=["80", "200", "piped"])
@pytest.mark.parametrize("name", CASES)
def test_the_matrix_or_its_summary(name: str, width: int) -> None:
    """Directions that fit are shown with figures and transport; else only the unusual ones."""
    text = drawn(CASES[name], width)

    assert all(len(line) <= width for line in text.splitlines())
    golden.check(GOLDEN / f"network_{name}_{'piped' if width == 1000 else width}.txt", text)


def test_an_unreachable_node_is_one_row() -> None:
    """A dead node among many fails 2 × (n - 1) directions for one reason."""
    healthy = verdict(24, bad=False)
    cells = tuple(
        (
            replace(c, status="fail", bandwidth=None, latency=None, text="was not measured")
            if "gpu07" in (c.source, c.target)
            else c
        )
        for c in healthy.cells
    )
    text = drawn(replace(healthy, cells=cells), 80)

    assert [line.split() for line in text.splitlines() if "gpu07" in line] == [
        ["FAIL", "gpu07", "every", "node,", "both", "ways", "-", "-", "GDR"]
    ]


def test_nothing_measured_is_a_failure() -> None:
    """Without a cell: no matrix, and no pass."""
    text = drawn(replace(verdict(2, bad=False), cells=(), findings=(), collective=None), 80)

    assert text.split() and text.split()[0] == "FAIL"
    assert "nothing was measured" in text


def test_a_missing_direction_is_a_dash() -> None:
    """A verdict from a file may lack cells."""
    whole = verdict(3, bad=False)
    text = drawn(replace(whole, cells=whole.cells[1:]), 120)

    assert next(line for line in text.splitlines() if line.startswith("gpu01")).split()[1:3] == [
        "·",
        "-",
    ]


@pytest.mark.parametrize("width", [80, 400])
@pytest.mark.parametrize("nodes", [3, 12])
def test_the_matrix_is_sanitized(nodes: int, width: int) -> None:
    """Escape sequences and rich markup in names, reasons and transports are shown as text."""
    hostile = verdict(nodes)
    cells = tuple(
        replace(
            cell,
            target=HOSTILE if cell.target == "gpu02" else cell.target,
            transport=HOSTILE,
            text=HOSTILE,
            source=HOSTILE if cell.source == "gpu02" else cell.source,
            status="fail",
            bandwidth=None,
            device=HOSTILE,
        )
        for cell in hostile.cells
    )
    names = tuple(HOSTILE if name == "gpu02" else name for name in hostile.nodes)
    finding = Finding(node=HOSTILE, status="fail", text=HOSTILE, evidence=HOSTILE, fix=HOSTILE)
    text = drawn(
        replace(hostile, nodes=names, cells=cells, findings=(finding,), why=HOSTILE), width
    )

    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert "[bold]" in text


def test_colour_repeats_the_text() -> None:
    """A red cell has the text FAIL as well."""
    text = drawn(verdict(4), 200, colour=True)
    lines = text.splitlines()
    red = [at for at, line in enumerate(lines) if "\x1b[1;31m" in line]

    assert red
    assert all("FAIL" in "".join(lines[max(0, at - 1) : at + 1]) for at in red)


@pytest.mark.parametrize(
    ("transport", "level", "label"),
    [
        ("P2P/MNNVL", "gdrdma", "MNNVL"),
        ("NET/AWS Libfabric/GDRDMA", "gdrdma", "GDR"),
        ("NET/gIB", "rdma", "RDMA"),
        ("NET/FastSocket", "any", "TCP"),
        ("Gloo/TCP", "any", "TCP"),
        ("", None, "?"),
    ],
)
def test_a_transport_has_a_short_name(transport: str, level: Level | None, label: str) -> None:
    """The class of the transport, for any name of a plugin."""
    cell = Cell(source="a", target="b", status="pass", transport=transport, level=level)

    assert network_view.transport_mark(cell) == label


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (8.2e-6, "8.2 µs"),
        (2.31e-4, "231 µs"),
        (0.0125, "12.5 ms"),
        (3.1, "3100 ms"),
        (0.0, "0.0 µs"),
    ],
)
def test_format_of_latency(seconds: float, text: str) -> None:
    """Microseconds up to a limit."""
    assert network_view.format_latency(seconds) == text
