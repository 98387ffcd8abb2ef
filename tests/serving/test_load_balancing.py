"""Supported load-balancing modes, and the errors for others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.core.errors import RequestError
from launcher.serving import load_balancing
from launcher.serving.serve_request import ServeRequest
from tests.served import INVENTORY, request

HYBRID, EXTERNAL = "--data-parallel-hybrid-lb", "--data-parallel-external-lb"


def make_request(
    *args: str, backend: Any = "mp", experts: int | None = 8, **overrides: Any
) -> ServeRequest:
    """Return a request for a mixture of experts in two replicas, one per node."""
    candidate = request(backend, **{"tp": 8, "pp": None, "dp": 2, "args": args, **overrides})
    return replace(candidate, placement=replace(candidate.placement, experts=experts))


def catch_error(candidate: ServeRequest) -> RequestError:
    """Return the error for a request."""
    with pytest.raises(RequestError) as caught:
        load_balancing.check_balancing(candidate, INVENTORY)
    return caught.value


@pytest.mark.parametrize(
    ("candidate", "kind"),
    [
        (make_request(HYBRID), "hybrid"),
        (make_request("-dpe"), "external"),
        (make_request("--data_parallel_hybrid_lb", experts=None), "hybrid"),
        (make_request(HYBRID, tp=4, dp=4, experts=0), "hybrid"),
        (make_request(HYBRID, tp=4, dp=2, experts=0), "hybrid"),  # both on one node: one endpoint
        (make_request(HYBRID, host="127.0.0.1"), "hybrid"),
        (make_request(HYBRID, "--no-data-parallel-hybrid-lb"), "internal"),
        (make_request("--seed", "1", experts=0), "internal"),
    ],
)
def test_supported_modes(candidate: ServeRequest, kind: str) -> None:
    """By vLLM's names, in all forms."""
    load_balancing.check_balancing(candidate, INVENTORY)

    assert candidate.balancing == kind


@pytest.mark.parametrize(
    ("candidate", "text", "hint"),
    [
        (make_request(HYBRID, "-dpe"), "cannot be combined", "remove one"),
        (make_request(HYBRID, backend="ray"), "serves the only API", "use `--backend mp`"),
        (make_request(EXTERNAL, dp=1, tp=8, pp=2), "one replica", "`--data-parallel-size N`"),
        (make_request(EXTERNAL, tp=4, dp=4), "n1 would have 2, n2 would have 2", HYBRID),
        (make_request(HYBRID, host="10.0.0.1"), "is the address of one node", "`--bind 0.0.0.0`"),
        (make_request(EXTERNAL, experts=0), "n[1-2] would have one replica", "--tp 8 --name one"),
        (make_request(HYBRID, experts=0), "n[1-2] would have one replica", "--backend mp --tp 8"),
        (make_request(HYBRID, tp=4, dp=3, experts=0), "n2 would have one replica", "--nodes n2"),
    ],
)
def test_unsupported_modes(candidate: ServeRequest, text: str, hint: str) -> None:
    """The hint has a mode that works."""
    error = catch_error(candidate)

    assert (text in error.message, hint in error.hint) == (True, True), error.args


def test_replicas_that_would_share_a_node_can_be_separated() -> None:
    """With as many GPUs per node as a replica needs, given enough nodes."""
    assert "`--gpus 4`" in catch_error(make_request(EXTERNAL, tp=4, dp=2)).hint
    assert "--gpus" not in catch_error(make_request(EXTERNAL, tp=4, dp=4)).hint


def test_all_mistakes_are_reported_together() -> None:
    """Each has its hint."""
    error = catch_error(make_request(HYBRID, EXTERNAL, backend="ray", host="10.0.0.1"))

    assert error.message == "this load-balancing mode is unavailable here"
    assert len(error.evidence.splitlines()) == len(error.hint.splitlines()) == 3
