"""The format of input, from the endings of names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.batch.driver.job import Format
from launcher.batch.shape import Source
from launcher.inventory.mistakes import shown

_ENDINGS: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_ENDING = re.compile(r"(\.[A-Za-z0-9]+)?(\.(?:gz|zst))?$", re.IGNORECASE)


def of(name: str) -> Format | None:
    """Return the format that the ending of `name` shows: `a.jsonl.gz` → jsonl."""
    match = _ENDING.search(name.partition("?")[0] if "://" in name else name)
    found = _ENDINGS.get((match[1] or "").lower()) if match else None
    return None if match and match[2] and found == "parquet" else found


def mistakes(
    sources: Sequence[Source], names: Sequence[Sequence[str]]
) -> list[tuple[tuple[str | int, ...], str]]:
    """Return why the format cannot be told: where in `read`, and in words."""
    known = "text, jsonl, csv or parquet"
    seen: dict[Format, str] = {}
    wrong: list[tuple[tuple[str | int, ...], str]] = []
    for at, (source, inside) in enumerate(zip(sources, names, strict=True)):
        for name in inside:
            format = of(name)
            if format is None:
                text = (
                    f"the ending of {shown(name.rpartition('/')[2] or source.shown)} shows no"
                    f" format; write `format`: {known}"
                )
                wrong.append((("paths", at), text))
                break
            seen.setdefault(format, name)
    if not wrong and len(seen) > 1:
        (first, one), (second, other) = list(seen.items())[:2]
        both = (
            f"{shown(one.rpartition('/')[2])} is {first}, {shown(other.rpartition('/')[2])} is"
            f" {second}"
        )
        wrong.append((("paths",), f"should all have one format: {both}"))
    return wrong


def common(names: Sequence[Sequence[str]]) -> Format:
    """Return the one format of all input that `mistakes` found nothing wrong with."""
    format = of(names[0][0])
    assert format is not None  # noqa: S101 - a rule says so
    return format
