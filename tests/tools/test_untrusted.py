"""What a node wrote, made safe to print."""

from __future__ import annotations

from launcher.tools import untrusted


def test_plain() -> None:
    """Nothing of a log line can draw on a terminal; tabs stay."""
    assert untrusted.plain("\x1b[36m(pid=1)\x1b[0m a\tb\x07\r\x1b]0;title\x07") == "(pid=1) a\tb"
