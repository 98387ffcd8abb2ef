"""vLLM's own arguments, from the inventory and from behind `--`: what may not be among them."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.core import secret_patterns
from launcher.core.domain import Inventory
from launcher.core.errors import RequestError
from launcher.tools import vllm


def arguments(inventory: Inventory, args: Sequence[str]) -> tuple[str, ...]:
    """Return vLLM's own arguments, the inventory's first; raises RequestError for those that
    vlaunch sets, and for what looks like a secret.
    """
    for where, words in (
        ("`engine_args` or `serve: args` in the inventory", inventory.serve.args),
        ("the arguments after `--`", args),
    ):
        if said := vllm.collisions(words):
            raise RequestError(f"{where} set what vlaunch sets itself", evidence=said)
    for at, word in enumerate(args, start=1):
        if secret_patterns.VALUE.search(word):
            raise RequestError(
                f"argument {at} after `--` looks like a secret, which `ps` would show on the nodes",
                hint="name where it comes from under `secrets:` in the inventory",
            )
    return (*inventory.serve.args, *args)
