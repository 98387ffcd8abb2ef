"""How long, as people write it: `90s`, `30m`, `2h`, `1d`, `1h30m`."""

from __future__ import annotations

import re

import click

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def seconds(_: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """Read an option's value as seconds (`callback=`); a bare number is refused, for nobody knows
    of what.
    """
    if text is None:
        return None
    if not re.fullmatch(r"(?:\d{1,6}[dhms])+", text.strip().lower()):
        raise click.BadParameter(
            f"`{text}` should be a duration such as `90s`, `30m`, `2h` or `1d`", param=option
        )
    return float(
        sum(
            int(number) * _SECONDS[unit]
            for number, unit in re.findall(r"(\d+)([dhms])", text.lower())
        )
    )
