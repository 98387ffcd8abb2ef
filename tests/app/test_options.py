"""Options that are keys of the inventory."""

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


def test_an_option_is_explained_as_its_key_is() -> None:
    """A default can be added; a text of its own replaces the key's."""
    assert make_option(ServeDefaults, "model").help == "Model to serve."
    assert (
        make_option(ServeDefaults, "model", default="none").help
        == "Model to serve (default: none)."
    )
    assert make_option(ServeDefaults, "model", help="Other.").help == "Other."
