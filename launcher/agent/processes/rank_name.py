"""Name of a vLLM rank: from the name of its Ray actor, or from its position.

Standard library only; the launcher reads Ray's list of actors with the same rule.
"""

from __future__ import annotations

import re

from ... import upstream
from ..desired import Desired

_ACTOR = re.compile(upstream.text("vllm.rank-actor"))


def rank_name(actor: str) -> str:
    """Return the rank's display name, such as `DP1 TP0 PP1`; empty if the actor is no rank.

    vLLM names actors `vllm_Worker_<instance>_TP0_PP1` and leaves out a dimension of size one
    (v1/executor/ray_executor_v2.py); the instance of a replica ends in `_dp1` (v1/engine/utils.py).
    """
    match = _ACTOR.fullmatch(actor)
    if match is None:
        return ""
    replica = f"DP{match[1]}" if match[1] else ""
    return f"{replica}{match[2].replace('_', ' ')}".strip() or "the only rank"


def rank_sort_key(name: str) -> tuple[list[int], str]:
    """Return a sort key that puts DP2 before DP10."""
    return [int(digits) for digits in re.findall(r"\d+", name)], name


def place_ranks(spec: Desired) -> dict[str, list[str]]:
    """Return the ranks of each node for a server whose processes vLLM numbers itself: whole
    replicas, or ranks in order.
    """
    if spec.replicas > 1:
        return {
            process.node: [f"DP{process.replicas[0] + i}" for i in range(process.replicas[1])]
            for process in spec.processes
        }
    placement, rank, world = dict[str, list[str]](), 0, sum(spec.places.values())
    for process in spec.processes:
        ranks = range(rank, rank + spec.places.get(process.node, 0))
        rank = ranks.stop
        names = [
            (f"TP{r % spec.tp}", f"PP{r // spec.tp}")[spec.tp == 1 :]
            if world > spec.tp
            else (f"TP{r % spec.tp}",)
            for r in ranks
        ]
        placement[process.node] = (
            [" ".join(name) for name in names] if world > 1 else ["the only rank"]
        )
    return placement
