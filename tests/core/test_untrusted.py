"""Sanitizing of text from nodes."""

from __future__ import annotations

import pytest

from launcher.core import redaction, untrusted


def test_plain() -> None:
    """No line of a log can act on the terminal; tabs stay."""
    assert untrusted.sanitize("\x1b[36m(pid=1)\x1b[0m a\tb\x07\r\x1b]0;title\x07") == "(pid=1) a\tb"


def test_an_unterminated_code_hides_no_other_line() -> None:
    """The next line of a log may have the error."""
    text = "a\x1b]8;;https://x\ntorch.OutOfMemoryError: CUDA out of memory. Tried to\n"

    assert untrusted.sanitize(text) == "a\ntorch.OutOfMemoryError: CUDA out of memory. Tried to\n"


@pytest.mark.parametrize("place", range(-12, 2))
def test_redaction_comes_before_truncation(place: int) -> None:
    """At any position: a part is not recognized later."""
    secret = "hunter2-hunter2"
    redaction.add_secrets(secret)
    for size, cut in (
        (untrusted.MAX_LINE_LENGTH, untrusted.truncate),
        (300, untrusted.excerpt),
        (2000, untrusted.single_line),
        (8000, untrusted.single_line),
    ):
        text = f"{'x' * (size + place)}{secret}{'y' * 9000}"
        assert not [at for at in range(3, 15) if secret[:at] in cut(text)], (size, cut)
    for size, ending in (
        (300, untrusted.excerpt),
        (2 << 20, untrusted.truncate),
    ):
        text = f"{'x' * 9000}\n{secret}{'y' * (size + place)}"
        remaining = ending(text, last=True)
        assert not [at for at in range(3, 15) if secret[-at:] in remaining], (size, ending)
