"""Readable YAML: original order, short leaves on one line, multi-line texts as blocks, no anchors,
and comments above surprising lines.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

_SHORT = 100  # characters of a mapping or list on one line


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _mapping(dumper: yaml.SafeDumper, value: dict[str, Any]) -> yaml.MappingNode:
    short = _fits(value.values(), value)
    return dumper.represent_mapping("tag:yaml.org,2002:map", value.items(), flow_style=short)


def _list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.SequenceNode:
    short = _fits(value, value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=short)


def _fits(values: Iterable[Any], whole: Any) -> bool:
    plain = not any(isinstance(value, (dict, list)) or "\n" in str(value) for value in values)
    return plain and len(str(whole)) <= _SHORT


_Dumper.add_representer(str, _text)
_Dumper.add_representer(dict, _mapping)
_Dumper.add_representer(list, _list)


def dump(documents: Iterable[Mapping[str, Any]], why: Mapping[str, str]) -> str:
    """Return documents as one text; `why` maps a line without its indentation to the comment above
    its first occurrence in each document.
    """
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 4096}
    texts = (yaml.dump(document, Dumper=_Dumper, **options) for document in documents)
    return "---\n".join(_add_comments(text, why) for text in texts)


def comment(lines: Iterable[str]) -> str:
    """Format lines as comments."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _add_comments(text: str, why: Mapping[str, str]) -> str:
    lines, pending = list[str](), dict(why)
    for line in text.splitlines():
        match = re.match(r"( *)(?:- )?(.*)", line)
        reason = pending.pop(match[2], "") if match else ""
        if match and reason:
            lines.append(f"{match[1]}# {reason}")
        lines.append(line)
    return "\n".join(lines) + "\n"
