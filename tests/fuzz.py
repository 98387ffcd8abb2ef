"""Files that nobody would write: what the tests of all YAML readers feed them with, and how they
must refuse it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# The folder that a test reads from is the same for all of its examples.
quick = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=True,
)

# YAML's own characters: anything that may trip the parser.
yamls_own = st.text(alphabet="{}[]:,-&*!|>'\"%@`#?<= \n\tab01", max_size=200)


def values(keys: Sequence[str], words: Sequence[str]) -> st.SearchStrategy[object]:
    """Anything that YAML can hold, often under keys that the reader knows, and with words that mean
    something to it.
    """
    names = st.one_of(st.sampled_from(keys), st.text(max_size=8))
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from(words),
    )
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=4)
        ),
        max_leaves=12,
    )


def near(text: str) -> Iterator[str]:
    """Yield a good file with a line gone, doubled, or changed in a character: near the truth is
    where mistakes are made.
    """
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
    """Check that there are mistakes, that each is one line which names the file, and that all can
    be printed.
    """
    assert mistakes
    for line in mistakes:
        assert line.startswith(f"{file}:")
        assert len(line.splitlines()) == 1
        line.encode()
