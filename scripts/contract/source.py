"""Index of a program's source: texts, flags, metrics, names and routes, from syntax trees and
binaries.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

HOLE = "{}"  # in texts: a value that the program inserts
_PERCENT = re.compile(r"%(?:\(\w+\))?[-+ #0]*\d*(?:\.\d+)?[sdrfxigc]")
_BRACES = re.compile(r"\{[^{}\n]*\}")
_PRINTABLE = re.compile(rb"[\t\x20-\x7e]{6,}")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_LINE_END = re.compile(r"\\\n\s*")
_OPTION_CALLS = ("add_argument", "option", "add_option", "argument")
# Whose fields vLLM turns into options in a loop; those of EngineArgs are added by name.
_OPTION_CLASSES = re.compile(r"(?:Base)?FrontendArgs")
_SCHEME = 4  # increase it if the index of the same files would change


class Source:
    """Index of the source below a folder.

    Attributes:
        texts: string literals by file, without docstrings; values in them are `{}`.
        arguments: strings that are arguments of calls by file: names of metrics, routes, variables.
        flags: command-line options by file.
        names: qualified names that a file defines, such as `LLM.generate`, and the defaults of
            fields (`CacheConfig.block_size = 16`).
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.texts: dict[str, list[str]] = {}
        self.arguments: dict[str, list[str]] = {}
        self.flags: dict[str, list[str]] = {}
        self.names: dict[str, list[str]] = {}
        for path in sorted(root.rglob("*")):
            file = path.relative_to(root).as_posix()
            if path.suffix == ".py":
                self._add_python(file, path.read_text(encoding="utf-8"))
            elif path.suffix == ".rs":
                self.texts[file] = list(_quoted_texts(path.read_text(encoding="utf-8")))
            elif path.is_file() and path.suffix != ".yaml":
                self.texts[file] = list(_binary_texts(path.read_bytes()))

    def _add_python(self, file: str, text: str) -> None:
        visitor = _Visitor()
        visitor.visit(ast.parse(text))
        self.texts[file] = visitor.texts
        self.arguments[file] = visitor.arguments
        self.flags[file] = visitor.flags
        self.names[file] = visitor.names

    def to_json(self) -> str:
        """Return the index as JSON."""
        parts = [self.texts, self.arguments, self.flags, self.names]
        return json.dumps({"scheme": _SCHEME, "parts": parts})

    @classmethod
    def load(cls, root: Path, cache: Path | None = None) -> Source:
        """Return the index of a folder, from a cache if it has one."""
        if cache is not None and cache.exists():
            data = json.loads(cache.read_text())
            if data["scheme"] == _SCHEME:
                source = cls.__new__(cls)
                source.root = root
                source.texts, source.arguments, source.flags, source.names = data["parts"]
                return source
        source = cls(root)
        if cache is not None:
            cache.write_text(source.to_json())
        return source

    def find_pattern(self, pattern: str) -> list[str]:
        """Return the files with a text that a pattern matches if its values are 1."""
        corpus, files, starts = self._corpus
        matching_files = dict[str, None]()
        for match in re.finditer(pattern, corpus, re.MULTILINE):
            matching_files[files[bisect_right(starts, match.start()) - 1]] = None
        return list(matching_files)

    def find_text(self, text: str) -> list[str]:
        """Return the files with a text; `{}` stands for values, whose parts a binary may hold
        separately.
        """
        parts = [part for part in text.split(HOLE) if part.strip()]
        return [
            file
            for file, texts in self.texts.items()
            if any(text in candidate for candidate in texts)
            or (
                not file.endswith(".py")
                and all(any(part in candidate for candidate in texts) for part in parts)
            )
        ]

    @cached_property
    def _corpus(self) -> tuple[str, list[str], list[int]]:
        """All texts, one a line, and the file of each position."""
        parts, files, starts, position = list[str](), list[str](), list[int](), 0
        for file, texts in self.texts.items():
            block = "\n".join(texts).replace(HOLE, "1") + "\n"
            files.append(file)
            starts.append(position)
            parts.append(block)
            position += len(block)
        return "".join(parts), files, starts


class _Visitor(ast.NodeVisitor):
    def __init__(self) -> None:
        self.texts = list[str]()
        self.arguments = list[str]()
        self.flags = list[str]()
        self.names = list[str]()
        self._scope = list[str]()

    def _define(self, name: str) -> None:
        self.names.append(".".join((*self._scope, name)))

    def _visit_scope(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._define(node.name)
        self._scope.append(node.name)
        if isinstance(node, ast.ClassDef) and _OPTION_CLASSES.fullmatch(node.name):
            self.flags += [
                f"--{item.target.id.replace('_', '-')}"
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
        self.generic_visit(node)
        self._scope.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Record a class, and the flags that its fields become."""
        self._visit_scope(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Record a function."""
        self._visit_scope(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Record a function."""
        self._visit_scope(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Record a name that is assigned."""
        if isinstance(node.ctx, ast.Store):
            self._define(node.id)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Record the default of a field, also of pydantic's `Field(default=…)`."""
        value = node.value
        if isinstance(value, ast.Call):
            defaults = [
                *value.args,
                *(keyword.value for keyword in value.keywords if keyword.arg == "default"),
            ]
            value = defaults[0] if defaults else None
        if isinstance(node.target, ast.Name) and isinstance(value, ast.Constant):
            self._define(f"{node.target.id} = {value.value}")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Record an attribute of `self` that is assigned, as of its class."""
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            self.names.append(".".join((*self._scope[:-1], node.attr)))
        self.generic_visit(node)

    def visit_alias(self, node: ast.alias) -> None:
        """Record an imported name."""
        self._define((node.asname or node.name).partition(".")[0])

    def visit_arg(self, node: ast.arg) -> None:
        """Record a parameter, as of its function."""
        self._define(node.arg)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Leave out docstrings."""
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Record texts that are arguments, and flags."""
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        texts = [text for argument in arguments if (text := _text(argument)) is not None]
        self.arguments += texts
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in _OPTION_CALLS:
            self.flags += [
                flag for text in texts for flag in text.split("/") if text.startswith("-")
            ]
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Record a text that is put together with `+` or `%`."""
        if (text := _text(node)) is not None:
            self.texts.append(text)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Record a text with values."""
        self.texts.append(_text(node) or "")
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Record a text."""
        if isinstance(node.value, str):
            self.texts.append(_with_holes(node.value))


def _text(node: ast.AST) -> str | None:
    """Return the text of an expression with `{}` for its values; None if it is none."""
    match node:
        case ast.Constant(value=str(text)):
            return _with_holes(text)
        case ast.JoinedStr(values=values):
            return "".join(
                str(part.value) if isinstance(part, ast.Constant) else HOLE for part in values
            )
        case ast.BinOp(op=ast.Mod(), left=left):
            return _text(left)
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            return _text(template)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            parts = _text(left), _text(right)
            if parts == (None, None):
                return None
            return "".join(HOLE if part is None else part for part in parts)
    return None


def _with_holes(text: str) -> str:
    return _PERCENT.sub(HOLE, _BRACES.sub(HOLE, text))


def _quoted_texts(text: str) -> Iterator[str]:
    for match in _QUOTED.finditer(text):
        yield _with_holes(_LINE_END.sub("", match[1]))


def _binary_texts(data: bytes) -> Iterable[str]:
    """Return the printable strings of a binary, without mangled names."""
    texts = (match[0].decode() for match in _PRINTABLE.finditer(data))
    return dict.fromkeys(_with_holes(text) for text in texts if not text.startswith("_Z"))
