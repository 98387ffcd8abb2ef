"""Parsing of `/metrics` output."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from launcher.serving import prometheus

VLLM = (Path(__file__).parents[1] / "fixtures" / "vllm" / "mp_pp2_buckets.metrics").read_text()


def test_what_vllm_counts() -> None:
    """Each series by its labels, or all of them together."""
    samples = prometheus.parse_metrics(VLLM)

    assert samples.values("vllm:num_requests_running") == [0.0]
    assert samples.total("vllm:request_success_total") == 7.0
    assert samples.total("vllm:request_success_total", finished_reason="stop") == 0.0
    assert samples.histogram("vllm:time_to_first_token_seconds")[math.inf] == 7.0
    assert samples.values("vllm:nothing_of_the_kind") == []


def test_several_texts_are_added_up() -> None:
    """Of a server with an endpoint on each node."""
    samples = prometheus.parse_metrics(VLLM, VLLM)

    assert samples.total("vllm:generation_tokens_total") == 106.0
    assert samples.histogram("vllm:time_to_first_token_seconds")[math.inf] == 14.0


def test_what_is_no_number_is_omitted() -> None:
    """The format has words for it."""
    assert prometheus.parse_metrics("a NaN\na 1\nb +Inf\n").by_name == {"a": [({}, 1.0)]}


@pytest.mark.parametrize("text", ["<html>", "a{b} 1", 'a{b="c} 1', "a one"])
def test_what_is_no_such_text(text: str) -> None:
    """An error of one kind, whatever is wrong."""
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
def test_a_quantile_is_prometheus_own(
    share: float, buckets: dict[float, float], value: float | None
) -> None:
    """Observations are evenly spread inside a bucket; the last finite bound is the maximum."""
    assert prometheus.quantile(share, buckets) == (None if value is None else pytest.approx(value))
