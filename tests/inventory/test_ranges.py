"""Host ranges."""

from __future__ import annotations

import pytest

from launcher.core.domain import fold
from launcher.inventory import ranges


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu01", ("gpu01",)),
        ("gpu[01-03]", ("gpu01", "gpu02", "gpu03")),
        ("gpu[9-11]", ("gpu9", "gpu10", "gpu11")),
        ("gpu[08-10]", ("gpu08", "gpu09", "gpu10")),
        ("gpu[1,3-5]x", ("gpu1x", "gpu3x", "gpu4x", "gpu5x")),
        ("10.0.0.[11-12]", ("10.0.0.11", "10.0.0.12")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("fd00::[1-2]", ("fd00::1", "fd00::2")),
    ],
)
def test_ranges_expand_in_order_and_keep_their_padding(
    text: str, expected: tuple[str, ...]
) -> None:
    """The notation is the one that output uses."""
    assert expected == ranges.expand_range(text)


@pytest.mark.parametrize(
    "text",
    [
        "gpu[3-1]",
        "gpu[]",
        "gpu[a-b]",
        "gpu[1",
        "gpu1]",
        "gpu[1-2]]",
        "gpu[[1]]",
        "gpu[1-]",
        "gpu[²]",
    ],
)
def test_invalid_ranges(text: str) -> None:
    """All messages complete "host: …"."""
    with pytest.raises(ValueError, match=r"^should "):
        ranges.expand_range(text)


@pytest.mark.parametrize("text", ["g[1-1025]", "g[0-999999999]", "g[1-100]h[1-100]", "g[1-9]" * 4])
def test_ranges_are_bounded_before_they_are_expanded(text: str) -> None:
    """A typing error does not fill the memory."""
    with pytest.raises(ValueError, match="1024 nodes"):
        ranges.expand_range(text)


def test_the_largest_range_is_allowed() -> None:
    """The limit is inclusive."""
    assert len(ranges.expand_range("g[1-1024]")) == 1024


def test_folded_names_can_be_pasted_into_an_inventory() -> None:
    """`fold` and `expand` use one notation."""
    names = ("gpu01", "gpu02", "gpu04", "gpu05")

    assert names == ranges.expand_range(fold(names))
