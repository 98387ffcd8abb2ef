"""The order in which rows are asked, where the job leaves it to us: those whose prompts begin alike
come together, and long ones early. Row numbers and the output know nothing of it.

vLLM keeps what it computed of a prompt for the next one that begins alike, for as long as there is
room (`docs/design/prefix_caching.md` of vLLM); it asks in the order in which it is given prompts,
and does not sort them itself (vllm-project/vllm#12080 and #13762, which would have). A long prompt
that comes last is waited for by an engine that has nothing else to do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, TypeVar

from .job import Order

TOKENS = "i"  # how tokens travel and are compared: as C's integers, of four bytes each
# Rows of a large job that are put in order at once: those of one block of the input, which is read
# and prepared as a whole. What begins alike comes together once in each of them.
WINDOW = 4096
BYTES = 32 * 2**20  # and no more than this of the input, whose rows may be whole documents
# Bytes that two prompts must share so that it is worth something: vLLM's cache has blocks of 16
# tokens, and a token takes four, as text (about) and as a number.
BLOCK = 64
# How often prompts that begin alike may part: a system prompt, a document, a question. Below, they
# come in the order of their bytes.
PARTINGS = 8

P = TypeVar("P")
R = TypeVar("R")


def window_rows(order: Order, batch: int, size: float) -> int:
    """Return how many rows, of `size` bytes each on average, are put in order at once, before
    they are cut into batches.
    """
    return max(min(WINDOW, int(BYTES / max(size, 1))), batch) if order == "prefix" else batch


def prompt_key(row: Mapping[str, Any]) -> bytes:
    """Return a prepared row's prompt as it is compared with others: its tokens, or its text; empty
    for a row that has none.
    """
    return bytes(row["_tokens"]) + f"{row['_prompt']}{row['_second']}".encode()


def query_order(prompts: Sequence[bytes]) -> list[int]:
    """Return the places of prompts in the order in which to ask them: those that begin alike one
    after the other, and of what parts the longest first.
    """
    return arrange(prompts, sorted(range(len(prompts)), key=prompts.__getitem__), PARTINGS)


def arrange(prompts: Sequence[bytes], places: list[int], partings: int) -> list[int]:
    """Arrange the places of prompts, which are sorted by their bytes."""
    if len(places) < 2 or not partings:
        return places
    begin = common_prefix(prompts[places[0]], prompts[places[-1]]) + BLOCK
    alike = [list(group) for _, group in groupby(places, lambda place: prompts[place][:begin])]
    alike.sort(key=lambda group: max(len(prompts[place]) for place in group), reverse=True)
    return list(chain.from_iterable(arrange(prompts, group, partings - 1) for group in alike))


def common_prefix(first: bytes, second: bytes) -> int:
    """Return how many bytes two texts have in common from their begin on."""
    lengths = range(1, min(len(first), len(second)) + 1)
    return bisect_left(lengths, True, key=lambda length: first[:length] != second[:length])


def ask_in_order(
    ask: Callable[[list[P]], Sequence[R]],
    prompts: Sequence[P],
    order: Order,
    compared: Callable[[P], bytes],
) -> list[R]:
    """Ask prompts in the order that the job says; return the answers in the order of the prompts.

    Args:
        ask: is given prompts and returns an answer for each, in their order.
        prompts: in the order of the input.
        order: the job's.
        compared: makes of a prompt what is compared with others.

    Raises:
        ValueError: There are not as many answers as prompts.
    """
    if order == "given":
        return list(ask(list(prompts)))
    places = query_order([compared(prompt) for prompt in prompts])
    answers = ask([prompts[place] for place in places])
    by_place = dict(zip(places, answers, strict=True))
    return [by_place[place] for place in range(len(prompts))]
