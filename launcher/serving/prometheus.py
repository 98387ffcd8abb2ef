"""Metrics in Prometheus' text format, parsed by its own Python client."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Buckets = Mapping[float, float]  # a histogram: upper bound → cumulative count


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """All samples of one or several texts, by name: labels and value."""

    by_name: Mapping[str, Sequence[tuple[Mapping[str, str], float]]]

    def values(self, name: str, **labels: str) -> list[float]:
        """Return the values of all series of a metric that have these labels."""
        return [
            value
            for series_labels, value in self.by_name.get(name, ())
            if all(series_labels.get(key) == expected for key, expected in labels.items())
        ]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series; 0 if there are none."""
        return sum(self.values(name, **labels))

    def histogram(self, name: str) -> dict[float, float]:
        """Return the buckets of a histogram, summed over its series.

        Raises ValueError for a bound that is not a number.
        """
        buckets: dict[float, float] = defaultdict(float)
        for labels, value in self.by_name.get(f"{name}_bucket", ()):
            buckets[float(labels.get("le", ""))] += value
        return dict(buckets)


def parse_metrics(*texts: str) -> Samples:
    """Parse `/metrics` output; raises ValueError for text in another format.

    The format allows values such as NaN; they are left out.
    """
    by_name: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    by_name[sample.name].append((sample.labels, sample.value))
    return Samples(by_name=by_name)


def quantile(share: float, buckets: Buckets) -> float | None:
    """Return a quantile as `histogram_quantile` does: observations are evenly spread inside a
    bucket, and the largest finite bound stands for everything above it.

    None without observations. Source:
    https://prometheus.io/docs/prometheus/latest/querying/functions/#histogram_quantile
    """
    bounds = sorted(buckets)
    if len(bounds) < 2 or buckets[bounds[-1]] <= 0:
        return None
    rank = share * buckets[bounds[-1]]
    low = below = 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= rank and count > below:
            inside = (rank - below) / (count - below)
            return low if math.isinf(bound) else low + (bound - low) * inside
        low, below = bound, count
    return None
