"""Words that nodes have had a hand in, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.tools import untrusted

if TYPE_CHECKING:
    from rich.text import Text


def plain(words: str, style: str = "") -> Text:
    """Return words as they are, on one line: neither rich's markup nor a terminal's codes."""
    from rich.text import Text

    return Text(untrusted.brief(words), style=style)
