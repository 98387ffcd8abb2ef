"""Field descriptions for editors and `--help`: the string below a dataclass field."""

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache


def field_descriptions(cls: type) -> dict[str, str]:
    """Return the descriptions of a dataclass's own and inherited fields, as one line each."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        texts |= _class_fields(base.__module__).get(base.__name__, {})
    return texts


@cache
def _class_fields(name: str) -> Mapping[str, Mapping[str, str]]:
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    return {node.name: _fields(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _fields(node: ast.ClassDef) -> dict[str, str]:
    texts = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts
