"""Grafana's dashboards: the queries, and that each panel has a place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.export import dashboards
from launcher.export.dashboards import Dashboard
from tests.export.test_prometheus import known, metrics_of

NAMED = pytest.mark.parametrize("name", dashboards.ALL)


def read(name: str) -> dict[str, Any]:
    """Return a dashboard as Grafana would read it."""
    found: dict[str, Any] = json.loads(dashboards.text(dashboards.ALL[name]))
    return found


@NAMED
def test_every_query_is_of_metrics_that_there_are(name: str) -> None:
    """As recorded from vLLM and Ray, and as the agent names them."""
    exprs = [each["expr"] for panel in read(name)["panels"] for each in panel["targets"]]

    assert exprs
    for expr in exprs:
        found = metrics_of(expr)
        assert found, expr
        assert [each for each in found if each not in known()] == [], expr


@NAMED
def test_every_query_is_of_the_chosen_clusters(name: str) -> None:
    """Each selector says so."""
    for panel in dashboards.ALL[name].panels:
        for query in panel.queries:
            assert query.expr.count("{") == query.expr.count('{cluster=~"$cluster"'), query.expr
            assert query.legend, panel.title


@NAMED
def test_panels_have_places_of_their_own(name: str) -> None:
    """Within 24 columns, and none over another; ids are unique, as Grafana wants them."""
    taken: set[tuple[int, int]] = set()
    panels = read(name)["panels"]
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


@NAMED
def test_what_is_chosen_is_a_variable(name: str) -> None:
    """The source of data and the clusters: nothing of one Grafana is in it."""
    found = read(name)

    assert [each["name"] for each in found["templating"]["list"]] == ["datasource", "cluster"]
    assert {panel["datasource"]["uid"] for panel in found["panels"]} == {"${datasource}"}
    assert "id" not in found


def test_names_are_unique() -> None:
    """An import replaces the dashboard of the same uid."""
    assert len({each.uid for each in dashboards.ALL.values()}) == len(dashboards.ALL)


def test_a_metric_that_is_not_there_is_seen() -> None:
    """Such as those of older vLLM."""
    query = dashboards.Query('sum(rate(vllm:gpu_cache_usage_perc{cluster=~"$cluster"}[5m]))', "x")
    made = Dashboard("x", "x", [dashboards.Panel("x", "", [query])])
    (panel,) = json.loads(dashboards.text(made))["panels"]

    assert [each for each in metrics_of(panel["targets"][0]["expr"]) if each not in known()] == [
        "vllm:gpu_cache_usage_perc"
    ]
