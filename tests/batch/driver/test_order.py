"""Order of queries: common prefixes together, long prompts early, answers in their rows' places."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.batch.driver import order

BEGIN = b"You are a careful translator. "


def text(prompts: list[bytes]) -> list[bytes]:
    return [prompts[place] for place in order.query_order(prompts)]


def times(argv: list[bytes]) -> int:
    """Count the runs of equal prompts."""
    return 1 + sum(first != other for first, other in pairwise(argv))


def test_common_prefixes_together_and_long_prompts_early() -> None:
    """Twenty prefixes of 300 tokens in any order; the group of the longest row is first."""
    mix = random.Random(1)
    shared = [BEGIN + mix.randbytes(1200) for _ in range(20)]
    prompts = [shared[row % 20] + mix.randbytes(mix.randrange(100)) for row in range(400)]
    prompts[17] += b"x" * 500
    result = text(prompts)

    assert times([prompt[:1200] for prompt in result]) == 20
    assert result[0] == prompts[17]
    lengths = [len(prompt) for prompt in result if prompt.startswith(prompts[17][:1200])]
    assert lengths == sorted(lengths, reverse=True)


def test_nested_prefixes_stay_together() -> None:
    """A system prompt, a document, a question."""
    mix = random.Random(2)
    prompts = []
    for _ in range(4):
        system = mix.randbytes(200)
        for _ in range(5):
            document = system + mix.randbytes(400)
            prompts += [document + mix.randbytes(mix.randrange(30)) for _ in range(6)]
    mix.shuffle(prompts)
    result = text(prompts)

    assert times([row[:200] for row in result]) == 4
    assert times([row[:600] for row in result]) == 20


def test_prompts_without_a_common_prefix_are_sorted_by_length() -> None:
    """A template's short beginning does not group them, nor does a stray row undo the order."""
    mix = random.Random(3)
    prompts = [BEGIN * 9 + mix.randbytes(mix.randrange(500)) for _ in range(200)]
    lengths = [len(prompt) for prompt in text(prompts)]
    assert lengths == sorted(lengths, reverse=True)

    with_stray = [len(prompt) for prompt in text([*prompts, b"\0stray"])]
    assert with_stray == [*lengths, 6]


def test_short_prefixes_do_not_count() -> None:
    """Less than a block of vLLM's cache."""
    assert text([b"aa", b"b" * 9, b"a" * 5]) == [b"b" * 9, b"a" * 5, b"aa"]


@pytest.mark.parametrize(
    "prompts",
    [
        [],
        [b""],
        [b""] * 500,
        [b"same" * 5000] * 300,
        [b"x" * (100 * row) for row in range(600)],
    ],
)
def test_unusual_prompts(prompts: list[bytes]) -> None:
    """Missing, empty, equal and nested ones: without Python's recursion limit."""
    assert sorted(order.query_order(prompts)) == list(range(len(prompts)))


@given(st.lists(st.binary(max_size=6)), st.sampled_from(["prefix", "given"]))
def test_answers_match_their_rows(prompts: list[bytes], how: order.Order) -> None:
    """For any order: prompts are queried once, with answers in their places."""
    calls: list[list[bytes]] = []

    def ask(queries: list[bytes]) -> list[bytes]:
        calls.append(queries)
        return [prompt[::-1] for prompt in queries]

    result = order.ask_in_order(ask, prompts, how, lambda prompt: prompt)

    assert result == [prompt[::-1] for prompt in prompts]
    assert [sorted(call) for call in calls] == [sorted(prompts)]


def test_a_job_may_require_input_order() -> None:
    """Prompts are not even compared."""
    result = order.ask_in_order(
        list, [b"a", b"bbb"], "given", lambda prompt: pytest.fail("compared")
    )
    assert result == [b"a", b"bbb"]


def test_a_missing_answer_is_an_error() -> None:
    """Its row is unknown."""
    with pytest.raises(ValueError, match="shorter"):
        order.ask_in_order(lambda spec: spec[1:], [b"a", b"b"], "prefix", lambda prompt: prompt)


def test_rows_are_compared_by_vllms_input() -> None:
    """Tokens, text, or both texts of a pair; a row without a prompt has none."""
    row = {"_prompt": "", "_second": "", "_tokens": b""}

    assert order.prompt_key({**row, "_tokens": b"\1\0\0\0"}) == b"\1\0\0\0"
    assert order.prompt_key({**row, "_prompt": "ö", "_second": "k"}) == "ök".encode()
    assert order.prompt_key(row) == b""


def test_sorting_is_limited() -> None:
    """Memory does not grow with the job; input order needs one batch at a time."""
    assert order.window_rows("prefix", 256, 100.0) == order.WINDOW
    assert order.window_rows("prefix", 65_536, 100.0) == 65_536
    assert order.window_rows("given", 256, 100.0) == 256
    assert order.window_rows("prefix", 256, 2**16) == order.BYTES / 2**16 == 512
    assert order.window_rows("prefix", 256, 2**24) == 256
