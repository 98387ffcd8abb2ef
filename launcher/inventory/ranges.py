"""Host ranges: `gpu[01-03,07]` → `gpu01 gpu02 gpu03 gpu07`, the notation of ClusterShell's node sets, bounded."""

from __future__ import annotations

import itertools
import math
import re

MAX_NODES = 1024

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand(text: str) -> tuple[str, ...]:
    """Return what `text` stands for, in order; zero padding is kept and several ranges multiply.

    Raises ValueError, in words that start with "should", when the notation is wrong or gives more than `MAX_NODES`.
    """
    pieces = _RANGE.split(text)
    fixed, ranges = pieces[::2], [_numbers(inside) for inside in pieces[1::2]]
    if any("[" in piece or "]" in piece for piece in fixed):
        raise ValueError("should close each `[` with one `]`")
    if math.prod(len(numbers) for numbers in ranges) > MAX_NODES:
        raise ValueError(f"should stand for at most {MAX_NODES} nodes")
    return tuple(
        "".join(itertools.chain.from_iterable(zip(fixed, (*choice, ""), strict=True))) for choice in itertools.product(*ranges)
    )


def _numbers(inside: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError("should have numbers between `[` and `]`, such as [01-16] or [1,3-5]")
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise ValueError(f"should have its ranges count upwards, which {first}-{last} does not")
        if int(last) - int(first) >= MAX_NODES or len(numbers) > MAX_NODES:
            raise ValueError(f"should stand for at most {MAX_NODES} nodes")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
