"""Grafana's dashboards of a cluster: an overview, ranks and nodes, cache and queue.

Pure. They are in Grafana's classic JSON, which every version imports, and name no cluster:
`$cluster` chooses among those that Prometheus scrapes. Every query has returned data from vLLM,
Ray and the agent on practice hosts (tests/integration); so there is none about GPUs, of which
DCGM's own dashboards tell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["timeseries", "stat", "state-timeline", "table"]
_COLUMNS = 24  # of Grafana's grid
_HEIGHT = 8


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked of Prometheus, and what each series is called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel; `unit` is one of Grafana's, `width` of 24 columns."""

    title: str
    about: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard; `uid` stays the same, so that an import replaces it."""

    uid: str
    title: str
    panels: Sequence[Panel]


_C = 'cluster=~"$cluster"'
_EACH = "{{cluster}} {{instance}}"


def _rate(metric: str, by: str, labels: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{_C}{labels}}}[$__rate_interval]))"


def _quantiles(metric: str, *shares: float) -> list[Query]:
    return [
        Query(
            f"histogram_quantile({share:g}, {_rate(f'{metric}_bucket', 'cluster, instance, le')})",
            f"p{share * 100:g} {_EACH}",
        )
        for share in shares
    ]


def _gauge(metric: str, legend: str, labels: str = "") -> Query:
    return Query(f"{metric}{{{_C}{labels}}}", legend)


_SERVER = "{{cluster}} {{server}}"
_ENGINE = f"{_EACH} engine {{{{engine}}}}"

OVERVIEW = Dashboard(
    "vlaunch-overview",
    "vlaunch: overview",
    [
        Panel(
            "Servers that are ready",
            "1 for a server that answers; it is 0 while its keeper brings it back.",
            [_gauge("vlaunch_server_state", _SERVER, ',state="ready"')],
            kind="stat",
            width=6,
        ),
        Panel(
            "Ranks that live",
            "Of those that are known.",
            [Query(f"sum by (cluster, server) (vlaunch_rank_up{{{_C}}})", _SERVER)],
            kind="stat",
            width=6,
        ),
        Panel(
            "Requests",
            "What vLLM works on, and what waits.",
            [
                Query(f"sum by (cluster) (vllm:num_requests_running{{{_C}}})", "{{cluster}} run"),
                Query(f"sum by (cluster) (vllm:num_requests_waiting{{{_C}}})", "{{cluster}} wait"),
            ],
            kind="stat",
            width=6,
        ),
        Panel(
            "Faults",
            "That ended an engine, since `vlaunch serve`.",
            [_gauge("vlaunch_server_faults_total", _SERVER)],
            kind="stat",
            width=6,
        ),
        Panel(
            "Tokens per second",
            "Generated, and of prompts.",
            [
                Query(_rate("vllm:generation_tokens_total", "cluster, instance"), f"out {_EACH}"),
                Query(_rate("vllm:prompt_tokens_total", "cluster, instance"), f"in {_EACH}"),
            ],
        ),
        Panel(
            "Requests per second",
            "That ended, by why.",
            [
                Query(
                    _rate("vllm:request_success_total", "cluster, finished_reason"),
                    "{{cluster}} {{finished_reason}}",
                )
            ],
            unit="reqps",
        ),
        Panel(
            "Answers by status",
            "5xx is what the server could not do, 4xx what it was asked wrongly.",
            [
                Query(
                    _rate("http_requests_total", "cluster, status", ',job="vllm"'),
                    "{{cluster}} {{status}}",
                )
            ],
            unit="reqps",
        ),
        Panel(
            "Time to the first token",
            "Waiting and prefill.",
            _quantiles("vllm:time_to_first_token_seconds", 0.5, 0.9, 0.99),
            unit="s",
        ),
        Panel(
            "Time between tokens",
            "What a reader sees while an answer comes.",
            _quantiles("vllm:inter_token_latency_seconds", 0.5, 0.99),
            unit="s",
        ),
        Panel(
            "Time of a request",
            "From its arrival to its last token.",
            _quantiles("vllm:e2e_request_latency_seconds", 0.5, 0.99),
            unit="s",
        ),
        Panel(
            "Canary",
            "How long the keeper's own request of one token took; it waits in the users' queue.",
            [
                _gauge("vlaunch_server_canary_seconds", f"took {_SERVER}"),
                _gauge("vlaunch_server_canary_waiting_seconds", f"under way {_SERVER}"),
            ],
            unit="s",
        ),
        Panel(
            "KV cache",
            "The part that is used.",
            [_gauge("vllm:kv_cache_usage_perc", _ENGINE)],
            unit="percentunit",
        ),
        Panel(
            "What can be scraped",
            "1 for each endpoint, agent and Ray node that answers Prometheus.",
            [Query(f"up{{{_C}}}", "{{cluster}} {{job}} {{instance}}")],
            kind="state-timeline",
        ),
    ],
)

RANKS = Dashboard(
    "vlaunch-ranks",
    "vlaunch: ranks and nodes",
    [
        Panel(
            "Ranks",
            "1 while a rank's process lives; nothing where nobody can say it.",
            [_gauge("vlaunch_rank_up", "{{server}} {{rank}} on {{node}}")],
            kind="state-timeline",
            width=12,
        ),
        Panel(
            "State of servers",
            "The state that is 1 is the one it is in.",
            [Query(f"vlaunch_server_state{{{_C}}} == 1", "{{server}} {{state}}")],
            kind="state-timeline",
            width=12,
        ),
        Panel(
            "Agents",
            "1 for a node whose agent is connected to the head's.",
            [_gauge("vlaunch_node_agent_up", "{{cluster}} {{node}}")],
            kind="state-timeline",
            width=12,
        ),
        Panel(
            "Network",
            "1 when the last check reached the level it required.",
            [_gauge("vlaunch_network_passed", "{{cluster}} {{required}}")],
            kind="stat",
            width=6,
        ),
        Panel(
            "Age of the network check",
            "Containers that started since are not covered by it.",
            [Query(f"time() - vlaunch_network_check_timestamp_seconds{{{_C}}}", "{{cluster}}")],
            unit="s",
            kind="stat",
            width=6,
        ),
        Panel(
            "Starts and faults",
            "Engines that were started, and faults that ended one.",
            [
                _gauge("vlaunch_server_engine_starts_total", f"starts {_SERVER}"),
                _gauge("vlaunch_server_faults_total", f"faults {_SERVER}"),
            ],
        ),
        Panel(
            "Recovery",
            "How long after its last fault a server was ready again.",
            [_gauge("vlaunch_server_recovery_seconds", _SERVER)],
            unit="s",
        ),
        Panel(
            "Nothing moves",
            "For how long no answer, counter, line, CPU or GPU time has.",
            [_gauge("vlaunch_server_still_seconds", _SERVER)],
            unit="s",
        ),
        Panel(
            "CPU of nodes",
            "As Ray sees it.",
            [_gauge("ray_node_cpu_utilization", "{{cluster}} {{node}}")],
            unit="percent",
        ),
        Panel(
            "Memory of nodes",
            "The part that is used.",
            [
                Query(
                    f"ray_node_mem_used{{{_C}}} / ray_node_mem_total{{{_C}}}",
                    "{{cluster}} {{node}}",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            "Network of nodes",
            "All interfaces, without RDMA.",
            [
                _gauge("ray_node_network_receive_speed", "in {{cluster}} {{node}}"),
                _gauge("ray_node_network_send_speed", "out {{cluster}} {{node}}"),
            ],
            unit="Bps",
        ),
        Panel(
            "Room on disks",
            "What Ray's disk has left.",
            [_gauge("ray_node_disk_free", "{{cluster}} {{node}}")],
            unit="bytes",
        ),
        Panel(
            "Memory of the API's process",
            "What grows without end is a leak.",
            [_gauge("process_resident_memory_bytes", _EACH, ',job="vllm"')],
            unit="bytes",
        ),
        Panel(
            "CPU of the API's process",
            "One core is 1; an API that needs all of one holds up its engines.",
            [Query(_rate("process_cpu_seconds_total", "cluster, instance", ',job="vllm"'), _EACH)],
        ),
    ],
)

CACHE = Dashboard(
    "vlaunch-cache",
    "vlaunch: cache and queue",
    [
        Panel(
            "KV cache",
            "The part that is used; at 1, requests wait or are preempted.",
            [_gauge("vllm:kv_cache_usage_perc", _ENGINE)],
            unit="percentunit",
        ),
        Panel(
            "Requests",
            "That run, and that wait.",
            [
                _gauge("vllm:num_requests_running", f"run {_ENGINE}"),
                _gauge("vllm:num_requests_waiting", f"wait {_ENGINE}"),
            ],
        ),
        Panel(
            "Why requests wait",
            "For room, or for what they were put off by.",
            [_gauge("vllm:num_requests_waiting_by_reason", f"{_ENGINE} {{{{reason}}}}")],
        ),
        Panel(
            "Time in the queue",
            "Before the first step.",
            _quantiles("vllm:request_queue_time_seconds", 0.5, 0.99),
            unit="s",
        ),
        Panel(
            "Time of prefill",
            "The prompt's part of the time to the first token.",
            _quantiles("vllm:request_prefill_time_seconds", 0.5, 0.99),
            unit="s",
        ),
        Panel(
            "Tokens in a step",
            "The mean: how full batches are.",
            [
                Query(
                    f"{_rate('vllm:iteration_tokens_total_sum', 'cluster, instance')}"
                    f" / {_rate('vllm:iteration_tokens_total_count', 'cluster, instance')}",
                    _EACH,
                )
            ],
        ),
        Panel(
            "Prefix cache",
            "The part of prompts' tokens that was found in it.",
            [
                Query(
                    f"{_rate('vllm:prefix_cache_hits_total', 'cluster, instance')}"
                    f" / {_rate('vllm:prefix_cache_queries_total', 'cluster, instance')}",
                    _EACH,
                )
            ],
            unit="percentunit",
        ),
        Panel(
            "Tokens of prompts by source",
            "Computed, or found.",
            [
                Query(
                    _rate("vllm:prompt_tokens_by_source_total", "cluster, source"),
                    "{{cluster}} {{source}}",
                )
            ],
        ),
        Panel(
            "Preemptions per second",
            "Requests that lost their room, and are computed again.",
            [Query(_rate("vllm:num_preemptions_total", "cluster, instance"), _EACH)],
        ),
        Panel(
            "Length of prompts",
            "In tokens.",
            _quantiles("vllm:request_prompt_tokens", 0.5, 0.99),
        ),
        Panel(
            "Length of answers",
            "In tokens.",
            _quantiles("vllm:request_generation_tokens", 0.5, 0.99),
        ),
        Panel(
            "Turned away",
            "Requests per second beyond what may wait.",
            [
                Query(
                    _rate("vllm:admission_rejections_total", "cluster, reason"),
                    "{{cluster}} {{reason}}",
                )
            ],
            unit="reqps",
        ),
        Panel(
            "Capacity",
            "What the KV cache of each engine holds: see `kv_cache_size_tokens`,"
            " `kv_cache_max_concurrency`.",
            [_gauge("vllm:cache_config_info", _ENGINE)],
            kind="table",
            width=24,
        ),
    ],
)

ALL = {"overview.json": OVERVIEW, "ranks.json": RANKS, "cache.json": CACHE}


def text(dashboard: Dashboard) -> str:
    """Return a dashboard as Grafana imports it."""
    made = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["vlaunch", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_placed(dashboard.panels)),
    }
    return json.dumps(made, indent=2) + "\n"


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource"}
    question = "label_values(up, cluster)"
    return [
        {**source, "query": "prometheus"},
        {
            "name": "cluster",
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": question, "refId": "clusters"},
            "definition": question,
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _placed(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    """Yield panels from left to right, and from the top to the bottom."""
    left = top = 0
    for number, panel in enumerate(panels, start=1):
        if left + panel.width > _COLUMNS:
            left, top = 0, top + _HEIGHT
        place = {"x": left, "y": top, "w": panel.width, "h": _HEIGHT}
        left += panel.width
        instant = panel.kind in ("stat", "table")
        yield {
            "id": number,
            "type": panel.kind,
            "title": panel.title,
            "description": panel.about,
            "datasource": _SOURCE,
            "gridPos": place,
            "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
            "targets": [
                {
                    "refId": chr(ord("A") + at),
                    "datasource": _SOURCE,
                    "expr": query.expr,
                    "legendFormat": query.legend,
                    "instant": instant,
                    "range": not instant,
                    "format": "table" if panel.kind == "table" else "time_series",
                }
                for at, query in enumerate(panel.queries)
            ],
        }
