"""Options that are keys of the inventory, and types of options."""

from __future__ import annotations

from typing import Any

import click
import pytest

from launcher.app import options
from launcher.core.domain import Ports, ServeDefaults


def make_option(*args: Any, **fields: Any) -> click.Option:
    """Return the option of a key."""

    @options.inventory_option(*args, **fields)
    def command() -> None:
        pass

    option = command.__click_params__[0]  # type: ignore[attr-defined]
    assert isinstance(option, click.Option)
    return option


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        ((ServeDefaults, "tp"), click.IntRange(1, 1024)),
        ((ServeDefaults, "timeout"), click.FloatRange(1, 86400)),
        ((ServeDefaults, "backend"), click.Choice(["ray", "mp"])),
        ((ServeDefaults, "model"), click.STRING),
        ((Ports, "api", "--port"), click.IntRange(1, 65535)),
    ],
)
def test_an_option_has_the_type_and_the_bounds_of_its_key(argv: Any, kind: Any) -> None:
    """Numbers, choices and text."""
    assert repr(make_option(*argv).type) == repr(kind)


def test_an_option_has_its_keys_description() -> None:
    """A default can be added; its own text replaces the key's."""
    assert make_option(ServeDefaults, "model").help == "Model to serve."
    assert (
        make_option(ServeDefaults, "model", default="none").help
        == "Model to serve (default: none)."
    )
    assert make_option(ServeDefaults, "model", help="Other.").help == "Other."


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("0.5", 0.5), ("1.5h", 5400), ("1h30m", 5400), ("2D", 172800), (" 10s ", 10)],
)
def test_durations(text: str, seconds: float) -> None:
    """With units, or plain seconds."""
    assert options.Duration("0.5s").convert(text, None, None) == seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, "is not a duration such as") for text in ("", "x", "-1", "10x", "1h30", "inf")),
        ("59", "is too short: at least 1m"),
        ("25h", "is too long: at most 1d"),
    ],
)
def test_texts_that_are_no_duration(text: str, expected: str) -> None:
    """Bounds are written as durations too."""
    with pytest.raises(click.BadParameter, match=expected):
        options.Duration("1m", "1d").convert(text, None, None)
