"""Parsing of `/metrics` output."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from launcher.serving import prometheus

VLLM = (Path(__file__).parents[1] / "fixtures" / "vllm" / "mp_pp2_buckets.metrics").read_text()


def test_metrics_of_vllm() -> None:
    """By labels, or in total."""
    samples = prometheus.parse_metrics(VLLM)

    assert samples.values("vllm:num_requests_running") == [0.0]
    assert samples.total("vllm:request_success_total") == 7.0
    assert samples.total("vllm:request_success_total", finished_reason="stop") == 0.0
    assert samples.histogram("vllm:time_to_first_token_seconds")[math.inf] == 7.0
    assert samples.values("vllm:nothing_of_the_kind") == []


def test_several_texts_are_summed() -> None:
    """For a server with an endpoint per node."""
    samples = prometheus.parse_metrics(VLLM, VLLM)

    assert samples.total("vllm:generation_tokens_total") == 106.0
    assert samples.histogram("vllm:time_to_first_token_seconds")[math.inf] == 14.0


def test_special_values_are_omitted() -> None:
    """NaN and infinities."""
    assert prometheus.parse_metrics("a NaN\na 1\nb +Inf\n").by_name == {"a": [({}, 1.0)]}


@pytest.mark.parametrize("text", ["<html>", "a{b} 1", 'a{b="c} 1', "a one"])
def test_invalid_text(text: str) -> None:
    """One type of error."""
    with pytest.raises(ValueError, match=r"\w"):
        prometheus.parse_metrics(text)


@pytest.mark.parametrize(
    ("share", "buckets", "value"),
    [
        (0.5, {0.1: 0, 0.2: 10, math.inf: 10}, 0.15),
        (0.99, {0.1: 0, 0.2: 100, math.inf: 100}, 0.199),
        (0.5, {0.1: 4, 0.2: 4, 0.4: 8, math.inf: 8}, 0.1),
        (0.99, {0.1: 1, 0.2: 1, math.inf: 100}, 0.2),
        (0.5, {0.1: 0, math.inf: 0}, None),
        (0.5, {math.inf: 3}, None),
        (0.5, {}, None),
    ],
)
def test_quantiles_match_prometheus(
    share: float, buckets: dict[float, float], value: float | None
) -> None:
    """Uniform inside a bucket; the last finite bound is the maximum."""
    assert prometheus.quantile(share, buckets) == (None if value is None else pytest.approx(value))
