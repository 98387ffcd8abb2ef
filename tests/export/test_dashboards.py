"""Grafana dashboards: their queries, variables and layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher import export
from tests.export.test_prometheus import metric_names, metrics_of

FOLDER = Path(export.__path__[0]) / "monitoring" / "dashboards"
NAMED = pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))


def read(name: str) -> dict[str, Any]:
    """Return a dashboard."""
    dashboard: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return dashboard


@NAMED
def test_queries_use_existing_metrics(name: str) -> None:
    """Recorded from vLLM, Ray and HAProxy, and defined by the agent."""
    exprs = [target["expr"] for panel in read(name)["panels"] for target in panel["targets"]]

    assert exprs
    for expr in exprs:
        result = metrics_of(expr)
        assert result, expr
        assert [item for item in result if item not in metric_names()] == [], expr


@NAMED
def test_queries_select_the_chosen_clusters(name: str) -> None:
    """In every selector."""
    for panel in read(name)["panels"]:
        for query in panel["targets"]:
            expr = query["expr"]
            assert expr.count("{") == expr.count('{cluster=~"$cluster"'), expr
            assert query["legendFormat"], panel["title"]


@NAMED
def test_panels_do_not_overlap(name: str) -> None:
    """Within 24 columns; Grafana requires unique IDs."""
    claimed: set[tuple[int, int]] = set()
    panels = read(name)["panels"]
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & claimed, panel["title"]
        claimed |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


@NAMED
def test_choices_are_variables(name: str) -> None:
    """Data source and clusters: no dashboard depends on one Grafana."""
    result = read(name)

    assert [item["name"] for item in result["templating"]["list"]] == ["datasource", "cluster"]
    assert {panel["datasource"]["uid"] for panel in result["panels"]} == {"${datasource}"}
    assert "id" not in result


def test_names_are_unique() -> None:
    """An import replaces the dashboard of the same uid."""
    uids = [read(path.name)["uid"] for path in FOLDER.iterdir()]

    assert len(set(uids)) == len(uids) == 4


def test_a_metric_of_an_older_vllm_is_unknown() -> None:
    """The test of queries would report it."""
    expr = 'sum(rate(vllm:gpu_cache_usage_perc{cluster=~"$cluster"}[5m]))'

    assert [metric for metric in metrics_of(expr) if metric not in metric_names()] == [
        "vllm:gpu_cache_usage_perc"
    ]
