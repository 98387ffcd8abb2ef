"""GPU models that can be simulated, as `nvidia-smi` reports them."""

from dataclasses import dataclass

# Shown in inventories and by `lab status`.
PLAINLY = "the GPUs are simulated: vLLM runs its CPU build"
DRIVER = "580.95.05"
CUDA = "13.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """GPU model; memory in MiB, None if shared with the host."""

    name: str
    memory: int | None
    capability: str


# Names and sizes: published outputs of `nvidia-smi`; capabilities:
# https://developer.nvidia.com/cuda-gpus.
MODELS = {
    "h100": GpuModel(name="NVIDIA H100 80GB HBM3", memory=81559, capability="9.0"),
    "a100": GpuModel(name="NVIDIA A100-SXM4-80GB", memory=81920, capability="8.0"),
    "l4": GpuModel(name="NVIDIA L4", memory=23034, capability="8.9"),
    "gb10": GpuModel(name="NVIDIA GB10", memory=None, capability="12.1"),
}
# PCI bus numbers of the eight GPUs of an HGX H100, and eight invented ones.
BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF, *range(0xE0, 0xE8))
