"""Templates are judged without running them."""

from __future__ import annotations

import pytest

from launcher.batch import templates


@pytest.mark.parametrize(
    "template",
    [
        "{{ text }}",
        "{% for one in items %}{{ loop.index }}. {{ one | upper }}\n{% endfor %}",
        "{% if a is defined %}{{ a }}{% else %}{{ b['c d'] }}{% endif %}",
        "{% macro m(x) %}{{ x }}{% endmacro %}{{ m(text) }}",
    ],
)
def test_what_jinja_offers_over_a_row_is_fine(template: str) -> None:
    """Loops, conditions, filters, macros."""
    assert templates.mistakes(template) == []


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (
            "{{ text",
            "is no template: unexpected end of template, expected 'end of print statement'",
        ),
        (
            "a\nb\n{% for %}",
            (
                "is no template: Expected an expression, got 'end of statement block' (line 3 of"
                " the template)"
            ),
        ),
        ("{% include '/etc/passwd' %}", "cannot read other files: `include` is not available"),
        ("{% import 'x' as y %}", "cannot read other files: `import` is not available"),
        ("{% from 'x' import y %}", "cannot read other files: `from … import` is not available"),
        ("{% extends 'x' %}", "cannot read other files: `extends` is not available"),
        (
            "{{ ''.__class__.__mro__ }}",
            "cannot reach `__class__`: a template sees values, not Python",
        ),
        ("{{ a | uper }}", "names no filter `uper`; did you mean `upper`?"),
        ("{{ a is nmber }}", "names no test `nmber`; did you mean `number`?"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(template: str, told: str) -> None:
    """In Jinja's words where they are about syntax."""
    assert told in templates.mistakes(template)


def test_all_mistakes_of_a_template_are_told_at_once() -> None:
    """In the order of its lines."""
    assert templates.mistakes("{{ a|x }}\n{{ a|y }}\n{% include 'z' %}") == [
        "names no filter `x` (line 1 of the template)",
        "names no filter `y` (line 2 of the template)",
        "cannot read other files: `include` is not available (line 3 of the template)",
    ]


@pytest.mark.parametrize(
    "template", ["{{ 9**9**9**9 }}", "{{ 'a' * 10**12 }}", "{{ 'a'|center(10**12) }}{{ b }}"]
)
def test_nothing_is_computed(template: str) -> None:
    """Compiling would compute constants already, for ever or until the memory is full."""
    assert templates.mistakes(template) == []


@pytest.mark.parametrize(
    "template",
    ["{{ " + "(" * 100_000 + "a", "{{ " + "-" * 50_000 + "a }}", "{{ " + "9" * 10_000 + " }}"],
)
def test_a_template_that_is_too_deep_is_told(template: str) -> None:
    """Python's stack and its longest number have an end."""
    (told,) = templates.mistakes(template)

    assert told.startswith("is n")
    assert templates.columns(template) == set()


@pytest.mark.parametrize(
    ("template", "columns"),
    [
        ("{{ a }} {{ b.c }} {{ d['e'] }}", {"a", "b", "d"}),
        ("{% for x in xs %}{{ x }}{{ loop.index }}{% endfor %}", {"xs"}),
        ("{% set a = 1 %}{{ a }}{{ range(3) }}", set()),
        ("plain", set()),
    ],
)
def test_the_columns_that_a_template_names(template: str, columns: set[str]) -> None:
    """Without what it makes itself, and what Jinja gives it."""
    assert templates.columns(template) == columns
