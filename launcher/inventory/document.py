"""The YAML text of a file that a person wrote → plain values, with the line of every key.

Refuses what cannot be read before anything is interpreted.

Plain words follow YAML 1.2's core schema, as editors do: `yes`, `on`, `2026-01-01` and `22:22` are
text, and numbers are decimal. Nesting and the count of values after aliases are bounded, so that a
small file cannot grow in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from launcher.inventory.mistakes import Mistake, Where, name, shown, spell

MAX_DEPTH = 24
MAX_VALUES = 20_000
_LONGEST_NUMBER = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What a file says: `data` is a mapping when it could be read, `lines` has the line of each key
    and list item.
    """

    data: dict[str, object] | None
    lines: Mapping[Where, int]
    mistakes: tuple[Mistake, ...]

    def line(self, yaml_path: Where) -> int:
        """Return the line of `where`, or of the nearest thing around it that is written down."""
        while yaml_path and yaml_path not in self.lines:
            yaml_path = yaml_path[:-1]
        return self.lines.get(yaml_path, 1)

    def told(self, mistakes: Iterable[Mistake]) -> list[tuple[int, str]]:
        """Return the line and the words of each mistake, in the order of lines, each once."""
        return sorted(
            {
                (mistake.line or self.line(mistake.where), self._words(mistake))
                for mistake in mistakes
            }
        )

    def _words(self, mistake: Mistake) -> str:
        yaml_path = mistake.where[:-1] if mistake.about_key else mistake.where
        # `ray: 2.6` stands for `ray.version`: the path ends where the file does.
        while yaml_path and yaml_path not in self.lines:
            yaml_path = yaml_path[:-1]
        return f"{spell(yaml_path)}: {mistake.text}" if yaml_path else mistake.text


class Written(float):
    """A decimal number that remembers how it was written: `1.50` in `env` must reach the node as
    `1.50`.
    """

    text: str

    def __str__(self) -> str:
        return self.text


