"""Sizes of transfers, and calls of Gloo and NCCL."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("backend", "free", "ranks", "size"),
    [
        ("nccl", 80 << 30, 1, 256 << 20),
        ("gloo", 80 << 30, 8, 64 << 20),
        ("nccl", 1 << 30, 2, 64 << 20),
        ("nccl", 999 << 20, 2, 32 << 20),
        ("gloo", 0, 1, 8),
    ],
)
def test_the_largest_transfer_fits(
    payload: SimpleNamespace, backend: str, free: int, ranks: int, size: int
) -> None:
    """An eighth of the free memory divided by ranks, a power of two, at least one."""
    assert payload.lanes.max_transfer(backend, free, ranks) == size


def test_sizes_grow_up_to_a_limit(payload: SimpleNamespace) -> None:
    """Of time or memory: a slow link is measured with little data."""
    assert payload.lanes.larger_size(1 << 20, 0.1, 4 << 20) == 2 << 20
    assert payload.lanes.larger_size(1 << 20, 0.2, 4 << 20) == 0
    assert payload.lanes.larger_size(4 << 20, 0.01, 4 << 20) == 0


def test_large_sizes_are_repeated(payload: SimpleNamespace) -> None:
    """Three times, or once if a transfer takes longer than a second."""
    size, most = 1 << 20, 4 << 20
    assert payload.lanes.next_size(size, [0.1], most) == 2 << 20
    assert payload.lanes.next_size(size, [0.2], most) == size
    assert payload.lanes.next_size(size, [0.2, 0.1], most) == size
    assert payload.lanes.next_size(size, [0.2, 0.1, 0.1], most) == 0
    assert payload.lanes.next_size(size, [1.1], most) == 0
    assert payload.lanes.next_size(most, [0.01], most) == most


def test_gloo_uses_the_named_interface_or_the_node_s_address(
    payload: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown interface is an error that lists the existing ones."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert payload.lanes.gloo_devices("10.0.0.2") == [{"hostname": "10.0.0.2"}]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert payload.lanes.gloo_devices("10.0.0.2") == [{"interface": "lo"}]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth99")
    with pytest.raises(
        ValueError, match="GLOO_SOCKET_IFNAME names eth99, which is not here: there are lo"
    ):
        payload.lanes.gloo_devices("10.0.0.2")


def test_calls_of_nccl(payload: SimpleNamespace) -> None:
    """Options with our timeout, lists of tensors, peers and tags; an endless queue is a timeout,
    and aborted; an error of NCCL ends the wait.
    """
    calls: list[Any] = []
    errors: list[str] = []

    class Group:
        def __init__(self, *args: Any) -> None:
            calls.append(("group", *args))

        def __getattr__(self, name: str) -> Any:
            if name == "get_error":
                if not errors:
                    raise AttributeError(name)  # torch before 2.7
                return lambda: SimpleNamespace(name=errors[0])
            return lambda *args: calls.append((name, *args)) or SimpleNamespace(wait=lambda: None)

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def query(self) -> bool:
            return False

        def elapsed_time(self, other: Any) -> float:
            return 2.5

    class Options:
        _timeout: Any = None

    Group.Options = Options  # type: ignore[attr-defined]
    torch = SimpleNamespace(
        distributed=SimpleNamespace(ProcessGroupNCCL=Group), cuda=SimpleNamespace(Event=Event)
    )
    lane = payload.lanes.Nccl(torch, "store", 1, 2, 0.05, "10.0.0.2")
    lane.send("t", 0)
    lane.recv("t", 0)
    lane.reduce("t")
    for expected in ([], ["SUCCESS"]):
        errors = expected
        with pytest.raises(TimeoutError, match="the GPU waited 0 s"):
            lane.settle()
    errors = ["COMM_ERROR"]
    with pytest.raises(ConnectionError, match=r"NCCL lost the other side \(COMM_ERROR\)"):
        lane.settle()
    lane.abort()

    (name, store, rank, size, options), *rest = calls
    assert (name, store, rank, size) == ("group", "store", 1, 2)
    assert options._timeout == datetime.timedelta(seconds=0.05)
    assert rest == [("send", ["t"], 0, 0), ("recv", ["t"], 0, 0), ("allreduce", ["t"]), ("abort",)]
    assert lane.elapsed(lane.mark(), lane.mark()) == 0.0025
