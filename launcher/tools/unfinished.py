"""Models on a node that are not finished: copies and downloads that run, or were interrupted."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Final

from launcher.core import shell
from launcher.core.sizes import told

PATTERN: Final = r"^unfinished (copy|download): ([0-9]{1,15}) KiB of (.+)$"
_PART = "unfinished"
_HUB = re.compile(r".*/hub/models--(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A model, by its name or its folder, of which a `copy` of ours or a `download` is not
    finished, and the bytes that are there of it.
    """

    kind: str
    model: str
    bytes: int

    @property
    def words(self) -> str:
        """What there is of it, and the command that goes on with it."""
        if self.kind == "copy":
            return (
                f"a copy of {self.model} is not finished, {told(self.bytes)} so far: `vlaunch model"
                f" copy {self.model}` continues it"
            )
        return (
            f"a download of {self.model} runs or was interrupted, {told(self.bytes)} so far:"
            f" `vlaunch model pull {self.model}` continues it"
        )


def script(hf_home: str) -> str:
    """Return the shell that asks for them, to run behind the probe (`host.probe(more=…)`)."""
    program = shlex.quote(shell.program("models_unfinished"))
    return f"sh_c {_PART} {program} {shlex.quote(hf_home)}\n"


def read(text: str | None) -> tuple[Unfinished, ...]:
    """Read its answer; nothing where it was not asked, or could not be."""
    found = re.finditer(PATTERN, text or "", re.MULTILINE)
    return tuple(
        Unfinished(kind=each[1], model=_called(each[3]), bytes=int(each[2]) * 1024)
        for each in found
    )


def _called(folder: str) -> str:
    """Return what users call the model of a folder: by its name where it is of a cache."""
    match = _HUB.fullmatch(folder)
    return match[1].replace("--", "/") if match else folder
