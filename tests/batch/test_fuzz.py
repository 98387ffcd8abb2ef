"""Whatever a job file holds, loading gives a job or JobError, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.batch.load import load, loads
from launcher.batch.refused import JobError
from launcher.batch.schema import JobFile
from launcher.batch.shape import Job

_EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
_KEYS = sorted(
    {
        *JobFile.known(),
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
    }
)
_quick = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=True,
)

_words = st.sampled_from(
    ["data/*.jsonl", "nodes:/a", "s3://b", "../x", "{{ a }}", "{% for", "a.py:B", "1-2", "*", "[", "~/x", "/", "user", "a\0b"]
)
_scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), _words)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.sampled_from(_KEYS), st.text(max_size=8)), inner, max_size=4)
    ),
    max_leaves=12,
)


def _load(text: str, folder: Path) -> None:
    try:
        job = loads(text, folder / "fuzz.yaml")
    except JobError as error:
        assert error.mistakes
        for line in error.mistakes:
            assert line.startswith(f"{folder}/fuzz.yaml:")
            assert len(line.splitlines()) == 1
            line.encode()  # what is told can be printed
    else:
        assert isinstance(job, Job)


@_quick
@given(content=st.binary(max_size=300))
def test_arbitrary_bytes(folder: Path, content: bytes) -> None:
    """Anything at all."""
    path = folder / "fuzz.yaml"
    path.write_bytes(content)
    try:
        assert isinstance(load(path), Job)
    except JobError as error:
        assert all(len(line.splitlines()) == 1 for line in error.mistakes)


@_quick
@given(text=st.text(alphabet="{}[]:,-&*!|>'\"%@`#?<= \n\tab01", max_size=200))
def test_text_of_yamls_own_characters(folder: Path, text: str) -> None:
    """Anything that may trip the parser."""
    _load(text, folder)


@_quick
@given(data=st.dictionaries(st.sampled_from(_KEYS), _values, max_size=8))
def test_known_keys_with_arbitrary_values(folder: Path, data: dict[str, object]) -> None:
    """Anything where something else belongs."""
    _load(yaml.safe_dump(data, allow_unicode=True), folder)


@_quick
@given(section=st.sampled_from(sorted(JobFile.known())), value=_values)
def test_a_good_job_with_one_arbitrary_section(folder: Path, section: str, value: object) -> None:
    """The rules run on what is left."""
    good = {"model": "m", "read": "data/chat.jsonl", "write": "out", "prompt": "{{ a }}"}
    _load(yaml.safe_dump(good | {section: value}, allow_unicode=True), folder)


@_quick
@given(template=st.one_of(st.text(max_size=60), st.text(alphabet="{}%()|'\" abi_.9*-\n#", max_size=60)))
def test_arbitrary_templates(folder: Path, template: str) -> None:
    """What Jinja says of one is told in one line."""
    _load(yaml.safe_dump({"model": "m", "read": "data/chat.jsonl", "write": "out", "prompt": template}), folder)


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_examples_with_lines_and_characters_changed(folder: Path, path: Path) -> None:
    """Near the truth is where mistakes are made."""
    chance = random.Random(7)
    text = path.read_text(encoding="utf-8")
    for _ in range(25):
        lines = text.splitlines()
        at = chance.randrange(len(lines))
        change = chance.randrange(4)
        if change == 0:
            del lines[at]
        elif change == 1:
            lines.insert(at, lines[chance.randrange(len(lines))])
        elif change == 2:
            lines[at] = lines[at].replace(":", chance.choice(["", ": :", ": [", ": !x", ": &a"]))
        else:
            middle = chance.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:middle] + chance.choice("{}[]:,-&*!\t\"'\x00é") + lines[at][middle + 1 :]
        _load("\n".join(lines), folder)
