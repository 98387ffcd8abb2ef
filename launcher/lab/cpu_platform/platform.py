"""Platform class: the name of its Ray devices, and its communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.platforms.cpu import CpuPlatform as _Stock
else:
    from vllm import platforms
    from vllm.utils.import_utils import resolve_obj_by_qualname

    # vLLM's own choice for this machine: the plain CPU platform, or AMD Zen's if installed.
    _Stock = resolve_obj_by_qualname(
        platforms.cpu_platform_plugin() or "vllm.platforms.cpu.CpuPlatform"
    )


class RayCpuPlatform(_Stock):
    """Stock CPU platform, with the slots of `ray start --num-gpus` as Ray devices."""

    ray_device_key = "GPU"

    @classmethod
    def device_control_id_to_physical_device_id(cls, device_id: str) -> int:
        """Return Ray's slot number unchanged: slots are not bound to cores."""
        return int(device_id)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return the communicator that verifies shared memory before using it."""
        return f"{__package__}.communicator.RayCpuCommunicator"
