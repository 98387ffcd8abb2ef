"""Parsing of YAML written by users into plain values, with the line of every key.

Plain scalars follow YAML 1.2's core schema, as in editors: `yes`, `on`, `2026-01-01` and `22:22`
are text, and numbers are decimal. Depth and the number of values after alias expansion are bounded,
so a small file cannot exhaust memory.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from launcher.inventory.mistakes import Mistake, YamlPath, describe_value, format_key, format_path

MAX_DEPTH = 24
MAX_VALUES = 20_000
_MAX_NUMBER_LENGTH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed file: `data` is None if unreadable; `lines` has the lines of keys and items."""

    data: dict[str, object] | None
    lines: Mapping[YamlPath, int]
    mistakes: tuple[Mistake, ...]

    def line_of(self, yaml_path: YamlPath) -> int:
        """Return the line of a path, or of its nearest enclosing key."""
        while yaml_path and yaml_path not in self.lines:
            yaml_path = yaml_path[:-1]
        return self.lines.get(yaml_path, 1)

    def sorted_messages(self, mistakes: Iterable[Mistake]) -> list[tuple[int, str]]:
        """Return the distinct (line, message) pairs of the mistakes, sorted by line."""
        return sorted(
            {
                (mistake.line or self.line_of(mistake.yaml_path), self._message(mistake))
                for mistake in mistakes
            }
        )

    def _message(self, mistake: Mistake) -> str:
        yaml_path = mistake.yaml_path[:-1] if mistake.about_key else mistake.yaml_path
        # `ray: 2.6` stands for `ray.version`: the path ends where the file does.
        while yaml_path and yaml_path not in self.lines:
            yaml_path = yaml_path[:-1]
        return f"{format_path(yaml_path)}: {mistake.text}" if yaml_path else mistake.text


class WrittenFloat(float):
    """A decimal number that keeps its spelling: `1.50` in `env` must reach the node as `1.50`."""

    text: str

    def __str__(self) -> str:
        return self.text


