"""Host ranges as in ClusterShell, of bounded size: `gpu[01-03,07]` → `gpu01 … gpu07`."""

import itertools
import math
import re

MAX_NODES = 1024

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand_range(text: str) -> tuple[str, ...]:
    """Expand a range in order, keeping zero padding; several ranges multiply.

    Raises ValueError with a message that starts with "should" for invalid notation or more than
    `MAX_NODES` names.
    """
    if count_names(text) > MAX_NODES:
        raise ValueError(f"should stand for at most {MAX_NODES} nodes")
    pieces = _RANGE.split(text)
    ranges = [
        [number for part in inside.split(",") for number in _expand_part(part)]
        for inside in pieces[1::2]
    ]
    return tuple(
        "".join(itertools.chain.from_iterable(zip(pieces[::2], (*choice, ""), strict=True)))
        for choice in itertools.product(*ranges)
    )


def count_names(text: str) -> int:
    """Return the number of names without expanding them; raises ValueError for invalid notation."""
    pieces = _RANGE.split(text)
    if any("[" in piece or "]" in piece for piece in pieces[::2]):
        raise ValueError("should close each `[` with one `]`")
    return math.prod(
        sum(last - first + 1 for first, last, _ in map(_parse_part, inside.split(",")))
        for inside in pieces[1::2]
    )


def _expand_part(part: str) -> list[str]:
    first, last, width = _parse_part(part)
    return [str(number).zfill(width) for number in range(first, last + 1)]


def _parse_part(part: str) -> tuple[int, int, int]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError("should have numbers between `[` and `]`, such as [01-16] or [1,3-5]")
    first, last = match[1], match[2] or match[1]
    if int(first) > int(last):
        raise ValueError(f"should have its ranges count upwards, which {first}-{last} does not")
    return int(first), int(last), len(first)
