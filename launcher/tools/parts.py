"""The parts of a script's answer: what each printed under its marker line, and its exit status.

A missing tool is a fact then, and not an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
MARK = "@@vlaunch"
_OF_DOCKER = ("docker", "info", "image", "images", "containers")
_JSON = re.compile(r"^[\[{]", re.MULTILINE)


class Parts(dict[str, tuple[str, int]]):
    """Text and exit status by the part's name; a part that is missing has failed."""

    def said(self, name: str) -> str:
        """Return what a part printed, well or not."""
        return self.get(name, ("", 1))[0]

    def good(self, name: str) -> str | None:
        """Return what a part printed; None when it failed."""
        out, code = self.get(name, ("", 1))
        return out if code == 0 else None

    def read(self, name: str, reader: Callable[[str], _T]) -> _T | None:
        """Read what a part printed; None when it failed."""
        out = self.good(name)
        return None if out is None else reader(out)


def read_parts(text: str) -> Parts:
    """Return the parts of an answer. What stands before the JSON of Docker is left out: warnings of
    its own and of sudo, which reach the same stream.
    """
    parts, name, lines = Parts(), "", list[str]()
    for line in text.splitlines():
        if not line.startswith(MARK + " "):
            lines.append(line)
            continue
        word = line[len(MARK) + 1 :]
        if word.startswith("rc "):
            out, code = "\n".join(lines).strip("\n"), int(word[3:])
            if (
                code == 0
                and name.split(" ", maxsplit=1)[0] in _OF_DOCKER
                and (at := _JSON.search(out))
            ):
                out = out[at.start() :]
            parts[name] = (out, code)
        else:
            name = word
        lines = []
    return parts
