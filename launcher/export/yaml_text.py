"""Documents as YAML for people: in the order in which they were put together, texts of several
lines as blocks, no anchors (they do not cross documents), and a reason above what surprises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml


def dump(documents: Iterable[Mapping[str, Any]], why: Mapping[str, str]) -> str:
    """Return documents as one text; `why` has, by a line without its indentation, what is said
    above the first one of each document.
    """
    return "---\n".join(_explained(_plain(each), why) for each in documents)


def comment(lines: Iterable[str]) -> str:
    """Return lines as comments."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _plain(document: Mapping[str, Any]) -> str:
    class Dumper(yaml.SafeDumper):
        """Writes each value where it stands."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    said: str = yaml.dump(document, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=4096)
    return said


def _explained(text: str, why: Mapping[str, str]) -> str:
    found, left = list[str](), dict(why)
    for line in text.splitlines():
        match = re.match(r"( *)(?:- )?(.*)", line)
        reason = left.pop(match[2], "") if match else ""
        if match and reason:
            found.append(f"{match[1]}# {reason}")
        found.append(line)
    return "\n".join(found) + "\n"
