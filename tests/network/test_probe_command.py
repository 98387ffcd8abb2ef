"""The network probe's command line, and the parser of its output."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.domain import Answer
from launcher.core.errors import UnreadableAnswer
from launcher.network import nccl_log, probe_command

FIXTURES = Path(__file__).parent.parent / "fixtures" / "network"
MINIMAL = {"node": "node1", "backend": "gloo"}


def answer(out: str, **fields: Any) -> Answer:
    """Return a node's recorded answer to the probe's command."""
    return Answer(node="node1", **{"code": 0, **fields}, out=out)


def recorded(name: str, node: str) -> probe_command.Report:
    """Return a report of the lab hosts."""
    return probe_command.parse_report(answer((FIXTURES / name / f"{node}.json").read_text()))


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_recorded_nccl(node: str) -> None:
    """NCCL 2.28.9 with two ranks on one H100: figures, versions, and the lines of the pair."""
    report = recorded("h100", node)
    (transfer,) = report.transfers
    (log,) = report.pair_logs.values()

    assert (report.gpu, report.error) == ("NVIDIA H100 80GB HBM3", "")
    assert report.versions == {"torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9"}
    assert transfer.correct
    assert (transfer.size, transfer.error) == (1 << 28, "")
    assert report.collective is not None
    assert (report.collective.ranks, report.collective.correct) == (2, True)
    links = nccl_log.parse_log([log.encode()]).links
    assert {(link.network, link.gpudirect) for link in links} == {("Socket", False)}
    assert len(links) == 4


def test_the_probe_understands_its_command_line() -> None:
    """The program's own parser accepts the launcher's command line."""
    argv = probe_command.probe_argv(
        node="b",
        node_rank=1,
        nodes={"a": "10.0.0.1", "b": "10.0.0.2"},
        ranks_per_node=8,
        master="10.0.0.1",
        port=29577,
        backend="nccl",
        nonce="word",
        deadline=90,
        pair_timeout=12.5,
    )

    assert argv[:3] == ("python3", "-B", "/opt/vlaunch/network.pyz")
    args = _payload_parser()(list(argv[3:]))
    assert (args.node, args.node_rank, args.nodes, args.ranks_per_node) == (
        "b",
        1,
        "a=10.0.0.1,b=10.0.0.2",
        8,
    )
    assert (args.master, args.port, args.backend, args.nonce) == (
        "10.0.0.1",
        29577,
        "nccl",
        "word",
    )
    assert (args.reach, args.torch) == (30, 180)
    assert (args.deadline, args.window, args.pair_timeout, args.child) == (90, 120, 12.5, None)


def test_a_healthy_cluster_is_complete() -> None:
    """Every direction towards a node has figures, and the collective too."""
    report = recorded("healthy", "node2")

    assert (report.node, report.backend, report.error) == ("node2", "gloo", "")
    assert [(rank.rank, rank.phase, rank.ended, rank.exit) for rank in report.ranks] == [
        (1, "done", True, 0)
    ]
    assert sorted(
        (transfer.source, transfer.target, transfer.correct) for transfer in report.transfers
    ) == [
        ("node1", "node2", True),
        ("node3", "node2", True),
    ]
    assert all(
        transfer.latency and transfer.bandwidth and transfer.size >= 1 << 20
        for transfer in report.transfers
    )
    assert report.collective is not None
    assert (report.collective.ranks, report.collective.correct, report.collective.error) == (
        3,
        True,
        "",
    )
    assert report.collective.busbw == pytest.approx((report.collective.algbw or 0) * 4 / 3)
    assert (report.infiniband, report.memlock) == ((), 8 << 20)


@pytest.mark.parametrize(
    ("name", "node", "source", "text"),
    [
        ("cut-2-3", "node2", "node3", "connecting, rank 2 (node3) on the other side"),
        ("cut-2-3", "node3", "node2", "connecting, rank 1 (node2) on the other side"),
        ("cut-1-3", "node1", "node3", "rank 2 (node3) did not arrive"),
        ("cut-1-3", "node3", "node1", "the head did not open 10.77.0.11:29577"),
        (
            "wrong-interface",
            "node2",
            "node1",
            "GLOO_SOCKET_IFNAME names eth9, which is not here: there are lo, eth0",
        ),
        ("wrong-interface", "node1", "node2", "rank 1 (node2): GLOO_SOCKET_IFNAME names eth9"),
        ("killed", "node2", "node1", "ended by signal 9"),
        ("killed", "node1", "node2", "sending, rank 1 (node2) on the other side: Read error"),
        ("port-taken", "node1", "node2", "port 29577 is taken on the head"),
        ("port-taken", "node2", "node3", "something else answers at 10.77.0.11:29577"),
        (
            "older-run",
            "node2",
            "node1",
            "something else answers at 10.77.0.11:29577: a store, but not this run's",
        ),
        ("deadline", "node2", "node1", "the store is gone: rank 0 (node1) ended"),
        ("deadline", "node1", "node2", "the deadline of 5 s passed"),
    ],
)
def test_a_fault_names_the_culprit(name: str, node: str, source: str, text: str) -> None:
    """The unmeasured direction has the reason, on both ends."""
    (results,) = [
        transfer for transfer in recorded(name, node).transfers if transfer.source == source
    ]

    assert results.bandwidth is None
    assert text in results.error


@pytest.mark.parametrize(
    ("name", "others"),
    [("cut-2-3", ("node1",)), ("killed", ("node3",)), ("wrong-interface", ("node3",))],
)
def test_pairs_without_the_culprit_are_measured(name: str, others: tuple[str, ...]) -> None:
    """A failing pair does not stop the others; the collective is skipped with a reason."""
    for node in others:
        report = recorded(name, node)

        assert any(transfer.bandwidth for transfer in report.transfers)
        assert report.collective is not None
        assert not report.collective.tried


def test_a_slow_sender_affects_one_direction() -> None:
    """100 Mbit/s is 12.5 MB/s; its incoming transfers are fast, and a slow link is measured with
    little data.
    """
    (slow,) = [
        transfer
        for transfer in recorded("slow-node2", "node3").transfers
        if transfer.source == "node2"
    ]
    (back,) = [
        transfer
        for transfer in recorded("slow-node2", "node2").transfers
        if transfer.source == "node3"
    ]

    assert slow.bandwidth == pytest.approx(12.5e6, rel=0.05)
    assert slow.size == 2 << 20
    assert (back.bandwidth or 0) > 1e9


def test_figures_per_rank() -> None:
    """Local ranks are paired: two nodes away, two figures."""
    report = recorded("two-ranks-a-node", "node3")

    assert [rank.rank for rank in report.ranks] == [4, 5]
    assert sorted((transfer.source, transfer.local_rank) for transfer in report.transfers) == [
        ("node1", 0),
        ("node1", 1),
        ("node2", 0),
        ("node2", 1),
    ]
    assert report.collective is not None
    assert report.collective.ranks == 6


def test_missing_ranks_are_named() -> None:
    """By the ranks that waited."""
    (rank,) = recorded("cut-1-3", "node1").ranks

    assert (
        rank.error
        == "at rendezvous: rank 2 (node3) did not arrive, rank 0 (node1), rank 1 (node2) did"
    )


def test_only_the_last_line_counts() -> None:
    """A library that writes to standard output before does not spoil the report."""
    assert probe_command.parse_report(
        answer(f"hello\n{json.dumps(MINIMAL)}\n")
    ) == probe_command.Report(node="node1", backend="gloo")


@pytest.mark.parametrize(
    "out",
    [
        "",
        "Traceback",
        "[]",
        "null",
        "{}",
        '{"node": 1, "backend": "gloo"}',
        '{"node": "a", "backend": "gloo", "ranks": {}}',
        '{"node": "a", "backend": "gloo", "new": 1}',
        '{"node": "a", "backend": "gloo", "transfers": [{"source": "b"}]}',
        '{"node": "a", "backend": "gloo", "seconds": true}',
        "[" * 100_000,
    ],
)
def test_invalid_reports_are_rejected(out: str) -> None:
    """With the node's name, without guesses."""
    with pytest.raises(UnreadableAnswer, match="node1: the network probe exited with code 1"):
        probe_command.parse_report(answer(out, code=1))


