"""Words that nodes have had a hand in, as text and as lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.app.terminal import Line
from launcher.core import untrusted

if TYPE_CHECKING:
    from rich.text import Text


def plain(words: str, style: str = "") -> Text:
    """Return words as they are, on one line: neither rich's markup nor a terminal's codes."""
    from rich.text import Text

    return Text(untrusted.brief(words), style=style)


def line(words: str, style: str = "", *, lead: Text | str = "") -> Line:
    """Return words as a line that goes on below their beginning, after a `lead`."""
    before = plain(lead) if isinstance(lead, str) else lead
    return Line(plain("").append_text(before).append_text(plain(words, style)), len(before))


def log(words: str, style: str = "dim", *, margin: int) -> Line:
    """Return a line of evidence behind `margin` spaces; it is left as it is."""
    return Line(plain(" " * margin + words, style), None)
