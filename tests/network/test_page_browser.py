"""The page of a network verdict in a real browser: content, legibility, and no requests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, sync_playwright

from launcher.core.domain import Level
from launcher.network.network_shape import Verdict
from launcher.network.page import render_page
from tests.network.test_network_view import verdict

# Needs the machine's Chromium, as the lab hosts need its Docker.
pytestmark = pytest.mark.lab
NAMES = ("chromium", "chromium-browser", "google-chrome")
Scheme = Literal["light", "dark"]

# Visible content: cells by class, and the contrast of all elements with text (WCAG 2.2, 1.4.3).
VIEW = """() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = colour => rgb(colour).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return getComputedStyle(at).backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };
  const contrast = element => {
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const worded = [...document.body.querySelectorAll("*")].filter(
    e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())
      && e.tagName !== "STYLE");
  return {
    cells: [...document.querySelectorAll(".heat td:not(.own)")].map(e => ({
      map: e.closest("section").querySelector("h2").textContent,
      title: e.title, text: e.textContent.trim(),
      back: getComputedStyle(e).backgroundColor, box: e.getBoundingClientRect().width})),
    faint: worded.filter(e => contrast(e) < 4.5)
      .map(e => `${e.className} ${e.textContent.slice(0, 40)} ${contrast(e).toFixed(2)}`),
    worded: worded.length,
    wide: document.documentElement.scrollWidth,
    scripts: document.scripts.length,
    page: getComputedStyle(document.body).backgroundColor,
  };
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The machine's Chromium, started once."""
    path = next((result for name in NAMES if (result := shutil.which(name))), None)
    if path is None:
        pytest.fail("no Chromium on this machine; install it: `sudo apt-get install chromium`")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=arguments, timeout=60_000)
        yield started
        started.close()


def inspect(
    browser: Browser, folder: Path, what: Verdict, *, scheme: Scheme = "light", width: int = 1280
) -> dict[str, Any]:
    """Open the page of a verdict and return its content; requests and console output fail."""
    file = folder / "network.html"
    file.write_text(
        render_page(what, cluster="h100", measured_at="2026-11-20 22:00:00+0000", version="0.1.0"),
        encoding="utf-8",
    )
    requests: list[str] = []
    messages: list[str] = []
    with browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 900}
    ) as context:
        tab = context.new_page()
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.on("dialog", lambda dialog: (messages.append(dialog.message), dialog.dismiss()))
        tab.goto(file.as_uri(), wait_until="networkidle", timeout=30_000)
        tab.locator("summary").click(timeout=10_000)
        view: dict[str, Any] = tab.evaluate(VIEW)

    assert requests == [file.as_uri()]
    assert messages == []
    return view


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_legible(browser: Browser, tmp_path: Path, scheme: Scheme, width: int) -> None:
    """Every cell has text and a colour for its speed, text has contrast, and only tables scroll
    sideways.
    """
    view = inspect(browser, tmp_path, verdict(4), scheme=scheme, width=width)
    cells = {(cell["map"], cell["title"].split(":")[0]): cell for cell in view["cells"]}
    fast, slow, cut = "gpu01 → gpu02", "gpu01 → gpu03", "gpu04 → gpu03"

    assert len(view["cells"]) == len(cells) == 3 * 4 * 3
    assert all(
        cell["text"] and cell["box"] > 20 and cell["back"] != "rgba(0, 0, 0, 0)"
        for cell in view["cells"]
    )
    for name in ("Bandwidth", "Latency", "Transport"):
        assert len({cells[name, pair]["back"] for pair in (fast, slow, cut)}) == 3
        assert "✕" in cells[name, slow]["text"]
        assert "✕" not in cells[name, fast]["text"]
    assert cells["Bandwidth", fast]["text"] == "24.9"
    assert cells["Transport", slow]["text"] == "✕ TCP"
    assert view["worded"] > 100
    assert view["faint"] == []
    assert view["wide"] <= width
    assert view["scripts"] == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_on_every_colour(
    browser: Browser, tmp_path: Path, scheme: Scheme
) -> None:
    """No two colours of a scale are equal."""
    shares = (1.0, 1.0, 1.0, 1.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 1.0, 1.0)
    kinds: list[tuple[str, Level | None]] = [
        ("P2P/MNNVL", "gdrdma"),
        ("NET/IB/GDRDMA", "gdrdma"),
        ("NET/IB", "rdma"),
        ("NET/Socket", "any"),
        ("", None),
    ]
    whole = verdict(4, bad=False)
    cells = tuple(
        replace(cell, bandwidth=20e9 * share, latency=1e-5 / share, transport=name, level=level)
        for cell, share, (name, level) in zip(whole.cells, shares, kinds * 3, strict=False)
    )
    view = inspect(browser, tmp_path, replace(whole, cells=cells), scheme=scheme)
    colours = {
        name: {cell["back"] for cell in view["cells"] if cell["map"] == name}
        for name in ("Bandwidth", "Latency", "Transport")
    }

    assert {name: len(result) for name, result in colours.items()} == {
        "Bandwidth": 6,
        "Latency": 6,
        "Transport": 5,
    }
    assert view["faint"] == []


def test_the_dark_scheme(browser: Browser, tmp_path: Path) -> None:
    """It follows the preference of the reader."""
    assert (
        inspect(browser, tmp_path, verdict(2, bad=False))["page"]
        != (inspect(browser, tmp_path, verdict(2, bad=False), scheme="dark")["page"])
    )


def test_many_nodes(browser: Browser, tmp_path: Path) -> None:
    """64 nodes are three scrolling tables of 4032 cells."""
    view = inspect(browser, tmp_path, verdict(64))

    assert len(view["cells"]) == 3 * 64 * 63
    assert all(cell["text"] for cell in view["cells"])
    assert view["wide"] <= 1280


def test_markup_in_names(browser: Browser, tmp_path: Path) -> None:
    """An image tag as a name sends no request and runs no script."""
    name = (
        "<img src=http://192.0.2.1/x"
        " onerror=alert(1)><script>alert(2)</script>\"onmouseover='alert(3)'"
    )
    whole = verdict(3)
    cells = tuple(
        replace(
            c,
            source=name if c.source == "gpu01" else c.source,
            target=name if c.target == "gpu01" else c.target,
            text=name,
        )
        for c in whole.cells
    )
    findings = tuple(
        replace(finding, text=name, evidence=name, fix=name) for finding in whole.findings
    )
    view = inspect(
        browser,
        tmp_path,
        replace(whole, nodes=(name, *whole.nodes[1:]), cells=cells, findings=findings, why=name),
    )

    assert view["scripts"] == 0
    assert len(view["cells"]) == 3 * 3 * 2
    assert any(cell["title"].startswith(name) for cell in view["cells"])
