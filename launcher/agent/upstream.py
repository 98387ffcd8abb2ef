"""Texts of other programs; in the agent's archive, `launcher/upstream` is in this place."""

from __future__ import annotations

from ..upstream import any_of, text

__all__ = ["any_of", "text"]
