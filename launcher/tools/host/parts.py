"""Parts of a script's output, separated by marker lines, with exit statuses.

A missing tool fails only its own part.
"""

import re
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
MARK = "@@vlaunch"
_OF_DOCKER = ("docker", "info", "image", "images", "containers")
_JSON = re.compile(r"^[\[{]", re.MULTILINE)


class Parts(dict[str, tuple[str, int]]):
    """Text and exit status by part; missing parts count as failed."""

    def output(self, name: str) -> str:
        """Return the output of a part, even if it failed."""
        return self.get(name, ("", 1))[0]

    def output_if_ok(self, name: str) -> str | None:
        """Return the output of a part; None if it failed."""
        out, code = self.get(name, ("", 1))
        return out if code == 0 else None

    def parse(self, name: str, reader: Callable[[str], _T]) -> _T | None:
        """Parse the output of a part; None if it failed."""
        out = self.output_if_ok(name)
        return None if out is None else reader(out)


def parse_parts(text: str) -> Parts:
    """Split an output into parts; drops warnings of Docker and sudo before Docker's JSON."""
    parts, name, lines = Parts(), "", list[str]()
    for line in text.splitlines():
        if not line.startswith(MARK + " "):
            lines.append(line)
            continue
        header = line[len(MARK) + 1 :]
        if header.startswith("rc "):
            out, code = "\n".join(lines).strip("\n"), int(header[3:])
            if (
                code == 0
                and name.split(" ", maxsplit=1)[0] in _OF_DOCKER
                and (json_start := _JSON.search(out))
            ):
                out = out[json_start.start() :]
            parts[name] = (out, code)
        else:
            name = header
        lines = []
    return parts
