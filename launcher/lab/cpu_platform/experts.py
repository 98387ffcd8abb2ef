"""Expert parallelism on a CPU: the kernel holds this rank's experts only, and must be asked for
those only.
"""

from __future__ import annotations

from typing import Any

import torch

_MENDED = "asks_for_local_experts"


def local_share(
    weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Translate a routing over all experts into one over this rank's: an expert that lives
    elsewhere weighs nothing.

    Each rank then computes its part of the sum, and the ranks' parts are added when tokens go home.
    """
    local = expert_map[ids.long()]
    return weights.masked_fill(local < 0, 0.0), local.clamp(min=0).to(ids.dtype)


def mend() -> None:
    """Let vLLM's CPU experts look at the map of experts; doing it twice is doing it once.

    The stock class takes any parallel layout, but gives the kernel the numbers of all experts, as
    indices into the weights of those that live here: the kernel reads past them, and the process
    ends with a segmentation fault.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    stock = CPUUnquantizedExperts.apply
    if getattr(stock, _MENDED, False):
        return

    def apply(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: Any,
        a2_scale: Any,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        elsewhere = None
        if expert_map is not None:
            elsewhere = expert_map[topk_ids.long()] < 0
            topk_weights, topk_ids = local_share(topk_weights, topk_ids, expert_map)
        stock(
            self,
            output,
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation,
            global_num_experts,
            expert_map,
            a1q_scale,
            a2_scale,
            workspace13,
            workspace2,
            expert_tokens_meta,
            apply_router_weight_on_input,
        )
        if elsewhere is not None and apply_router_weight_on_input:
            # One expert for each token, weighed before: the kernel has not looked at the weights.
            output.masked_fill_(elsewhere, 0.0)

    setattr(apply, _MENDED, True)
    CPUUnquantizedExperts.apply = apply
