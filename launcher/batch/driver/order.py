"""Order of prompts for an engine: shared prefixes together, long ones first. Output order is
unaffected.

vLLM's prefix cache serves the next prompt with the same beginning while space lasts
(`docs/design/prefix_caching.md` of vLLM), but it does not sort prompts (vllm-project/vllm#12080,
#13762). A long prompt at the end leaves the engine idle otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, TypeVar

from ..job_values import Order

TOKENS = "i"  # tokens as C integers of four bytes, for transport and comparison
# Rows of a large job ordered together: one block of the input, read and prepared as a whole. Shared
# prefixes are grouped within a block.
WINDOW = 4096
BYTES = 32 * 2**20  # limit of such a block: rows may be whole documents
# Shared bytes below which grouping is useless: vLLM's cache has blocks of 16 tokens, and a token
# takes about four bytes, as text and as a number.
BLOCK = 64
# Levels of shared prefixes: a system prompt, a document, a question. Deeper groups stay sorted by
# bytes.
PARTINGS = 8

P = TypeVar("P")
R = TypeVar("R")


def window_rows(order: Order, batch: int, size: float) -> int:
    """Return the rows, of `size` bytes on average, that are ordered together before batching."""
    return max(min(WINDOW, int(BYTES / max(size, 1))), batch) if order == "prefix" else batch


def prompt_key(row: Mapping[str, Any]) -> bytes:
    """Return a prepared row's sort key: its prompt's tokens or text; empty without a prompt."""
    return bytes(row["_tokens"]) + f"{row['_prompt']}{row['_second']}".encode()


def query_order(prompts: Sequence[bytes]) -> list[int]:
    """Return prompt indices in query order: shared prefixes together, the longest group first."""
    return arrange(prompts, sorted(range(len(prompts)), key=prompts.__getitem__), PARTINGS)


def arrange(prompts: Sequence[bytes], indices: list[int], partings: int) -> list[int]:
    """Arrange prompt indices that are sorted by the prompts' bytes."""
    if len(indices) < 2 or not partings:
        return indices
    begin = common_prefix(prompts[indices[0]], prompts[indices[-1]]) + BLOCK
    alike = [list(group) for _, group in groupby(indices, lambda place: prompts[place][:begin])]
    alike.sort(key=lambda group: max(len(prompts[index]) for index in group), reverse=True)
    return list(chain.from_iterable(arrange(prompts, group, partings - 1) for group in alike))


def common_prefix(first: bytes, second: bytes) -> int:
    """Return the length of the common prefix of two byte strings."""
    lengths = range(1, min(len(first), len(second)) + 1)
    return bisect_left(lengths, True, key=lambda length: first[:length] != second[:length])


def ask_in_order(
    ask: Callable[[list[P]], Sequence[R]],
    prompts: Sequence[P],
    order: Order,
    compared: Callable[[P], bytes],
) -> list[R]:
    """Query prompts in the job's order; return answers in the order of the prompts.

    Args:
        ask: takes prompts and returns an answer for each, in their order.
        prompts: in input order.
        order: the job's.
        compared: returns a prompt's sort key.

    Raises:
        ValueError: the numbers of answers and prompts differ.
    """
    if order == "given":
        return list(ask(list(prompts)))
    indices = query_order([compared(prompt) for prompt in prompts])
    answers = ask([prompts[index] for index in indices])
    by_index = dict(zip(indices, answers, strict=True))
    return [by_index[index] for index in range(len(prompts))]
