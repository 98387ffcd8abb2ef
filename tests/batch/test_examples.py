"""The jobs in `examples/`: they load, editors accept them, and reference.yaml has every key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from launcher.batch.flags import job_from_file, parse_job_file
from launcher.batch.job import Job
from launcher.inventory.partial_validation import validate_parts
from launcher.inventory.schema import fields_of, sections_in

_ROOT = Path(__file__).parents[2]
_EXAMPLES = sorted((_ROOT / "examples").glob("*.yaml"))
_FIRST_LINE = "# yaml-language-server: $schema="


def _whole() -> str:
    """Return the reference with its alternatives, which are commented out without a space."""
    text = (_ROOT / "examples" / "reference.yaml").read_text(encoding="utf-8")
    return re.sub(r"^( *)#(?=[a-z])", r"\1", text, flags=re.MULTILINE)


def test_every_kind_of_job_has_an_example() -> None:
    """As a starting point."""
    expected = {
        "reference",
        "chat",
        "text-generation",
        "torch-module",
        "preprocess",
        "data-parallel",
    }

    assert expected <= {path.stem for path in _EXAMPLES}


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_an_example_loads(path: Path) -> None:
    """Without editing and without `--allow`."""
    job = job_from_file(path, {})

    assert job.name == path.stem
    assert job.sources


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_editors_accept_an_example(path: Path) -> None:
    """The schema in its first line exists and accepts it."""
    text = path.read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first.startswith(_FIRST_LINE)
    schema = json.loads((path.parent / first.removeprefix(_FIRST_LINE)).read_text(encoding="utf-8"))

    jsonschema.validate(parse_job_file(text).data, schema, cls=jsonschema.Draft202012Validator)


def test_the_reference_shows_every_key() -> None:
    """At its own path, not only by name."""
    shown = {
        tuple(step for step in where if not isinstance(step, int))
        for where in parse_job_file(_whole()).lines
    }

    assert [".".join(key) for key in _keys(Job) if key not in shown] == []


def test_every_value_of_the_reference_is_valid() -> None:
    """Alternatives included."""
    whole = parse_job_file(_whole())
    assert whole.mistakes == ()

    _, mistakes = validate_parts(whole.data, Job, lambda where: None)
    assert mistakes == []


def test_the_reference_states_the_defaults() -> None:
    """Values that the file calls defaults."""
    text = _whole()
    document = parse_job_file(text)
    called = {
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if re.search(r"\S:\s.*\(default\)$", line)
    }
    file, _ = validate_parts(document.data, Job, lambda where: None)

    count = 0
    for where, line in document.lines.items():
        if line in called and where and not isinstance(where[-1], int):
            section: Any = file
            for step in where[:-1]:
                section = getattr(section, str(step))
            default = type(section).__dataclass_fields__[str(where[-1])].default
            assert (where, getattr(section, str(where[-1]))) == (where, default)
            count += 1
    assert count == len(called) >= 12


def _keys(section: type[Any]) -> Iterator[tuple[str, ...]]:
    for name, field in fields_of(section).items():
        yield (name,)
        for inner in sections_in(field.annotation):
            yield from ((name, *key) for key in _keys(inner))
