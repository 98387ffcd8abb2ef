"""The docstring below a dataclass's field."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.core.descriptions import field_descriptions


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """A shelf."""

    height: int = 0
    """How high it is,
    in metres.
    """
    books: int = 0


@dataclass(frozen=True, kw_only=True)
class Rack(Shelf):
    """A shelf of another kind."""

    books: int = 1
    """Books on it."""


def test_a_field_description_is_a_single_line() -> None:
    """A field without one has no description."""
    assert field_descriptions(Shelf) == {"height": "How high it is, in metres."}


def test_fields_of_bases_are_described() -> None:
    """Classes describe their own fields."""
    assert field_descriptions(Rack) == {
        "height": "How high it is, in metres.",
        "books": "Books on it.",
    }
