"""What is wrong with a prompt's template, found without running any of it.

Only parsing is safe here: compiling would already compute constant expressions such as `9**9**9`.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import TemplateSyntaxError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from launcher.inventory.mistakes import did_you_mean, name

_ENVIRONMENT = ImmutableSandboxedEnvironment()
_OTHER_FILES = {
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "from … import",
    nodes.Extends: "extends",
}
_OWN_NAMES = {"loop", "self", "caller", "varargs", "kwargs", *_ENVIRONMENT.globals}


def mistakes(template: str) -> list[str]:
    """Return what is wrong, each with its line in the template."""
    try:
        found = sorted(set(_wrong(_ENVIRONMENT.parse(template))))
    except TemplateSyntaxError as error:
        return [
            _at(
                template,
                error.lineno,
                f"is no template: {_clean(error.message or 'it cannot be read')}",
            )
        ]
    except (RecursionError, ValueError, OverflowError, MemoryError):
        return ["is nested too deep, or has a number that is too long"]
    return [_at(template, line, text) for line, text in found]


def columns(template: str) -> set[str]:
    """Return the names that a row must have a column for; of a template with mistakes, none."""
    try:
        tree = _ENVIRONMENT.parse(template)
        names = list(tree.find_all(nodes.Name))
    except (TemplateSyntaxError, RecursionError, ValueError, OverflowError, MemoryError):
        return set()
    made = {one.name for one in names if one.ctx != "load"}
    return {one.name for one in names if one.ctx == "load"} - made - _OWN_NAMES


def _wrong(tree: nodes.Template) -> Iterator[tuple[int, str]]:
    for node in tree.find_all(tuple(_OTHER_FILES)):
        yield node.lineno, f"cannot read other files: `{_OTHER_FILES[type(node)]}` is not available"
    for attribute in tree.find_all(nodes.Getattr):
        if attribute.attr.startswith("_"):
            yield (
                attribute.lineno,
                f"cannot reach `{name(attribute.attr)}`: a template sees values, not Python",
            )
    for used in tree.find_all(nodes.Filter):
        if used.name not in _ENVIRONMENT.filters:
            yield (
                used.lineno,
                (
                    "names no filter"
                    f" `{name(used.name)}`{did_you_mean(used.name, _ENVIRONMENT.filters)}"
                ),
            )
    for test in tree.find_all(nodes.Test):
        if test.name not in _ENVIRONMENT.tests:
            yield (
                test.lineno,
                f"names no test `{name(test.name)}`{did_you_mean(test.name, _ENVIRONMENT.tests)}",
            )


def _at(template: str, line: int, text: str) -> str:
    return f"{text} (line {line} of the template)" if "\n" in template.strip() else text


def _clean(text: str) -> str:
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return words[:200].rstrip(".")
