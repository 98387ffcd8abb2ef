"""Expert parallelism on a CPU: restricts the kernel to the experts of this rank."""

from __future__ import annotations

from typing import Any

import torch

_PATCHED = "asks_for_local_experts"


def local_share(
    weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map a routing over all experts to this rank's experts; others get the weight 0.

    The ranks' partial sums are added when the tokens are combined.
    """
    local = expert_map[ids.long()]
    return weights.masked_fill(local < 0, 0.0), local.clamp(min=0).to(ids.dtype)


def patch_experts() -> None:
    """Make vLLM's CPU experts use the expert map; idempotent.

    The stock class accepts any parallel layout, but passes global expert numbers as indices into
    this rank's weights: the kernel reads beyond them and crashes with a segmentation fault.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    stock = CPUUnquantizedExperts.apply
    if getattr(stock, _PATCHED, False):
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
            # With one expert per token, weights are applied earlier: the kernel ignored them.
            output.masked_fill_(elsewhere, 0.0)

    setattr(apply, _PATCHED, True)
    CPUUnquantizedExperts.apply = apply
