"""The plugin that lets vLLM's CPU build run under Ray: the files of `launcher/lab/cpu_platform`
as pip would install them.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = "vlaunch_cpu_ray"
SOURCE = Path(__file__).parents[1] / "lab" / "cpu_platform"
_INFO = f"{PACKAGE}-1.0.dist-info"


def files() -> dict[str, bytes]:
    """Return the content of each file by its path below `site-packages`."""
    package = {f"{PACKAGE}/{file.name}": file.read_bytes() for file in sorted(SOURCE.glob("*.py"))}
    metadata = f"Metadata-Version: 2.1\nName: {PACKAGE.replace('_', '-')}\nVersion: 1.0\n"
    entry_points = f"[vllm.platform_plugins]\n{PACKAGE} = {PACKAGE}:register\n"
    return package | {
        f"{_INFO}/METADATA": metadata.encode(),
        f"{_INFO}/entry_points.txt": entry_points.encode(),
    }
