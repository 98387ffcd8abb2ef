"""Software of the hosts: GPU kinds, images, and model folders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.core.errors import RequestError
from launcher.hosts.discovery.discover import discover
from launcher.hosts.discovery.inventory_writer import format_inventory
from launcher.hosts.discovery.local_assets import Home, LocalAssets
from launcher.hosts.discovery.shape import InitOptions
from tests.hosts.discovery.hosts import gpus, h100_pair, host, inventory, nic, practice, roce_four


def test_an_old_driver_gets_the_image_for_cuda_12() -> None:
    """The file has the reason."""
    text = format_inventory(discover(roce_four(), InitOptions()))

    assert "image: vllm/vllm-openai:v0.33.0-cu129\n" in text
    assert "because driver 550.127.08 is" in text


def test_an_image_that_all_hosts_have_is_used() -> None:
    """The newest one that is equal on all hosts and fits their accelerator."""
    discovery = discover(practice(), InitOptions())

    assert discovery.image.value == "vllm-cpu:0.32.0"


@pytest.mark.parametrize(
    "images_by_host",
    [
        [{"my/vllm:1": "a"}, {"my/vllm:1": "b"}],  # another image with this name
        [{"my/vllm:1": "a"}, {}],  # on one host only
        [{"my/vllm-cpu:1": "a"}, {"my/vllm-cpu:1": "a"}],  # for another accelerator
    ],
)
def test_different_images_of_one_name_are_not_used(
    images_by_host: list[dict[str, str]],
) -> None:
    """vLLM's own is."""
    pair = [
        replace(scanned, assets=LocalAssets(images=images))
        for scanned, images in zip(h100_pair(), images_by_host, strict=True)
    ]

    assert discover(pair, InitOptions()).image.value == "vllm/vllm-openai:v0.33.0"


def test_a_cache_with_models_on_all_hosts_is_the_home() -> None:
    """With models on only some hosts it is the default, and the file lists them."""
    cache = Home(path="/home/ops/.cache/huggingface", models=("Qwen/Qwen3-8B",), free=2**40)
    both = [replace(scanned, assets=LocalAssets(homes=(cache,))) for scanned in h100_pair()]

    assert discover(both, InitOptions()).hf_home.value == cache.path
    first = [both[0], replace(both[1], assets=LocalAssets())]
    remaining = discover(first, InitOptions()).hf_home
    assert remaining.value == "/data/huggingface"
    assert "in /home/ops/.cache/huggingface: Qwen/Qwen3-8B (on gpu01)" in remaining.why


def test_amd_gpus_are_detected_by_their_driver() -> None:
    """With vLLM's image for them."""
    pair = [
        host(f"mi{at}", nic("eth0", f"10.0.4.{at}/24"), assets=LocalAssets(amd_gpus=8))
        for at in (1, 2)
    ]
    loaded = inventory(pair)

    assert (loaded.accelerator, loaded.gpus, loaded.image) == (
        "amd",
        16,
        "vllm/vllm-openai-rocm:v0.33.0",
    )


def test_a_host_without_gpus_among_others_is_an_error() -> None:
    """Not a CPU cluster."""
    broken = host(
        "gpu02", nic("eth0", "10.0.0.2/24"), part_errors={"gpus": "NVIDIA-SMI has failed because …"}
    )
    pair = [host("gpu01", nic("eth0", "10.0.0.1/24"), gpus=gpus(8)), broken]

    with pytest.raises(RequestError) as raised:
        discover(pair, InitOptions())
    assert raised.value.message == "gpu02: no NVIDIA GPU found, while gpu01 has some"
    assert "NVIDIA-SMI has failed" in raised.value.evidence
    assert inventory(pair, InitOptions(accelerator="cpu")).accelerator == "cpu"


def test_a_host_without_an_answer_about_gpus_has_none() -> None:
    """For an empty answer, too."""
    silent = host("gpu02", nic("eth0", "10.0.0.2/24"), part_errors={"gpus": "\n"})

    with pytest.raises(RequestError) as raised:
        discover([host("gpu01", nic("eth0", "10.0.0.1/24"), gpus=gpus(8)), silent], InitOptions())
    assert raised.value.evidence == "gpu02: none found"
