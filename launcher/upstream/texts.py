"""Texts of the entries; archives for nodes have `entries.pack_texts` instead."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache


@cache
def load_texts(program: str) -> Mapping[str, str]:
    """Return the texts of a program's entries by id."""
    from .entries import load_program  # noqa: PLC0415 - which imports this package

    return {entry.id: entry.text for entry in load_program(program).entries.values()}
