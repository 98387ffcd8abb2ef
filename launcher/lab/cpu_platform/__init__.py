"""vLLM's CPU platform for Ray: the stock one has no Ray device and assumes a single host.

The image contains it as the package `vlaunch_cpu_ray`, so that every Ray worker can import it; vLLM
finds it through the entry point group `vllm.platform_plugins`
(https://docs.vllm.ai/en/latest/design/plugin_system.html).
"""

from __future__ import annotations


def register() -> str | None:
    """Return the platform class for a CPU build of vLLM; None otherwise, to keep vLLM's choice.

    vLLM must not be imported at module level: `vllm.platforms` imports this module.
    """
    from vllm import platforms

    if platforms.cpu_platform_plugin() is None:
        return None
    return f"{__name__}.platform.RayCpuPlatform"
