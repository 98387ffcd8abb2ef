"""Server metrics over several samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from launcher.agent.desired import Desired, ProcessSpec
from launcher.serving import metrics
from launcher.serving.metrics import (
    Latency,
    MetricsCollector,
    MetricsSample,
    RankStatus,
    ServerMetrics,
)
from launcher.tools.site import Site, servers
from tests import supervision
from tests.conftest import Load

VLLM = (Path(__file__).parents[1] / "fixtures" / "vllm" / "mp_pp2_buckets.metrics").read_text()
API = "127.0.0.1:8000"
ALIVE = {"gpu01": {"PP0": True}, "gpu02": {"PP1": False}}
RANKS = {"gpu01": ["PP0"], "gpu02": ["PP1"]}


def text(*, tokens: float = 53.0, ttft: tuple[int, int] = (7, 7), running: int = 0) -> str:
    """Return the `/metrics` text of a server with this many generated tokens; `ttft` counts first
    tokens within 50 ms and 100 ms.
    """
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        'vllm:num_requests_waiting{engine="0"} 1\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        f'vllm:generation_tokens_total{{engine="0"}} {tokens}\n'
        f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.05"}} {ttft[0]}\n'
        f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1"}} {ttft[1]}\n'
        f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} {ttft[1]}\n'
    )


def reports(*texts: str, **extra: Any) -> dict[str, Any]:
    """Return the nodes' answers with these texts, the head's first."""
    return {
        node: {"apis": {API: {"status": 200, "text": text, "error": ""}}, **extra}
        for node, text in zip(("gpu01", "gpu02"), texts, strict=False)
    }


class Sampling:
    """Samples of one server, two seconds apart."""

    def __init__(self, site: Site, spec: Desired | None = None, **how: Any) -> None:
        self.counting, self.now = MetricsCollector(site), 100.0
        self.spec = spec or supervision.make_spec()
        self.record = supervision.make_record(**how)

    def take(self, answers: dict[str, Any], *, every: float = 2.0, **extra: Any) -> ServerMetrics:
        """Take another sample."""
        self.now += every
        state = servers.parse_servers(
            supervision.head_report(supervision.server_row(self.spec, self.record, **extra))
        )
        (server,) = self.counting.build_sample(state, answers, None, self.now).servers
        return server


@pytest.fixture
def site(load: Load) -> Site:
    """Two nodes."""
    return Site(load())


def test_rates_start_with_the_second_sample(site: Site) -> None:
    """They are per second between two samples."""
    sampling = Sampling(site)
    first = sampling.take(reports(text(tokens=53)))
    second = sampling.take(reports(text(tokens=153, running=3)))

    assert first.figures is not None and second.figures is not None
    assert (first.figures.tokens_per_s, second.figures.tokens_per_s) == (None, 50.0)
    assert (second.figures.running, second.figures.waiting, second.figures.kv_used) == (3, 1, 0.25)
    assert second.history == (first.figures, second.figures)


def test_latencies_are_of_the_last_minute(site: Site) -> None:
    """Without requests in it, of the engine's lifetime."""
    sampling = Sampling(site)
    sampling.take(reports(text(ttft=(7, 7))))
    still = sampling.take(reports(text(ttft=(7, 7))))
    slower = sampling.take(reports(text(ttft=(7, 17))))

    assert still.figures is not None and slower.figures is not None
    assert still.figures.first_token == Latency(p50=0.025, p99=0.0495, count=7, over=None)
    assert slower.figures.first_token == Latency(p50=0.075, p99=0.0995, count=10, over=4.0)
    for _ in range(40):
        last = sampling.take(reports(text(ttft=(7, 17))))
    assert last.figures is not None
    assert last.figures.first_token.over is None


def test_latencies_cover_a_minute_at_most(site: Site) -> None:
    """At any sampling rate."""
    sampling = Sampling(site)
    for count in range(100):
        last = sampling.take(reports(text(ttft=(count, count))))

    assert last.figures is not None
    assert last.figures.first_token.over == 60.0
    assert last.figures.first_token.count == 30


def test_a_restarted_engine_counts_from_zero(site: Site) -> None:
    """No rate is negative."""
    sampling = Sampling(site)
    sampling.take(reports(text(tokens=500)))
    again = sampling.take(reports(text(tokens=10)))

    assert again.figures is not None
    assert again.figures.tokens_per_s is None


def test_cache_and_requests_of_vllm(site: Site) -> None:
    """Recorded from 0.32."""
    sampling = Sampling(site)
    figures = sampling.take(reports(VLLM)).figures

    assert figures is not None
    assert (figures.running, figures.waiting, figures.kv_used, figures.prefix_hits) == (
        0,
        0,
        0.0,
        0.0,
    )
    assert figures.first_token.count == 7
    assert figures.between_tokens.count == 46


