"""Parsing and formatting of sizes, rates and durations."""

import re

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]{0,3})")
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "": 1}
_LARGEST = 2**53
MIB = 1 << 20
# Docker reads a bare `g` as 1024³.
_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((letter, 1024), (f"{letter}b", 1000), (f"{letter}ib", 1024))
}


def parse_size(value: object) -> int:
    """Return the bytes of `2GiB`, `200MB`, `10.24g` or an integer; raise ValueError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or not 1 <= float(match[1]) * unit < _LARGEST:
        raise ValueError("not a size")
    return int(float(match[1]) * unit)


def parse_duration(text: str) -> float:
    """Return the seconds of `90s`, `1h30m` or `90`; raise ValueError otherwise."""
    number, text = r"\d{1,9}(?:\.\d{1,3})?", text.strip().lower()
    if not re.fullmatch(rf"{number}|(?:{number}[dhms])+", text):
        raise ValueError("not a duration")
    parts = re.findall(r"([\d.]+)([dhms]?)", text)
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def format_size(size: int) -> str:
    """Format bytes: `340 MiB`, `1.2 GiB`."""
    return f"{size / MIB:.0f} MiB" if size < 1 << 30 else f"{size / (1 << 30):.1f} GiB"


def format_decimal_size(size: int) -> str:
    """Format the bytes of a job's files: `340.0 MB`, `1.2 GB`."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def format_count(count: float, noun: str) -> str:
    """Return a number with its noun, such as `1 node` or `2,000 nodes`."""
    return f"{count:,g} {noun}" if count == 1 else f"{count:,g} {noun}s"


def format_rate(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def format_duration(seconds: float) -> str:
    """Format a duration with its two largest units."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole % 86400 // 3600, whole % 3600 // 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {whole % 60:02}s" if minutes else f"{whole}s"
