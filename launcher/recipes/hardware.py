"""Which kind of node, of those that recipes know, a node is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from launcher.errors import RequestError
from launcher.inventory.mistakes import did_you_mean
from launcher.recipes.schema import Profile

_T = TypeVar("_T")
# Words of a profile's name that no driver says, and what counts GPUs (`rtx_pro_6000_8x`).
_SILENT = re.compile(r"dgx|spark|station|\d+x")
BRANDS = {"NVIDIA": "nvidia", "AMD": "amd", "Intel": "cpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A profile by its name."""

    id: str
    profile: Profile

    @property
    def generation(self) -> str:
        """The first of its generations, as the recipes' own site takes it."""
        return next(iter(self.profile.generation), "")

    @property
    def accelerator(self) -> str:
        """The inventory's word for it; empty for what vlaunch cannot run on."""
        cpu = self.generation == "cpu"
        brand = self.profile.brand
        return BRANDS.get(brand, "") if cpu or brand != "Intel" else ""

    @property
    def gpu_gb(self) -> float:
        """The memory of one GPU."""
        return self.profile.vram_gb / self.profile.gpu_count

    def of(self, written: Mapping[str, _T]) -> _T | None:
        """Return what is written for this hardware: for its name first, then its generation, its
        brand, and `default`.
        """
        keys = (self.id, self.generation, self.profile.brand.lower(), "default")
        return next((written[key] for key in keys if key in written), None)

    def overriding(self, written: Mapping[str, _T]) -> _T | None:
        """Return the overrides of its generation; those of all NVIDIA GPUs where it has none."""
        if self.generation in written:
            return written[self.generation]
        return written.get("nvidia") if self.profile.brand == "NVIDIA" else None


def named(name: str, known: Mapping[str, Profile]) -> Hardware:
    """Return the hardware of a name; raises RequestError when there is none."""
    if name not in known:
        raise RequestError(
            f"no hardware `{name}` in these recipes" + did_you_mean(name, known),
            evidence="known: " + ", ".join(sorted(known)),
            hint="name one of them with `--hardware`",
        )
    return Hardware(id=name, profile=known[name])


def of_gpu(gpu: str, count: int, known: Mapping[str, Profile]) -> Hardware | None:
    """Return the hardware with a GPU as its driver names it, such as `NVIDIA H100 80GB HBM3`, and
    so many of them; None when no profile has it.

    Of profiles with other numbers of GPUs it is the largest that is not larger.
    """
    said = set(re.findall(r"[a-z0-9]+", gpu.lower()))
    fitting = [
        Hardware(id=name, profile=profile)
        for name, profile in known.items()
        if (words := _words(name)) and words <= said
    ]
    fewer = [each for each in fitting if each.profile.gpu_count <= count]
    if fewer:
        return max(fewer, key=lambda each: each.profile.gpu_count)
    return min(fitting, key=lambda each: each.profile.gpu_count, default=None)


def _words(name: str) -> set[str]:
    return {word for word in name.lower().split("_") if not _SILENT.fullmatch(word)}
