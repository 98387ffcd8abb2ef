"""What a rank of vLLM's is called, by the name of the actor that Ray runs for it.

Standard library only; the launcher reads Ray's list of actors with the same rule.
"""

from __future__ import annotations

import re

_ACTOR = re.compile(r"vllm_Worker_\w*?\d(?:_dp(\d+))?((?:_[A-Z]+\d+)*)")


def rank_name(actor: str) -> str:
    """Return the rank's name for people, such as `DP1 TP0 PP1`; empty when the actor is no rank.

    vLLM names actors `vllm_Worker_<instance>_TP0_PP1` and leaves out a dimension of size one
    (v1/executor/ray_executor_v2.py); the instance of a replica ends in `_dp1` (v1/engine/utils.py).
    """
    match = _ACTOR.fullmatch(actor)
    if match is None:
        return ""
    replica = f"DP{match[1]}" if match[1] else ""
    return f"{replica}{match[2].replace('_', ' ')}".strip() or "the only rank"