def test_endpoints_are_summed_if_all_answer(site: Site) -> None:
    """The counters of one of two endpoints are not the server's."""
    apart = supervision.make_spec(
        backend="mp",
        processes=tuple(ProcessSpec(node=node, argv=("vllm",)) for node in ("gpu01", "gpu02")),
        replicas=2,
    )
    sampling = Sampling(site, apart)
    both = sampling.take(reports(text(running=2), text(running=3)))
    first = sampling.take(reports(text(running=2)))

    assert both.figures is not None
    assert both.figures.running == 5
    assert first.figures is None
    assert first.trouble == "gpu02: not queried yet"


@pytest.mark.parametrize(
    ("answers", "trouble"),
    [
        ({"gpu01": {"error": "gpu01: no route"}}, "gpu01: no route"),
        (
            {"gpu01": {"apis": {API: {"status": 0, "text": "", "error": "timed out"}}}},
            "gpu01: cannot read the metrics of its API: timed out",
        ),
        (
            {"gpu01": {"apis": {API: {"status": 200, "text": "", "error": ""}}}},
            "gpu01: vLLM records no statistics (`--disable-log-stats`)",
        ),
        (reports("a{ 1"), "cannot parse its metrics: "),
        (reports("http_requests_total 1"), "`vllm:num_requests_running` is missing"),
    ],
)
def test_reasons_for_missing_figures(site: Site, answers: dict[str, Any], trouble: str) -> None:
    """Figures that cannot be queried are unknown, not zero."""
    server = Sampling(site).take(answers)

    assert server.figures is None
    assert trouble in server.trouble


def test_a_server_without_an_engine_is_not_queried(site: Site) -> None:
    """Its state is the reason."""
    sampling = Sampling(site, state="pausing", doing="waiting before the next restart")
    server = sampling.take({})

    assert (server.figures, server.trouble) == (None, "no engine is running")
    assert (server.state, server.detail) == ("waiting", "waiting before the next restart")


def test_every_rank_has_its_agents_state(site: Site) -> None:
    """Alive, dead or unknown."""
    sampling = Sampling(site, ranks=RANKS, alive=ALIVE)
    server = sampling.take(reports(text()))
    assert server.ranks == (
        RankStatus(node="gpu01", rank="PP0", alive=True),
        RankStatus(node="gpu02", rank="PP1", alive=False),
    )

    old = sampling.take(reports(text()), age=30.0)
    assert [rank.alive for rank in old.ranks] == [None, None]
    sampling.record = replace(sampling.record, alive={})
    assert [rank.alive for rank in sampling.take(reports(text())).ranks] == [None, None]


def test_a_rank_on_a_silent_node_is_unknown(site: Site) -> None:
    """The head's record may be older than the silence."""
    record = supervision.make_record(ranks=RANKS, alive=ALIVE)
    state = servers.parse_servers(
        supervision.head_report(supervision.server_row(supervision.make_spec(), record), gpu02=70.0)
    )
    (server,) = MetricsCollector(site).build_sample(state, reports(text()), None, 1.0).servers

    assert [rank.alive for rank in server.ranks] == [True, None]


def test_a_supervisor_without_a_heartbeat(site: Site) -> None:
    """Its last record is outdated; vLLM's counters are not."""
    state = servers.parse_servers(
        supervision.head_report(
            supervision.server_row(supervision.make_spec(), supervision.make_record()), agent=300.0
        )
    )
    (server,) = MetricsCollector(site).build_sample(state, reports(text()), None, 1.0).servers

    assert server.state == "unknown"
    assert server.detail == "the head's agent has not reported for 300 s"
    assert server.figures is not None


def test_the_supervisors_record(site: Site) -> None:
    """Canary, restarts and faults."""
    record = {"answered": supervision.AT - 1, "seconds": 0.08, "asking": 0.0, "fault_count": 2}
    server = Sampling(site, **record, restarts=[1.0], restarts_left=2).take(reports(text()))

    assert (server.canary, server.canary_age, server.faults) == (0.08, 3.0, 2)
    assert (server.restarts, server.restarts_left) == (1, 2)


def test_every_node_is_queried_once(site: Site) -> None:
    """For all of its APIs, and the head always, for the servers."""
    rows = [
        supervision.server_row(supervision.make_spec("chat"), supervision.make_record("chat")),
        supervision.server_row(
            supervision.make_spec("embed", port=8001), supervision.make_record("embed")
        ),
        supervision.server_row(
            supervision.make_spec("far", node="gpu02", host="::1"), supervision.make_record("far")
        ),
    ]
    queries = metrics.query_metrics(
        site, servers.parse_servers(supervision.head_report(*rows)).running
    )

    assert [
        (query.node, parse_qs(query.argv[-1].partition("?")[2])["apis"]) for query in queries
    ] == [
        ("gpu01", ["127.0.0.1:8000,127.0.0.1:8001"]),
        ("gpu02", ["[::1]:8000"]),
    ]
    (alone,) = metrics.query_metrics(site, ())
    assert (alone.node, "apis" in alone.argv[-1]) == ("gpu01", False)


def test_json_has_no_history(site: Site) -> None:
    """A line is a single sample."""
    sampling = Sampling(site)
    server = sampling.take(reports(text()))
    (data,) = MetricsSample(cluster="c", servers=(server,)).as_json()["servers"]

    assert "history" not in data
    assert data["figures"]["first_token"]["p50"] == 0.025