def parse(
    text: str, *, first_key: str = "cluster", example: str = "inventory/example.yaml"
) -> Document:
    """Read YAML; mistakes are in the result.

    A file that is no YAML at all gives one mistake and no data.

    Args:
        text: what is in the file.
        first: the key that such files start with.
        example: the file that shows what to write.
    """
    try:
        root = _compose(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return _unreadable(
            line, f"the character U+{ord(text[error.position]):04X} is not allowed in YAML"
        )
    except yaml.MarkedYAMLError as error:
        return _unreadable(_line_of(error), _syntax(error))
    except RecursionError:
        return _unreadable(1, f"nested more than {MAX_DEPTH} levels deep")
    except (ValueError, OverflowError) as error:  # a bad \x or \U escape
        return _unreadable(1, f"not valid YAML: {type(error).__name__}")
    if root is None:
        return _unreadable(1, f"the file is empty; `{example}` shows what to write")
    return _convert(root, first_key)


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
    finally:
        loader.dispose()
    return node


def _convert(root: yaml.Node, first_key: str) -> Document:
    reader = _Reader()
    try:
        data = reader.value(root, (), 0)
    except _TooBig as error:
        return _unreadable(error.line, str(error))
    mistakes = reader.mistakes
    if not isinstance(data, dict):
        text = f"should be a mapping that starts with `{first_key}:`, not {shown(data)}"
        return Document(
            data=None, lines=reader.lines, mistakes=(*mistakes, Mistake(where=(), text=text))
        )
    return Document(data=data, lines=reader.lines, mistakes=tuple(mistakes))


def _unreadable(line: int, text: str) -> Document:
    return Document(data=None, lines={}, mistakes=(Mistake(where=(), text=text, line=line),))


def _line_of(error: yaml.MarkedYAMLError) -> int:
    mark = error.problem_mark or error.context_mark
    return mark.line + 1 if mark else 1


def _syntax(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "it cannot be read"
    if "'\\t'" in problem:
        return "a tab is used where YAML wants spaces; indent with spaces"
    if "single document" in (error.context or ""):
        return "should be one YAML document; remove the second `---`"
    location = (
        f" ({error.context}, line {error.context_mark.line + 1})"
        if error.context and error.context_mark
        else ""
    )
    return f"not valid YAML: {problem}{location}"


class _Loader(yaml.SafeLoader):
    # Empty, so that only the resolvers added below apply.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


_TAG = "tag:yaml.org,2002:"
_SIGNS_AND_DIGITS = list("-+.0123456789")
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    # No leading zero and no plus: `007` stays text, as a zero-padded name or an environment value
    # should.
    ("int", r"^-?(?:0|[1-9][0-9]{0,17})$", _SIGNS_AND_DIGITS),
    ("float", r"^-?(?:0|[1-9][0-9]{0,17})?\.[0-9]{1,18}$", _SIGNS_AND_DIGITS),
    ("merge", r"^<<$", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _tag, re.compile(_pattern), _first)


class _TooBig(Exception):
    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


@dataclass(slots=True)
class _Reader:
    """Walks the node graph once; what it has seen so far is its state."""

    lines: dict[Where, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    count: int = 0

    def value(self, node: yaml.Node, yaml_path: Where, depth: int) -> object:
        self._spend(node, depth)
        self.lines.setdefault(yaml_path, _line(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, yaml_path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [
                self.value(child, (*yaml_path, index), depth + 1)
                for index, child in enumerate(node.value)
            ]
        return self._scalar(node, yaml_path)

    def _mapping(self, node: yaml.MappingNode, yaml_path: Where, depth: int) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node, merged in self._pairs(node, yaml_path, depth):
            if not isinstance(key_node, yaml.ScalarNode):
                self._mistake(
                    yaml_path, key_node, "a key should be one word, not a list or a mapping"
                )
                continue
            key = str(key_node.value)
            child_path = (*yaml_path, key)
            if key not in values:
                self.lines[child_path] = _line(key_node)
                values[key] = self.value(value_node, child_path, depth + 1)
            elif not merged:
                first = self.lines[child_path]
                self._mistake(child_path, key_node, f"written twice; the first is on line {first}")
        return values

    def _pairs(
        self, node: yaml.MappingNode, yaml_path: Where, depth: int
    ) -> Iterator[tuple[yaml.Node, yaml.Node, bool]]:
        """Yield key, value and whether it was merged in: the mapping's own pairs first, for they
        win over `<<`.
        """
        merges: list[yaml.Node] = []
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                merges += value.value if isinstance(value, yaml.SequenceNode) else [value]
            else:
                yield key, value, False
        for source in merges:
            self._spend(source, depth)
            if not isinstance(source, yaml.MappingNode):
                self._mistake(
                    yaml_path,
                    source,
                    "`<<` should be followed by an alias to a mapping, such as `*defaults`",
                )
                continue
            for key, value, _ in self._pairs(source, yaml_path, depth + 1):
                self._spend(key, depth)
                yield key, value, True

    def _scalar(self, node: yaml.Node, yaml_path: Where) -> object:
        text, tag = str(node.value), str(node.tag).removeprefix(_TAG)
        try:
            if tag == "null":
                return None
            if tag == "bool":
                return {"true": True, "false": False}[text.lower()]
            if tag == "int":
                return int(text) if len(text) < _LONGEST_NUMBER else text
            if tag == "float":
                number = Written(text)
                number.text = text
                return number
        except (KeyError, ValueError):
            tag = "?"
        if tag not in ("str", "merge"):
            self._mistake(
                yaml_path, node, f"the tag `{name(str(node.tag))}` is not used here; remove it"
            )
        return text

    def _spend(self, node: yaml.Node, depth: int) -> None:
        self.count += 1
        if self.count > MAX_VALUES:
            raise _TooBig(_line(node), f"more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise _TooBig(_line(node), f"nested more than {MAX_DEPTH} levels deep")

    def _mistake(self, yaml_path: Where, node: yaml.Node, text: str) -> None:
        self.mistakes.append(Mistake(where=yaml_path, text=text, line=_line(node)))


class UnusableFile(Exception):
    """The file cannot be used, for a reason that `line` shows; `encoding` when its bytes are not
    UTF-8.
    """

    def __init__(self, text: str, *, line: int = 1, encoding: bool = False) -> None:
        super().__init__(text)
        self.line = line
        self.encoding = encoding


def read_file(path: Path, *, max_bytes: int, kind: str) -> str:
    """Return what is in the file at `path`; raises Unusable.

    Args:
        path: any path; what is not a regular file is refused before it is opened.
        most: bytes that such a file may have.
        kind: what the file is called, as in `which no inventory needs to be`.
    """
    try:
        if path.is_dir():
            raise UnusableFile("is a directory; name the YAML file in it")
        if path.exists() and not path.is_file():
            raise UnusableFile("is not a regular file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnusableFile(f"cannot be read: {reason.lower()}") from error
    if len(content) > max_bytes:
        raise UnusableFile(f"is larger than {max_bytes // 1024} KiB, which no {kind} needs to be")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        text = f"the byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise UnusableFile(text, line=line, encoding=True) from error


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
