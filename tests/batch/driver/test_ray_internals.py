"""Private parts of Ray used by the driver: all are listed, and read correctly."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import launcher
from launcher.batch.driver import ray_internals

LAUNCHER = Path(launcher.__file__).parent
ADAPTER = LAUNCHER / "batch" / "driver" / "ray_internals.py"
# Without vLLM's plugin for CPUs, which replaces classes of vLLM.
OTHERS = [
    path
    for folder in ("agent", "batch/driver", "distribute/node", "hosts/node", "network/probe")
    for path in sorted((LAUNCHER / folder).glob("*.py"))
    if path != ADAPTER
]
# vLLM's documented imports.
VLLM = ("vllm", "vllm.lora.request", "vllm.sampling_params")
OWN = ("self", "os")  # their private names are ours, or documented: `os._exit`


def _private(name: str) -> bool:
    """Return whether a dotted name has a private part."""
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def _dotted(node: ast.AST) -> str:
    """Return `a.b.c` as written; other expressions are `?`."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id
    return node.id if isinstance(node, ast.Name) else "?"


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _reached(tree: ast.AST) -> Iterator[str]:
    """Yield the longest dotted names with private parts of another package."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = _dotted(node)
            if _private(".".join(name.split(".")[2 if name.startswith(OWN) else 1 :])):
                yield name


def _named(tree: ast.AST) -> set[str]:
    """Return the private or undocumented names among imports and quoted names."""
    imports = {name for name in _imported(tree) if name.split(".")[0] in ("ray", "vllm")}
    undocumented = {
        name
        for name in imports
        if name.startswith("vllm") and name not in VLLM and name.rpartition(".")[0] not in VLLM
    }
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(("ray.", "vllm.", "node:"))
        and ("._" in node.value or ":_" in node.value)
    }
    return {name for name in imports if _private(name)} | undocumented | texts


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(LAUNCHER)))
def test_only_the_adapter_uses_private_names(path: Path) -> None:
    """A new version of Ray or vLLM breaks one module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert _named(tree) == set()
    if path.parent == ADAPTER.parent:  # other modules do not pass objects of Ray or vLLM around
        assert set(_reached(tree)) == set()


@pytest.mark.parametrize(
    ("line", "result"),
    [
        ("import ray._private.worker", {"ray._private.worker"}),
        ("from ray.data._internal.plan import x", {"ray.data._internal.plan.x"}),
        ("from vllm.v1.engine import core", {"vllm.v1.engine.core"}),
        ("from vllm import LLM", set()),
        ("from vllm.sampling_params import RequestOutputKind", set()),
        ("ray._private.state.x()", {"ray._private.state.x"}),
        ("data._logical_plan.dag", {"data._logical_plan.dag"}),
        ("self.llm._engine.step", {"self.llm._engine.step"}),
        ("self._mine(os._exit, ray.__version__)", set()),
        ("x = 'ray._private.worker'", {"ray._private.worker"}),
    ],
)
def test_the_scan_detects_private_names(line: str, result: set[str]) -> None:
    """In an import, an attribute, and a quoted name."""
    tree = ast.parse(line)
    assert _named(tree) | set(_reached(tree)) == result


def test_the_adapter_lists_all_private_names() -> None:
    """`USED` is the checklist for a new Ray: complete, without extra entries."""
    tree = ast.parse(ADAPTER.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not _lists_them(node)]
    overridden = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef) and _private(node.name)
    }
    result = _named(tree) | set(_reached(tree)) | overridden

    assert {_last(name) for name in result} == {_last(name) for name in ray_internals.USED}
    assert {name for name in result if name.startswith("ray.")} <= set(ray_internals.USED)


def _lists_them(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and _dotted(node.targets[0]) == "USED"


def _last(name: str) -> str:
    """Return a name from its last private part on."""
    parts = name.split(".")
    at = max(index for index, part in enumerate(parts) if _private(part) or ":_" in part)
    return ".".join(parts[at : at + 1] if parts[0] != "ray" else parts[at:])


class Context:
    """A message of Ray's protocol; an unset one has no bytes."""

    def __init__(self, **options: str) -> None:
        self.__dict__ |= options

    def ByteSize(self) -> int:
        return len(self.__dict__)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (None, ""),
        (SimpleNamespace(actor_died_error_context=Context()), ""),
        (
            SimpleNamespace(
                actor_died_error_context=Context(),
                oom_context=Context(error_message="the node ran\n  out of memory"),
            ),
            "the node ran out of memory",
        ),
        (
            SimpleNamespace(
                creation_task_failure_context=Context(formatted_exception_string="ValueError: no")
            ),
            "ValueError: no",
        ),
    ],
)
def test_an_actors_death_reason_is_a_single_line(cause: Any, expected: str) -> None:
    """For all of Ray's contexts."""
    assert ray_internals.death_reason(cause) == expected


def test_a_steps_claims_are_set() -> None:
    """A newer Ray with another kind of step claims its defaults."""
    last = SimpleNamespace(ray_remote_args={"num_cpus": 1}, compute=None)
    other = SimpleNamespace()
    for step in (last, other):
        result = SimpleNamespace(_logical_plan=SimpleNamespace(dag=step))
        ray_internals.set_claims(result, "two tasks", num_cpus=0)

    assert (last.ray_remote_args, last.compute) == ({"num_cpus": 0}, "two tasks")
    assert vars(other) == {}
