"""The page of a proven network as text; a browser looks at it in test_network_page_browser.py."""

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
    """Collects tags, attributes and text, and notes tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.crossed: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag that begins."""
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Note a tag that ends, and whether it was the innermost one."""
        if not self.open or self.open.pop() != tag:
            self.crossed.append(tag)

    def handle_data(self, data: str) -> None:
        """Keep the words."""
        self.text += data


@pytest.mark.parametrize("nodes", [2, 4, 24])
def test_every_direction_has_a_cell_with_words_in_each_map(nodes: int) -> None:
    """Three maps of n × n cells, each with text, and a row a direction below them; all tags are
    closed.
    """
    tags = Tags(network_page.render_page(verdict(nodes, bad=nodes > 2), **MEASURED))

    classes = [
        (attributes.get("class") or "").split()[:1] for tag, attributes in tags.tags if tag == "td"
    ]
    coloured = [first for first in classes if first and re.fullmatch(r"[st]\d|none", first[0])]
    assert len(coloured) == 3 * nodes * (nodes - 1)
    assert classes.count(["own"]) == 3 * nodes
    assert tags.crossed == []
    assert tags.open == []


def test_tables_can_be_read_aloud() -> None:
    """Heads have a scope, heat maps a caption, and a cell's title tells the pair, the figures and
    the reason.
    """
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


def test_the_page_needs_nothing_else() -> None:
    """Nothing is linked, nothing runs, and the page's own policy forbids both."""
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


def test_what_nodes_say_is_text() -> None:
    """Names, reasons, devices and versions that hold markup come out as the characters they are,
    without control characters.
    """
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


def test_the_word_on_top_is_the_verdict() -> None:
    """Somebody who looks for a second sees PASS or FAIL, in the title as well."""
    assert "<title>PASS: network of h100</title>" in network_page.render_page(
        verdict(4, bad=False), **MEASURED
    )
    assert "<title>FAIL: network of h100</title>" in network_page.render_page(
        verdict(4), **MEASURED
    )


def test_nothing_measured_has_no_maps() -> None:
    """Without a cell the page still says FAIL and why."""
    empty = replace(
        verdict(2, bad=False),
        cells=(),
        findings=(Finding(node="gpu02", status="fail", text="no answer"),),
    )
    text = network_page.render_page(empty, **MEASURED)

    assert "<table" not in text
    assert "nothing was measured" in text
    assert "no answer" in text


def test_a_figure_in_another_unit_says_so() -> None:
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
    """Like the others is one calm colour; a half and a quarter are where others begin.

    For latency, less is better.
    """
    assert network_page.scale_step(value, 100, less_is_better=less) == step


def test_a_share_of_nothing_is_like_the_others() -> None:
    """All zero is all equal, and no division by zero."""
    assert network_page.scale_step(0.0, 0.0, less_is_better=False) == 4
    assert network_page.scale_step(0.0, 0.0, less_is_better=True) == 4
    assert network_page.scale_step(0.0, 1.0, less_is_better=True) == 5


def test_the_legend_names_each_colour() -> None:
    """With the steps of the scale, best first, and the transports that are there."""
    bandwidth, latency, transport = network_page.heat_maps(verdict(4, bad=False))
    numbers = {f"s{step}": begin for step, begin in enumerate(network_page._STEPS)}

    assert bandwidth.legend == latency.legend
    assert [colour for colour, _ in bandwidth.legend] == [*sorted(numbers, reverse=True), "none"]
    for colour, argv in bandwidth.legend[:-2]:
        assert f"{numbers[colour]:g}×" in argv
    assert [argv for _, argv in transport.legend] == ["GDR: RDMA with GPUDirect"]
