"""Group work of a rank, within its deadline and with its errors."""

from __future__ import annotations

import signal
import socket
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("expected", "short"),
    [
        (
            (
                "[/pytorch/gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.2]:33."
                " This is typically caused by x"
            ),
            "Connection closed by peer [10.0.0.2]:33",
        ),
        (
            (
                "NCCL error in: NCCLUtils.cpp:94, unhandled system error\nncclSystemError: System"
                " call failed.\nLast error:\nBootstrap : no socket interface found"
            ),
            "Bootstrap : no socket interface found",
        ),
        ("", "ValueError"),
    ],
)
def test_exceptions_are_shortened_to_the_relevant_line(
    payload: SimpleNamespace, expected: str, short: str
) -> None:
    """Without source locations; NCCL's last error is more precise than its first."""
    assert payload.work.shorten_error(ValueError(expected)) == short


def test_a_hanging_call_is_abandoned(payload: SimpleNamespace) -> None:
    """Its result or error counts if it comes in time."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))

        assert payload.work.run_bounded(lambda: 7, 5) == (True, 7, None)
        done, value, error = payload.work.run_bounded(lambda: int("x"), 5)
        assert (done, value, type(error)) == (True, None, ValueError)
        assert payload.work.run_bounded(lambda: signal.sigtimedwait([], 0.5), 0.01)[0] is False


def test_a_thread_selects_its_gpu(
    payload: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's current device is per thread, and every group runs in a new one."""
    claimed: list[int] = []
    torch = SimpleNamespace(cuda=SimpleNamespace(set_device=claimed.append))
    store = SimpleNamespace(set_timeout=lambda _: None)
    args = SimpleNamespace(backend="nccl", pair_timeout=5, node_rank=0)
    rank = SimpleNamespace(
        torch=torch, args=args, local=3, ips=["10.0.0.1"], connect_store=lambda prefix: store
    )
    monkeypatch.setitem(payload.lanes.LANES, "nccl", lambda *args: args[1:])

    assert payload.work.GroupWork(rank).open("pair", 0, 2) == (store, 0, 2, 4, "10.0.0.1")
    assert claimed == [3]


def test_a_failed_pair_names_the_operation_and_the_peer(payload: SimpleNamespace) -> None:
    """For a hang and a library's error; our own messages need no addition."""
    rank = SimpleNamespace(
        args=SimpleNamespace(pair_timeout=8), format_ranks=lambda ranks: f"rank {ranks[0]} (b)"
    )
    work = payload.work.PairWork(rank, 0, 1, 1)
    work.set_step("sending")

    side = "sending, rank 1 (b) on the other side"
    assert work.describe_error(None) == f"{side}: not finished after 8 s"
    assert work.describe_error(OSError("reset")) == "sending, rank 1 (b) on the other side: reset"
    assert work.describe_error(payload.work.RankError("no eth9")) == "no eth9"
