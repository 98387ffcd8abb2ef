"""The kinds of nodes that recipes tell apart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from launcher.core.errors import RequestError
from launcher.inventory.mistakes import did_you_mean
from launcher.tools.host import Gpu

_T = TypeVar("_T")
# Words of a name that no driver reports, and the number of GPUs (`rtx_pro_6000_8x`).
_NOT_IN_DRIVER = re.compile(r"dgx|spark|station|\d+x")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A kind of node; `name` and `generation` are empty, and `vram_gb` of all its GPUs is 0, where
    they are unknown. `accelerator` is the inventory's word, and the brand in recipes.
    """

    name: str = ""
    accelerator: str
    generation: str = ""
    gpu_count: int = 1
    vram_gb: float = 0.0

    def pick(self, values: Mapping[str, _T]) -> _T | None:
        """Return the value for this hardware: by its name, generation or brand, or the default."""
        keys = (self.name, self.generation, self.accelerator, "default")
        return next((values[key] for key in keys if key in values), None)

    def excluded(self, words: Mapping[str, str]) -> bool:
        """True when a recipe says `unsupported` for this hardware."""
        return self.pick(words) == "unsupported"


def named(name: str, known: Mapping[str, Hardware]) -> Hardware:
    """Return the hardware of a name; raises RequestError when there is none."""
    if name not in known:
        raise RequestError(
            f"recipes know no hardware `{name}` of this kind{did_you_mean(name, known)}",
            evidence="known: " + ", ".join(sorted(known)),
            hint="choose one with `--hardware NAME`",
        )
    return known[name]


def of_gpus(gpus: Sequence[Gpu], count: int, known: Mapping[str, Hardware]) -> Hardware | None:
    """Return the hardware with `count` such GPUs, or the largest with fewer: the driver calls one
    `NVIDIA H100 80GB HBM3`, for example. None when none matches.
    """
    reported = set(re.findall(r"[a-z0-9]+", gpus[0].name.lower())) if gpus else set()
    matches = [each for name, each in known.items() if _driver_words(name) <= reported]
    matches.sort(key=lambda each: each.gpu_count)
    fewer = [each for each in matches if each.gpu_count <= count]
    return next(iter(fewer[-1:] or matches[:1]), None)


def _driver_words(name: str) -> set[str]:
    return {word for word in name.split("_") if not _NOT_IN_DRIVER.fullmatch(word)}