def test_a_timed_out_probe() -> None:
    """A timeout is distinguished from a crash, and the last output is the evidence."""
    with pytest.raises(UnreadableAnswer, match="did not finish in time") as caught:
        probe_command.parse_report(answer("", code=124, timed_out=True, err="No such container: x"))

    assert caught.value.evidence == "No such container: x"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [
        "ranks",
        "transfers",
        "collective",
        "infiniband",
        "log",
        "env",
        "seconds",
        "rdma",
        "pair_logs",
        "error",
    ]
)


@given(
    st.text()
    | JSON.map(json.dumps)
    | st.dictionaries(KEYS, JSON).map(lambda fields: json.dumps({**MINIMAL, **fields}))
)
def test_any_output_is_parsed_or_rejected(out: str) -> None:
    """No other exception is raised."""
    try:
        assert isinstance(probe_command.parse_report(answer(out)), probe_command.Report)
    except UnreadableAnswer:
        return


def _payload_parser() -> Any:
    """Return the payload's argument parser; its folder is on the path only during the import."""
    launcher = Path(probe_command.__file__).parents[1]
    folder = launcher / "network" / "probe"
    spec = importlib.util.spec_from_file_location("vlaunch_payload_network", folder / "network.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path[:0] = [str(folder), str(launcher / "core")]
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.path[:2]

    def parse(argv: list[str]) -> argparse.Namespace:
        return module.parse_args(argv)  # type: ignore[no-any-return]

    return parse
