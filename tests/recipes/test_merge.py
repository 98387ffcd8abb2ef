"""Arguments and variables from the layers of a recipe."""

from __future__ import annotations

import pytest

from launcher.recipes import merge
from tests.recipes import acme


@pytest.mark.parametrize(
    ("recipe", "on", "strategy", "variant", "args"),
    [
        # The hardware's wins over the base's, and features come last.
        (
            "Dense-8B",
            "h100",
            None,
            "default",
            "--max-num-seqs 256 --enable-auto-tool-choice --tool-call-parser acme",
        ),
        # A variant's own, and of it what is for one kind of node.
        (
            "Dense-8B",
            "dgx_spark_gb10",
            None,
            "fp8",
            "--max-num-seqs 64 --kv-cache-dtype fp8 --gpu-memory-utilization 0.8"
            " --enable-auto-tool-choice --tool-call-parser acme",
        ),
        # A strategy's own words, and the recipe's for it.
        (
            "Experts-600B",
            "h100",
            "multi_node_tp",
            "default",
            "--trust-remote-code --enable-expert-parallel --disable-custom-all-reduce"
            " --reasoning-parser acme --chat-template examples/acme.jinja",
        ),
        # What a strategy says of a generation stands in the place of what the recipe says of it.
        (
            "Experts-600B",
            "h100",
            "multi_node_dep",
            "default",
            "--trust-remote-code --enable-expert-parallel --data-parallel-hybrid-lb"
            " --all2all-backend acme --reasoning-parser acme --chat-template examples/acme.jinja",
        ),
        (
            "Experts-600B",
            "b200",
            "single_node_tp",
            "fp4",
            "--trust-remote-code --enable-expert-parallel --attention-backend ACME"
            " --reasoning-parser acme --chat-template examples/acme.jinja",
        ),
    ],
)
def test_arguments(recipe: str, on: str, strategy: str | None, variant: str, args: str) -> None:
    """In their order: base, variant, strategy, hardware, features; the last of a name counts."""
    found = merge.arguments(acme.chosen(recipe, on, strategy, variant=variant))

    assert " ".join(option.text for option, _ in found) == args


@pytest.mark.parametrize(
    ("on", "strategy", "variant", "env"),
    [
        ("h100", "single_node_tp", "default", {"ACME_FP8": "1"}),
        ("mi300x", "single_node_tp", "default", {"ACME_ROCM": "1", "ACME_MOE": "1"}),
        ("b200", "single_node_tp", "fp4", {"ACME_FP4": "1"}),
        (
            "h100",
            "multi_node_tp",
            "default",
            {
                "GLOO_SOCKET_IFNAME": "$IFACE_NAME",
                "NCCL_SOCKET_IFNAME": "$IFACE_NAME",
                "ACME_FP8": "1",
            },
        ),
        (
            "h100",
            "multi_node_dep",
            "default",
            {
                "GLOO_SOCKET_IFNAME": "$IFACE_NAME",
                "NCCL_SOCKET_IFNAME": "$IFACE_NAME",
                "ACME_H100": "1",
            },
        ),
    ],
)
def test_variables(on: str, strategy: str, variant: str, env: dict[str, str]) -> None:
    """They have the same layers."""
    assert merge.environment(acme.chosen("Experts-600B", on, strategy, variant=variant)) == env


def test_each_part_is_named() -> None:
    """Who reads why an argument is there is told where from."""
    found = merge.arguments(acme.chosen("Dense-8B", "h100", more={"spec_decoding": "eagle"}))

    assert [name for _, name in found] == [
        "hardware hopper",
        "feature tool_calling",
        "feature tool_calling",
        "feature spec_decoding",
    ]
    assert found[-1][0].words == ("--speculative-config", '{"method":"eagle"}')
