"""The plugin that lets vLLM's CPU build run under Ray (`cpu_platform/`)."""

from pathlib import Path

from launcher.core.registry import Files
from launcher.lab import cpu_platform
from launcher.tools.shipped import derived


def files() -> Files:
    """Return the plugin's files by their paths below `site-packages`."""
    return derived.plugin_files(Path(cpu_platform.__file__).parent)
