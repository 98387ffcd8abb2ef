"""Diagram of the import contract's bands in docs/explanation/architecture.md: `make layout`."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from importlinter import api

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
BEGIN, END = "<!-- layout: begin -->\n", "<!-- layout: end -->\n"


def diagram() -> str:
    """Return one row per band, the highest first, with the first sentence of its docstring."""
    contracts = api.read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    bands = [re.split(r" [|:] ", layer) for layer in layers]
    width = max(len(_folder(package)) for band in bands for package in band)
    blocks = ["\n".join(f"│ {_row(package, width)}" for package in band) for band in bands]
    return "```text\n" + "\n├─\n".join(blocks) + "\n▼ imports\n```\n"


def update_page(page: str) -> str:
    """Return the page with the current diagram between the markers."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{diagram()}\n{END}{rest.partition(END)[2]}"


def _folder(package: str) -> str:
    return package.strip(" ()").removeprefix("launcher.") + "/"


def _row(package: str, width: int) -> str:
    folder = _folder(package)
    summary = import_module(f"launcher.{folder[:-1]}").__doc__ or ""
    sentence = " ".join(summary.split("\n\n")[0].split()).partition(". ")[0]
    return f"{folder:<{width}}  {sentence.rstrip('.')}"


if __name__ == "__main__":
    PAGE.write_text(update_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
