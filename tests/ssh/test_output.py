"""Buffered output of a stream that arrives in arbitrary pieces."""

from __future__ import annotations

import pytest

from launcher.ssh.output import LIMIT, Output


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_marker_in_pieces(size: int) -> None:
    """Noise before the marker is dropped, wherever the stream is split."""
    data = b"noise\nmar mark mar\nmark\none\ntwo"
    buffered, lines = Output("mark"), list[str]()
    followed = Output("mark", lines.append)
    for at in range(0, len(data), size):
        buffered.feed(data[at : at + size])
        followed.feed(data[at : at + size])
    assert buffered.end() in ("mar\nmark\none\ntwo", "one\ntwo")
    assert followed.end() == ""
    assert lines[-2:] == ["one", "two"]


def test_without_marker_the_noise_is_the_evidence() -> None:
    """It explains a command that never started."""
    output = Output("mark")
    output.feed(b"account closed\n")
    assert output.end() == "account closed\n"


def test_limit() -> None:
    """Memory is bounded, and the cut is visible."""
    output = Output("m")
    output.feed(b"m\n")
    for _ in range(LIMIT // 2**20 + 2):
        output.feed(b"x" * 2**20)
    text = output.end()
    assert text.endswith("…[truncated]")
    assert len(text.encode()) < LIMIT + 100


def test_character_cut_in_two() -> None:
    """A character is decoded even if its bytes arrive separately."""
    output = Output("m")
    for piece in (b"m\n", b"\xc3", b"\xbc"):
        output.feed(piece)
    assert output.end() == "ü"


def test_endless_line() -> None:
    """An endless line does not fill the memory."""
    lines: list[str] = []
    output = Output("m", lines.append)
    output.feed(b"m\n")
    for _ in range(LIMIT // 2**20 + 5):
        output.feed(b"x" * 2**20)
    output.feed(b"\nnext\n")
    assert lines[1] == "next"
    assert len(lines[0]) <= LIMIT + 2**20
