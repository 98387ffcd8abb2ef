"""The platform class: what Ray calls its devices, and which communicator carries the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.platforms.cpu import CpuPlatform as _Stock
else:
    from vllm import platforms
    from vllm.utils.import_utils import resolve_obj_by_qualname

    # vLLM's own choice for this machine: the plain CPU platform, or the one for AMD Zen where its
    # library is installed.
    _Stock = resolve_obj_by_qualname(
        platforms.cpu_platform_plugin() or "vllm.platforms.cpu.CpuPlatform"
    )


class RayCpuPlatform(_Stock):
    """The stock CPU platform whose Ray devices are the slots of `ray start --num-gpus`."""

    ray_device_key = "GPU"

    @classmethod
    def device_control_id_to_physical_device_id(cls, device_id: str) -> int:
        """Return Ray's slot number as it is: a slot stands for no particular cores."""
        return int(device_id)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Name the communicator that looks before it assumes shared memory."""
        return f"{__package__}.communicator.RayCpuCommunicator"
