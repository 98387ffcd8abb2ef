"""The wheel that lets vLLM's CPU build run under Ray, made from `launcher/payload/cpu_platform`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from launcher.tools import purewheel

NAME = "vlaunch-cpu-ray"
VERSION = "1.0"
PACKAGE = "vlaunch_cpu_ray"
SOURCE = Path(__file__).parents[1] / "payload" / "cpu_platform"


@cache
def wheel() -> tuple[str, bytes]:
    """Return the wheel's file name and bytes; the same source gives the same bytes on every
    machine.
    """
    return purewheel.build(
        NAME,
        VERSION,
        {f"{PACKAGE}/{file.name}": file.read_bytes() for file in sorted(SOURCE.glob("*.py"))},
        metadata="Summary: vLLM's CPU platform under Ray\nRequires-Python: >=3.10\n",
        entry_points=f"[vllm.platform_plugins]\n{PACKAGE} = {PACKAGE}:register\n",
    )
