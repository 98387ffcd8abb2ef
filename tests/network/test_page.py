"""The page of a network verdict as text; test_page_browser.py opens it in a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from launcher.core.check import Finding
from launcher.network import page as network_page
from tests.network.test_network_view import HOSTILE, slow, verdict

MEASURED = {"cluster": "h100", "measured_at": "2026-11-20 22:00:00+0000", "version": "0.1.0"}
VOID = {"meta", "br", "img"}


class Tags(HTMLParser):
    """A parser of tags, attributes and text; it records tags closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.crossed: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record a start tag."""
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Record an end tag, and whether it closes the innermost one."""
        if not self.open or self.open.pop() != tag:
            self.crossed.append(tag)

    def handle_data(self, data: str) -> None:
        """Record text."""
        self.text += data


@pytest.mark.parametrize("nodes", [2, 4, 24])
def test_every_direction_has_a_cell_with_text_in_every_map(nodes: int) -> None:
    """Three maps of n × n cells, and a row per direction below; all tags are closed."""
    tags = Tags(network_page.render_page(verdict(nodes, bad=nodes > 2), **MEASURED))

    classes = [
        (attributes.get("class") or "").split()[:1] for tag, attributes in tags.tags if tag == "td"
    ]
    coloured = [first for first in classes if first and re.fullmatch(r"[st]\d|none", first[0])]
    assert len(coloured) == 3 * nodes * (nodes - 1)
    assert classes.count(["own"]) == 3 * nodes
    assert tags.crossed == []
    assert tags.open == []


def test_tables_are_accessible() -> None:
    """Heads have a scope, heat maps a caption, and cells a title with pair, figures and reason."""
    text = network_page.render_page(verdict(4), **MEASURED)
    tags = Tags(text)

    assert all(
        attributes.get("scope") in ("row", "col") for tag, attributes in tags.tags if tag == "th"
    )
    assert sum(tag == "caption" for tag, _ in tags.tags) == 3
    assert (
        'title="gpu01 → gpu03: FAIL 1.2 GB/s, 43.1 µs, NET/Socket (NET/Socket is below the'
        ' required level: RDMA with GPUDirect)"' in text
    )


def test_the_page_is_self_contained() -> None:
    """No links and no scripts, by its own policy too."""
    text = network_page.render_page(verdict(4), **MEASURED)
    tags = Tags(text)

    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in tags.tags}
    assert not [
        attributes
        for _, attributes in tags.tags
        if {"src", "href", "onclick", "style"} & set(attributes)
    ]
    assert "url(" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_the_page_is_sanitized() -> None:
    """Markup in names, reasons and versions is shown as text, without control characters."""
    bad = verdict(3)
    cells = tuple(
        replace(cell, transport=HOSTILE, device=HOSTILE, text=HOSTILE) for cell in bad.cells
    )
    finding = Finding(node=HOSTILE, status="fail", text=HOSTILE, evidence=HOSTILE, fix=HOSTILE)
    hostile = replace(
        bad,
        nodes=(*bad.nodes[:-1], HOSTILE),
        cells=cells,
        findings=(finding,),
        why=HOSTILE,
        backend=HOSTILE,
        versions={HOSTILE: HOSTILE},
    )
    text = network_page.render_page(hostile, cluster=HOSTILE, measured_at=HOSTILE, version=HOSTILE)
    tags = Tags(text)

    assert "script" not in {tag for tag, _ in tags.tags}
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert "<script>alert(1)</script>[bold]" in tags.text
    assert {name for _, attributes in tags.tags for name in attributes} <= {
        "lang",
        "charset",
        "http-equiv",
        "content",
        "name",
        "class",
        "id",
        "aria-labelledby",
        "aria-label",
        "tabindex",
        "role",
        "scope",
        "title",
    }


def test_the_heading_is_the_verdict() -> None:
    """PASS or FAIL at first glance, in the title as well."""
    assert "<title>PASS: network of h100</title>" in network_page.render_page(
        verdict(4, bad=False), **MEASURED
    )
    assert "<title>FAIL: network of h100</title>" in network_page.render_page(
        verdict(4), **MEASURED
    )


def test_no_measurement_has_no_maps() -> None:
    """Without a cell the page still shows FAIL and the reason."""
    empty = replace(
        verdict(2, bad=False),
        cells=(),
        findings=(Finding(node="gpu02", status="fail", text="no answer"),),
    )
    text = network_page.render_page(empty, **MEASURED)

    assert "<table" not in text
    assert "nothing was measured" in text
    assert "no answer" in text


def test_a_figure_in_another_unit_shows_it() -> None:
    """11.8 MB/s among gigabytes is not a bare 11.8."""
    bandwidth = network_page.heat_maps(slow(3))[0]
    fields = [field for _, row in bandwidth.rows for field in row if field is not None]

    assert bandwidth.unit == "GB/s"
    assert [field.text for field in fields][:4] == ["11.8 MB/s", "2.3", "2.3", "940 B/s"]
    assert [field.colour for field in fields][:2] == ["s0", "s4"]


@pytest.mark.parametrize(
    ("value", "less", "step"),
    [
        (100, False, 4),
        (126, False, 5),
        (89, False, 3),
        (74, False, 2),
        (49, False, 1),
        (24, False, 0),
        (0, False, 0),
        (100, True, 4),
        (70, True, 5),
        (115, True, 3),
        (150, True, 2),
        (300, True, 1),
        (500, True, 0),
    ],
)
def test_a_colour_is_a_share_of_the_median(value: float, less: bool, step: int) -> None:
    """Average figures share a calm colour; others begin at a half and a quarter. For latency, less
    is better.
    """
    assert network_page.scale_step(value, 100, less_is_better=less) == step


def test_a_median_of_zero() -> None:
    """All zeros are equal, and no division by zero."""
    assert network_page.scale_step(0.0, 0.0, less_is_better=False) == 4
    assert network_page.scale_step(0.0, 0.0, less_is_better=True) == 4
    assert network_page.scale_step(0.0, 1.0, less_is_better=True) == 5


def test_the_legend_names_every_colour() -> None:
    """With the steps of the scale, best first, and the present transports."""
    bandwidth, latency, transport = network_page.heat_maps(verdict(4, bad=False))
    numbers = {f"s{step}": begin for step, begin in enumerate(network_page._STEPS)}

    assert bandwidth.legend == latency.legend
    assert [colour for colour, _ in bandwidth.legend] == [*sorted(numbers, reverse=True), "none"]
    for colour, argv in bandwidth.legend[:-2]:
        assert f"{numbers[colour]:g}×" in argv
    assert [argv for _, argv in transport.legend] == ["GDR: RDMA with GPUDirect"]
