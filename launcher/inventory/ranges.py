"""Host ranges: `gpu[01-03,07]` → `gpu01 gpu02 gpu03 gpu07`, the notation of ClusterShell's node
sets, bounded.
"""

from __future__ import annotations

import itertools
import math
import re

MAX_NODES = 1024

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand(text: str) -> tuple[str, ...]:
    """Return what `text` stands for, in order; zero padding is kept and several ranges multiply.

    Raises ValueError, in words that start with "should", when the notation is wrong or gives more
    than `MAX_NODES`.
    """
    if count(text) > MAX_NODES:
        raise ValueError(f"should stand for at most {MAX_NODES} nodes")
    pieces = _RANGE.split(text)
    ranges = [
        [number for part in inside.split(",") for number in _numbers(part)]
        for inside in pieces[1::2]
    ]
    return tuple(
        "".join(itertools.chain.from_iterable(zip(pieces[::2], (*choice, ""), strict=True)))
        for choice in itertools.product(*ranges)
    )


def count(text: str) -> int:
    """Return how many names `text` stands for, without making them; raises ValueError when the
    notation is wrong.
    """
    pieces = _RANGE.split(text)
    if any("[" in piece or "]" in piece for piece in pieces[::2]):
        raise ValueError("should close each `[` with one `]`")
    return math.prod(
        sum(last - first + 1 for first, last, _ in map(_span, inside.split(",")))
        for inside in pieces[1::2]
    )


def _numbers(part: str) -> list[str]:
    first, last, width = _span(part)
    return [str(number).zfill(width) for number in range(first, last + 1)]


def _span(part: str) -> tuple[int, int, int]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError("should have numbers between `[` and `]`, such as [01-16] or [1,3-5]")
    first, last = match[1], match[2] or match[1]
    if int(first) > int(last):
        raise ValueError(f"should have its ranges count upwards, which {first}-{last} does not")
    return int(first), int(last), len(first)
