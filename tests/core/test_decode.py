"""Decoding of data from nodes, containers and files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from launcher.core import decode, untrusted
from launcher.core.errors import UnreadableAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A part of a cart."""

    size: int
    load: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cart:
    """A class with fields of all kinds."""

    name: str
    sound: bool = True
    note: decode.Text = ""
    count: decode.Integer = 0
    speed: decode.Number = 0.0
    color: Annotated[str, decode.matches("[a-z]+"), decode.Default("none")] = "grey"
    owner: Annotated[str, decode.truncate(4), decode.Default("")]
    tags: tuple[str, ...] = ()
    good: tuple[Annotated[str, decode.DROP_INVALID], ...] = ()
    sizes: Mapping[str, Annotated[int, decode.DROP_INVALID]] = field(default_factory=dict)
    prices: Mapping[str, int] = field(default_factory=dict)
    wheel: Wheel | None = None
    wheels: tuple[Wheel, ...] = ()


def cart(**fields: Any) -> Cart:
    return decode.parse_json(Cart, json.dumps({"name": "a", "owner": "eve", **fields}), "the cart")


def test_an_answer_becomes_its_dataclass() -> None:
    """Arrays are tuples, objects are dataclasses, an integer is a float if declared so."""
    assert cart(tags=["x"], wheel={"size": 1, "load": 2}, wheels=[{"size": 3}], speed=4) == Cart(
        name="a",
        owner="eve",
        tags=("x",),
        wheel=Wheel(size=1, load=2.0),
        wheels=(Wheel(size=3),),
        speed=4.0,
    )


@pytest.mark.parametrize(
    ("fields", "misfit"),
    [
        ({"name": 5}, "`name` cannot be 5"),
        ({"name": None}, "`name` cannot be None"),
        ({"sound": 1}, "`sound` cannot be 1"),
        ({"sound": "true"}, "`sound` cannot be 'true'"),
        ({"count": True}, "`count` cannot be True"),
        ({"count": 1.0}, "`count` cannot be 1.0"),
        ({"count": "1"}, "`count` cannot be '1'"),
        ({"count": 2**62}, "`count` cannot be 4611686018427387904"),
        ({"speed": True}, "`speed` cannot be True"),
        ({"speed": -1e19}, "`speed` cannot be -1e+19"),
        ({"tags": "x"}, "`tags` cannot be 'x'"),
        ({"tags": ["x", 3]}, "`tags.1` cannot be 3"),
        ({"wheel": {}}, "`wheel.size` is missing"),
        ({"wheels": [{"size": 1}, {"size": "2"}]}, "`wheels.1.size` cannot be '2'"),
        ({"note": ["x" * 1000]}, f"`note` cannot be ['{'x' * 78}"),
    ],
)
def test_the_error_names_the_source_and_the_field(fields: dict[str, Any], misfit: str) -> None:
    """Types are not converted."""
    with pytest.raises(UnreadableAnswer) as caught:
        cart(**fields)

    assert caught.value.message == f"the cart cannot be read: {misfit}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        "{}",
        '{"name": NaN}',
        "[" * 100_000,
        '{"a":' * 60 + "1" + "}" * 60,
    ],
)
def test_other_json_is_an_error(text: str) -> None:
    """With the text as evidence."""
    with pytest.raises(UnreadableAnswer, match=r"^the cart cannot be read: ") as caught:
        decode.parse_json(Cart, text, "the cart")

    assert len(caught.value.evidence) <= 300
    assert text[:2] in caught.value.evidence


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "9" * 41])
def test_unusable_numbers_are_rejected(number: str) -> None:
    """Python accepts them; rejected in unknown fields too."""
    with pytest.raises(UnreadableAnswer):
        decode.parse_json(Cart, f'{{"name": "a", "owner": "b", "other": {number}}}', "the cart")


def test_lone_surrogates_become_question_marks() -> None:
    """They cannot be printed."""
    assert decode.parse_json(Cart, '{"name": "\\ud800", "owner": "b"}', "the cart").name == "?"


def test_unknown_fields_are_ignored() -> None:
    """A newer version wrote them; a closed class rejects them, at any depth."""
    fields = {"size": 1, "new": 2}
    assert decode.validate(Wheel, fields, "a wheel") == Wheel(size=1)
    assert cart(wheel=fields).wheel == Wheel(size=1)

    for shape, value in ((Wheel, fields), (Cart, {"name": "a", "owner": "b", "wheel": fields})):
        with pytest.raises(UnreadableAnswer, match="new` cannot be 2"):
            decode.validate(shape, value, "it", forbid_unknown=True)


@pytest.mark.parametrize(("color", "read"), [("red", "red"), ("RED", "none"), (5, "none")])
def test_a_default_replaces_an_invalid_value(color: Any, read: str) -> None:
    """In that field alone; a missing field has the dataclass's own default."""
    assert cart(color=color).color == read
    assert cart().color == "grey"


def test_a_field_with_a_default_may_be_missing() -> None:
    """Although the dataclass requires it."""
    assert decode.validate(Cart, {"name": "a"}, "the cart").owner == ""


def test_names_from_nodes_are_sanitized() -> None:
    """And shortened to a line."""
    with pytest.raises(UnreadableAnswer) as caught:
        cart(prices={"\x1b[2J" + "9" * 5000: "dear"})

    assert "`prices.\\x1b[2J999" in caught.value.message
    assert len(caught.value.message) < 200


def test_invalid_items_are_dropped() -> None:
    """The others stay in order; another type of collection is rejected all the same."""
    decoded = cart(good=["x", 3, None, "y"], sizes={"a": 1, "b": "2", "c": True})

    assert (decoded.good, decoded.sizes) == (("x", "y"), {"a": 1})
    with pytest.raises(UnreadableAnswer, match="`good`"):
        cart(good="x")


def test_long_texts_are_shortened() -> None:
    """By line, or at a field's own limit."""
    line = "x" * (untrusted.MAX_LINE_LENGTH + 1)
    decoded = cart(note=f"{line}\nend", owner="someone")

    assert (decoded.note, decoded.owner) == (f"{line[:-1]}\nend", "some")


def test_dataclasses_alone_load_no_pydantic() -> None:
    """Commands without decoding start faster."""
    program = (
        "import sys; from launcher.app import audit, lock;"
        " from launcher.network import probe_command;"
        " sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
