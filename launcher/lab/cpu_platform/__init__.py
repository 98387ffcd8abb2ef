"""vLLM's CPU platform, able to run under Ray: the stock one has no Ray device and takes all ranks
to be on one host.

Installed in the image as the package `vlaunch_cpu_ray`; vLLM finds it through the entry point group
`vllm.platform_plugins` (https://docs.vllm.ai/en/latest/design/plugin_system.html). It must be
importable in every Ray worker, so it lives in the image, not with the driver.
"""

from __future__ import annotations


def register() -> str | None:
    """Name the platform class when this vLLM is a CPU build, else None so that vLLM's own choice
    stands.

    Nothing of vLLM is imported at module level: this is read while `vllm.platforms` is still being
    imported.
    """
    from vllm import platforms

    if platforms.cpu_platform_plugin() is None:
        return None
    return f"{__name__}.platform.RayCpuPlatform"
