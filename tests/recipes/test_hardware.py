"""Finding a recipe's hardware by the name of a GPU."""

from __future__ import annotations

import pytest

from launcher.core.errors import RequestError
from launcher.recipes import library
from launcher.recipes.hardware import named, of_gpus
from launcher.tools.host import Gpu

NVIDIA = library.load().hardware_of("nvidia")


@pytest.mark.parametrize(
    ("gpu", "count", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 8, "h100"),
        ("NVIDIA H100 80GB HBM3", 4, "h100"),
        ("NVIDIA GB300", 4, "gb300"),
        ("NVIDIA GB300", 1, "dgx_station_gb300"),
        ("NVIDIA GB10", 1, "dgx_spark_gb10"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 4, "rtx_pro_6000_2x"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 8, "rtx_pro_6000_8x"),
        ("NVIDIA A100-SXM4-80GB", 8, None),
    ],
)
def test_names_of_drivers(gpu: str, count: int, name: str | None) -> None:
    """The profile with so many GPUs, else the largest with fewer."""
    gpus = [Gpu(index=0, name=gpu, memory_total=80_000, memory_used=0, driver="580")]
    found = of_gpus(gpus, count, NVIDIA)

    assert (found and found.name) == name


def test_no_gpus() -> None:
    """Nodes may report none."""
    assert of_gpus([], 8, NVIDIA) is None


def test_unknown_names() -> None:
    """Only hardware of the inventory's accelerator is offered."""
    assert named("h200", NVIDIA).generation == "hopper"
    with pytest.raises(
        RequestError, match=r"no hardware `h20` of this kind; did you mean `h200`\?"
    ):
        named("h20", NVIDIA)
    with pytest.raises(RequestError, match="no hardware `mi300x`"):
        named("mi300x", NVIDIA)
    assert set(library.load().hardware_of("cpu")) == {"xeon5", "xeon6"}
