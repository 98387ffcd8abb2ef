"""Logs that are compressed, or in UTF-16."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tracemalloc
from collections.abc import Callable

import pytest

from launcher.tools import nccl
from tests.tools.nccl.logs import BAD, GOOD, said


@pytest.mark.parametrize(
    "pack",
    [
        gzip.compress,
        bz2.compress,
        lzma.compress,
        lambda raw: gzip.compress(raw[:50]) + gzip.compress(raw[50:]),
    ],
)
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_packed_logs(pack: Callable[[bytes], bytes], step: int) -> None:
    """A compressed log is read like any other, also one of several members."""
    packed = pack(f"{GOOD}\n{BAD}\n".encode())

    assert nccl.read(packed[at : at + step] for at in range(0, len(packed), step)) == said(
        f"{GOOD}\n{BAD}\n"
    )


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_packed_log_that_is_cut_off(pack: Callable[[bytes], bytes]) -> None:
    """What is missing at its end is known."""
    assert nccl.read([pack(f"{GOOD}\n{BAD}\n".encode() * 99)[:-3]]).truncated


@pytest.mark.parametrize("order", ["utf-16", "utf-16-be"])
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_utf_16(order: str, step: int) -> None:
    """So PowerShell writes what is redirected."""
    raw = (b"" if order == "utf-16" else b"\xfe\xff") + f"{GOOD}\r\n{BAD}\r\n".encode(order)

    assert len(nccl.read(raw[at : at + step] for at in range(0, len(raw), step)).links) == 2


def test_a_packed_log_does_not_fill_the_memory() -> None:
    """However much a small file unpacks to."""
    packed = gzip.compress(b"x" * (64 << 20))
    tracemalloc.start()
    nccl.read([packed])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 32 << 20
