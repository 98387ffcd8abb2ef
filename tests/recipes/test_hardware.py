"""Which kind of node a node is."""

from __future__ import annotations

import pytest

from launcher.errors import RequestError
from launcher.recipes import hardware
from tests.recipes import acme


@pytest.mark.parametrize(
    ("gpu", "count", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 8, "h100"),
        ("NVIDIA H100 80GB HBM3", 4, "h100"),
        ("NVIDIA GH200 480GB", 1, None),
        ("NVIDIA H200 NVL", 2, "h200"),
        ("NVIDIA GB10", 1, "dgx_spark_gb10"),
        ("NVIDIA GB300", 4, "gb300"),
        ("NVIDIA GB300", 1, "dgx_station_gb300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 4, "rtx_pro_6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 8, "rtx_pro_6000_8x"),
        ("NVIDIA RTX 6000 Ada Generation", 1, None),
        ("AMD Instinct MI300X", 8, "mi300x"),
        ("", 1, None),
    ],
)
def test_by_what_a_driver_says(gpu: str, count: int, name: str | None) -> None:
    """All words of a profile that a driver says must be in the GPU's name; the number of GPUs
    decides between two.
    """
    found = hardware.of_gpu(gpu, count, acme.library().profiles)

    assert (found.id if found else None) == name


def test_no_such_name() -> None:
    """The near miss is named."""
    with pytest.raises(RequestError, match=r"no hardware `h10` .*did you mean `h100`"):
        acme.hardware("h10")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("h100", "nvidia"),
        ("mi300x", "amd"),
        ("xeon6", "cpu"),
        ("arc_pro_b60", ""),
        ("ironwood", ""),
    ],
)
def test_the_inventorys_word(name: str, word: str) -> None:
    """What vlaunch cannot run on has none."""
    assert acme.hardware(name).accelerator == word


def test_what_is_written_for_it() -> None:
    """A name wins over its generation, that over the brand, and all over `default`."""
    written = {"default": 1, "nvidia": 2, "hopper": 3, "h100": 4}

    assert acme.hardware("h100").of(written) == 4
    assert acme.hardware("h200").of(written) == 3
    assert acme.hardware("b200").of(written) == 2
    assert acme.hardware("mi300x").of(written) == 1
    assert acme.hardware("b200").overriding({"nvidia": 5, "hopper": 6}) == 5
    assert acme.hardware("mi300x").overriding({"nvidia": 5}) is None
