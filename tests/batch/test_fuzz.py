"""Any job file: loading gives a job or JobError."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.batch.checked_job import CheckedJob, JobError
from launcher.batch.flags import job_from_file
from launcher.batch.job import Job
from launcher.inventory.schema import fields_of
from tests import fuzz

_EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
_INNER_KEYS = [
    "paths",
    "template",
    "chat",
    "column",
    "role",
    "content",
    "args",
    "replicas",
    "class",
    "size",
    "files",
    "<<",
]
_KEYS = sorted({*fields_of(Job), *_INNER_KEYS})
_values = fuzz.values(
    _KEYS,
    [
        "data/*.jsonl",
        "nodes:/a",
        "s3://b",
        "../x",
        "{{ a }}",
        "{% for",
        "a.py:B",
        "1-2",
        "*",
        "[",
        "~/x",
        "/",
        "user",
        "a\0b",
    ],
)


def _load(text: str, folder: Path) -> None:
    path = folder / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        job = job_from_file(path, {})
    except JobError as error:
        fuzz.check(error.mistakes, f"{folder}/fuzz.yaml")
    else:
        assert isinstance(job, CheckedJob)


@fuzz.quick
@given(content=st.binary(max_size=300))
def test_arbitrary_bytes(folder: Path, content: bytes) -> None:
    """Any content."""
    path = folder / "fuzz.yaml"
    path.write_bytes(content)
    try:
        assert isinstance(job_from_file(path, {}), CheckedJob)
    except JobError as error:
        assert all(len(line.splitlines()) == 1 for line in error.mistakes)


@fuzz.quick
@given(text=fuzz.yamls_own)
def test_text_of_yamls_own_characters(folder: Path, text: str) -> None:
    """Difficult for the parser."""
    _load(text, folder)


@fuzz.quick
@given(data=st.dictionaries(st.sampled_from(_KEYS), _values, max_size=8))
def test_valid_keys_with_arbitrary_values(folder: Path, data: dict[str, object]) -> None:
    """With values of other types."""
    _load(yaml.safe_dump(data, allow_unicode=True), folder)


@fuzz.quick
@given(section=st.sampled_from(sorted(fields_of(Job))), value=_values)
def test_a_valid_job_with_an_arbitrary_section(folder: Path, section: str, value: object) -> None:
    """The rules run on the rest."""
    good = {"model": "m", "read": "data/chat.jsonl", "write": "out", "prompt": "{{ a }}"}
    _load(yaml.safe_dump(good | {section: value}, allow_unicode=True), folder)


@fuzz.quick
@given(
    template=st.one_of(st.text(max_size=60), st.text(alphabet="{}%()|'\" abi_.9*-\n#", max_size=60))
)
def test_arbitrary_templates(folder: Path, template: str) -> None:
    """Jinja's errors are reported in a single line."""
    _load(
        yaml.safe_dump(
            {"model": "m", "read": "data/chat.jsonl", "write": "out", "prompt": template}
        ),
        folder,
    )


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_examples_with_lines_and_characters_changed(folder: Path, path: Path) -> None:
    """Nearly valid files are the most common mistakes."""
    for text in fuzz.near(path.read_text(encoding="utf-8")):
        _load(text, folder)
