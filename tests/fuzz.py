"""Arbitrary YAML files for the readers, and a check of their mistakes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# All examples of a test share its folder.
quick = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=True,
)

# YAML's special characters.
yamls_own = st.text(alphabet="{}[]:,-&*!|>'\"%@`#?<= \n\tab01", max_size=200)


def values(keys: Sequence[str], scalars: Sequence[str]) -> st.SearchStrategy[object]:
    """Return arbitrary YAML values, often with known keys and meaningful scalars."""
    names = st.one_of(st.sampled_from(keys), st.text(max_size=8))
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from(scalars),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=4)
        ),
        max_leaves=12,
    )


def near(text: str) -> Iterator[str]:
    """Yield nearly valid files: with a line removed, doubled, or changed in a character."""
    chance = random.Random(7)
    for _ in range(25):
        lines = text.splitlines()
        at = chance.randrange(len(lines))
        change = chance.randrange(4)
        if change == 0:
            del lines[at]
        elif change == 1:
            lines.insert(at, lines[chance.randrange(len(lines))])
        elif change == 2:
            lines[at] = lines[at].replace(":", chance.choice(["", ": :", ": [", ": !x", ": &a"]))
        else:
            middle = chance.randrange(len(lines[at]) + 1)
            lines[at] = (
                lines[at][:middle] + chance.choice("{}[]:,-&*!\t\"'\x00é") + lines[at][middle + 1 :]
            )
        yield "\n".join(lines)


def check(mistakes: Sequence[str], file: str) -> None:
    """Check for mistakes of one printable line each that starts with the file's name."""
    assert mistakes
    for line in mistakes:
        assert line.startswith(f"{file}:")
        assert len(line.splitlines()) == 1
        line.encode()