def parse_document(text: str, *, first_key: str = "cluster") -> Document:
    """Parse YAML; mistakes are part of the result.

    A file that is not YAML yields one mistake and no data.

    Args:
        text: the file's content.
        first_key: the first key of such files.
    """
    try:
        root = _compose_node(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return _unreadable_document(
            line, f"the character U+{ord(text[error.position]):04X} is not allowed in YAML"
        )
    except yaml.MarkedYAMLError as error:
        return _unreadable_document(_error_line(error), _syntax_message(error))
    except RecursionError:
        return _unreadable_document(1, f"nested more than {MAX_DEPTH} levels deep")
    except (ValueError, OverflowError) as error:  # an invalid \x or \U escape
        return _unreadable_document(1, f"not valid YAML: {type(error).__name__}")
    if root is None:
        return _unreadable_document(1, "the file is empty")
    return _convert_node(root, first_key)


def _compose_node(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
    finally:
        loader.dispose()
    return node


def _convert_node(root: yaml.Node, first_key: str) -> Document:
    reader = _NodeReader()
    try:
        data = reader.read_value(root, (), 0)
    except _TooLarge as error:
        return _unreadable_document(error.line, str(error))
    mistakes = reader.mistakes
    if not isinstance(data, dict):
        text = f"should be a mapping that starts with `{first_key}:`, not {describe_value(data)}"
        return Document(
            data=None, lines=reader.lines, mistakes=(*mistakes, Mistake(yaml_path=(), text=text))
        )
    return Document(data=data, lines=reader.lines, mistakes=tuple(mistakes))


def _unreadable_document(line: int, text: str) -> Document:
    return Document(data=None, lines={}, mistakes=(Mistake(yaml_path=(), text=text, line=line),))


def _error_line(error: yaml.MarkedYAMLError) -> int:
    mark = error.problem_mark or error.context_mark
    return mark.line + 1 if mark else 1


def _syntax_message(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "the file is unreadable"
    if "'\\t'" in problem:
        return "a tab is used for indentation; YAML needs spaces"
    if "single document" in (error.context or ""):
        return "should be one YAML document; remove the second `---`"
    if "<block end>, but found '<block" in problem and error.context_mark:
        start = f"the block that starts on line {error.context_mark.line + 1}"
        return f"not valid YAML: the indentation differs from that of {start}"
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
    # Without leading zero or plus sign: `007` may be a name or an environment value, and stays
    # text.
    ("int", r"^-?(?:0|[1-9][0-9]{0,17})$", _SIGNS_AND_DIGITS),
    ("float", r"^-?(?:0|[1-9][0-9]{0,17})?\.[0-9]{1,18}$", _SIGNS_AND_DIGITS),
    ("merge", r"^<<$", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _tag, re.compile(_pattern), _first)


class _TooLarge(Exception):
    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


@dataclass(slots=True)
class _NodeReader:
    """Walks the node graph once, collecting values, lines and mistakes."""

    lines: dict[YamlPath, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    value_count: int = 0

    def read_value(self, node: yaml.Node, yaml_path: YamlPath, depth: int) -> object:
        self._count_value(node, depth)
        self.lines.setdefault(yaml_path, _node_line(node))
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, yaml_path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [
                self.read_value(child, (*yaml_path, index), depth + 1)
                for index, child in enumerate(node.value)
            ]
        return self._read_scalar(node, yaml_path)

    def _read_mapping(
        self, node: yaml.MappingNode, yaml_path: YamlPath, depth: int
    ) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node, merged in self._merged_pairs(node, yaml_path, depth):
            if not isinstance(key_node, yaml.ScalarNode):
                self._add_mistake(
                    yaml_path, key_node, "a key should be one word, not a list or a mapping"
                )
                continue
            key = str(key_node.value)
            child_path = (*yaml_path, key)
            if key not in values:
                self.lines[child_path] = _node_line(key_node)
                values[key] = self.read_value(value_node, child_path, depth + 1)
            elif not merged:
                first = self.lines[child_path]
                self._add_mistake(
                    child_path, key_node, f"written twice; the first is on line {first}"
                )
        return values

    def _merged_pairs(
        self, node: yaml.MappingNode, yaml_path: YamlPath, depth: int
    ) -> Iterator[tuple[yaml.Node, yaml.Node, bool]]:
        """Yield keys, values, and True for merged ones, after those that override them."""
        merges: list[yaml.Node] = []
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                merges += value.value if isinstance(value, yaml.SequenceNode) else [value]
            else:
                yield key, value, False
        for source in merges:
            self._count_value(source, depth)
            if not isinstance(source, yaml.MappingNode):
                self._add_mistake(
                    yaml_path,
                    source,
                    "`<<` should be followed by an alias to a mapping, such as `*defaults`",
                )
                continue
            for key, value, _ in self._merged_pairs(source, yaml_path, depth + 1):
                self._count_value(key, depth)
                yield key, value, True

    def _read_scalar(self, node: yaml.Node, yaml_path: YamlPath) -> object:
        text, tag = str(node.value), str(node.tag).removeprefix(_TAG)
        try:
            if tag == "null":
                return None
            if tag == "bool":
                return {"true": True, "false": False}[text.lower()]
            if tag == "int":
                return int(text) if len(text) < _MAX_NUMBER_LENGTH else text
            if tag == "float":
                number = WrittenFloat(text)
                number.text = text
                return number
        except (KeyError, ValueError):
            tag = "?"
        if tag not in ("str", "merge"):
            self._add_mistake(
                yaml_path,
                node,
                f"the tag `{format_key(str(node.tag))}` is not supported; remove it",
            )
        return text

    def _count_value(self, node: yaml.Node, depth: int) -> None:
        self.value_count += 1
        if self.value_count > MAX_VALUES:
            raise _TooLarge(_node_line(node), f"more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise _TooLarge(_node_line(node), f"nested more than {MAX_DEPTH} levels deep")

    def _add_mistake(self, yaml_path: YamlPath, node: yaml.Node, text: str) -> None:
        self.mistakes.append(Mistake(yaml_path=yaml_path, text=text, line=_node_line(node)))


class UnusableFile(Exception):
    """A file that cannot be used, because of `line` if it is not UTF-8."""

    def __init__(self, text: str, *, line: int | None = None) -> None:
        super().__init__(text)
        self.line = line

    def describe(self, path: Path) -> str:
        """Return the reason, with the file and the line if there is one."""
        return str(self) if self.line is None else f"{path}:{self.line}: {self}"


def read_file(path: Path, *, max_bytes: int, kind: str) -> str:
    """Return the text of the file at `path`; raises UnusableFile.

    Args:
        path: any path; anything but a regular file is rejected unopened.
        max_bytes: maximum size of the file.
        kind: the file's name in messages, as in `too large for any inventory`.
    """
    try:
        if path.is_dir():
            raise UnusableFile("it is a directory; name the YAML file in it")
        if path.exists() and not path.is_file():
            raise UnusableFile("it is not a regular file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnusableFile(reason.lower()) from error
    if len(content) > max_bytes:
        raise UnusableFile(f"it is larger than {max_bytes // 1024} KiB, too large for any {kind}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        text = f"the byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise UnusableFile(text, line=line) from error


def _node_line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
