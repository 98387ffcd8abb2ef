"""A job from flags alone, and flags over a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.batch import flags
from launcher.batch.driver.job import Message, Prompt
from launcher.batch.refused import JobError
from launcher.batch.shape import Job

_LEAST: dict[str, Any] = {"model": "m", "input": ("data/chat.jsonl",), "output": "out"}


def _job(folder: Path, **said: Any) -> Job:
    return flags.job(_LEAST | said, folder)


def _told(folder: Path, **said: Any) -> list[str]:
    with pytest.raises(JobError) as caught:
        _job(folder, **said)
    return list(caught.value.mistakes)


def test_three_flags_are_enough(folder: Path) -> None:
    """Everything else has a default."""
    job = _job(folder)

    assert (job.mode, job.model, job.path, job.inside) == ("engine", "m", None, None)
    assert job.sources[0].text == str(folder / "data" / "chat.jsonl")
    assert (job.to.text, job.write.format) == (str(folder / "out"), "parquet")
    assert job.prompt == Prompt(column="prompt")


def test_every_flag_has_its_place(folder: Path) -> None:
    """Values of engine arguments are what they look like."""
    job = _job(
        folder,
        input=("data/chat.jsonl", "data/more.jsonl"),
        name="mine",
        format="jsonl",
        output_format="jsonl",
        id="id",
        limit=10,
        template="Q: {{ text }}",
        keep=("id",),
        max_tokens=7,
        temperature=0.0,
        tp=2,
        pp=3,
        replicas="1-2",
        batch_size=9,
        engine_arg=(
            "dtype=float32",
            "max-model-len=512",
            "enforce_eager=True",
            'hf_overrides={"a": [1.5]}',
            "revision=",
            "x=NaN",
            "y=none",
        ),
    )

    assert (job.name, len(job.sources), job.read.format, job.read.id, job.read.limit) == (
        "mine",
        2,
        "jsonl",
        "id",
        10,
    )
    assert (job.write.format, job.prompt, job.keep) == (
        "jsonl",
        Prompt(template="Q: {{ text }}"),
        {"id": None},
    )
    assert job.sampling == {"max_tokens": 7, "temperature": 0.0}
    engine = job.engine
    assert (engine.tp, engine.pp, engine.replicas, engine.batch_size) == (2, 3, (1, 2), 9)
    assert engine.args == {
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "hf_overrides": {"a": [1.5]},
        "revision": "",
        "x": "NaN",
        "y": None,
    }


def test_ranks_by_flag(folder: Path) -> None:
    """The mode follows."""
    job = _job(folder, data_parallel_size=2)

    assert job.data_parallel is not None
    assert (job.mode, job.data_parallel.size) == ("data-parallel", 2)


@pytest.mark.parametrize(
    ("said", "messages"),
    [
        (
            {"system": "S"},
            (Message(role="system", content="S"), Message(role="user", content="{{ prompt }}")),
        ),
        ({"chat": True, "column": "text"}, (Message(role="user", content="{{ text }}"),)),
        ({"chat": True, "template": "Q: {{ a }}"}, (Message(role="user", content="Q: {{ a }}"),)),
        ({"chat": True, "input": ("prompts.txt",)}, (Message(role="user", content="{{ text }}"),)),
        ({"chat": True, "format": "text"}, (Message(role="user", content="{{ text }}"),)),
    ],
)
def test_a_prompt_becomes_a_chat(
    folder: Path, said: dict[str, Any], messages: tuple[Message, ...]
) -> None:
    """With a system message, or without one."""
    prompt = _job(folder, **said).prompt

    assert prompt is not None
    assert (prompt.chat, prompt.column, prompt.template) == (messages, None, None)


def test_the_name_follows_from_what_is_done(folder: Path) -> None:
    """The same command is the same job, from any folder; how fast it runs makes no other one."""
    name = _job(folder).name
    same = flags.job(
        {"model": "m", "input": (str(folder / "data/chat.jsonl"),), "output": str(folder / "out")},
        Path("/"),
    )

    assert name.startswith("chat-")
    assert len(name) == len("chat-") + 8
    assert {
        same.name,
        _job(folder, tp=2, replicas="2", engine_arg=("max_model_len=512",)).name,
    } == {name}
    others = [
        {"max_tokens": 5},
        {"output": "out2"},
        {"input": ("data/more.jsonl",)},
        {"model": "n"},
        {"limit": 5},
    ]
    assert len({name, *(_job(folder, **other).name for other in others)}) == 1 + len(others)


def test_what_is_missing_is_told_by_its_flag(folder: Path) -> None:
    """All of it, and once."""
    with pytest.raises(JobError) as caught:
        flags.job({}, folder)

    assert str(caught.value) == "3 mistakes in the flags"
    assert caught.value.mistakes == (
        "--model: is missing: Model that answers",
        "--input: is missing: Where rows come from",
        "--output: is missing: Folder of the answers",
    )
    assert "--help" in caught.value.hint


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            {"model": "m;x"},
            (
                "--model: should be a model such as Qwen/Qwen3-8B, or a path inside the container,"
                ' not "m;x"'
            ),
        ),
        ({"input": ("none.jsonl",)}, "--input: names no file: there is no HERE/none.jsonl"),
        (
            {"input": ("data", "prompts.txt")},
            '--input: should all have one format: "chat.jsonl" is jsonl, "prompts.txt" is text',
        ),
        (
            {"output": "out.jsonl"},
            (
                "--output: should be a folder, for answers are written as several files, not"
                ' "out.jsonl"'
            ),
        ),
        ({"format": "xml"}, '--format: should be text, jsonl, csv or parquet, not "xml"'),
        ({"output_format": "csv"}, '--output-format: should be parquet or jsonl, not "csv"'),
        ({"limit": 0}, "--limit: should be at least 1, not 0"),
        (
            {"name": "A B"},
            (
                "--name: should be a name of at most 40 lower-case letters, digits, `-`, `_` and"
                ' `.`, not "A B"'
            ),
        ),
        ({"column": "a", "template": "{{ b }}"}, "--template: should be left out with --column"),
        ({"system": "S", "chat": True}, "--chat: should be left out with --system"),
        (
            {"chat": True, "column": "a b"},
            (
                '--column: "a b" should be written with --template beside --chat, which makes a'
                " template"
            ),
        ),
        ({"template": "{{"}, "--template: is no template: unexpected 'end of template'"),
        ({"system": "{% x"}, "--system: is no template: Encountered unknown tag 'x'"),
        (
            {"chat": True, "template": "{{"},
            "--template: is no template: unexpected 'end of template'",
        ),
        ({"max_tokens": 0}, "--max-tokens: should be at least 1, not 0"),
        ({"temperature": -1.0}, "--temperature: should be at least 0, not -1.0"),
        ({"replicas": "3-1"}, "--replicas: should have the least first: 1 to 3, not 3 to 1"),
        (
            {"replicas": "2", "data_parallel_size": 2},
            (
                "--replicas: should be left out with `mode: data-parallel`: `data_parallel.size` is"
                " its place"
            ),
        ),
        (
            {"keep": ("answer",)},
            (
                "--keep: should not name `answer`, which the job writes itself; call it something"
                " else in the input"
            ),
        ),
        ({"engine_arg": ("x",)}, '--engine-arg: should be NAME=VALUE, not "x"'),
        ({"engine_arg": ("x=1", "x=2")}, '--engine-arg: should name "x" once'),
        (
            {"engine_arg": ("model=x",)},
            "--engine-arg model: should be left out: write `model` at the top level",
        ),
        (
            {"engine_arg": ("x=hf_0123456789abcdef0123",)},
            "--engine-arg x: a secret should not be written here; use `secrets` in the inventory",
        ),
    ],
)
def test_a_mistake_names_the_flag(folder: Path, said: dict[str, Any], told: str) -> None:
    """And nothing of files and lines, for there are none."""
    assert [line.replace(str(folder), "HERE") for line in _told(folder, **said)] == [told]


def _over(folder: Path, more: str = "", **said: Any) -> Job:
    path = folder / "job.yaml"
    path.write_text(f"model: m\nread: data/chat.jsonl\nwrite: out\n{more}\n")
    return flags.over(path, said)


def test_flags_over_a_file_say_how_it_runs(folder: Path) -> None:
    """An argument by any spelling replaces the file's."""
    job = _over(
        folder,
        "engine: {tp: 4, args: {max-model-len: 1, dtype: half}}",
        tp=2,
        replicas="3",
        engine_arg=("max_model_len=2",),
    )

    assert (job.name, job.path, job.engine.tp, job.engine.replicas) == (
        "job",
        folder / "job.yaml",
        2,
        (3, 3),
    )
    assert job.engine.args == {"dtype": "half", "max_model_len": 2}


def test_flags_over_a_class_are_about_its_replicas(folder: Path) -> None:
    """In its short form, too."""
    path = folder / "job.yaml"
    path.write_text("read: data/chat.jsonl\nwrite: out\npredict: mine.py:Mine\n")

    job = flags.over(path, {"replicas": "1-3", "batch_size": 8})

    assert job.predict is not None
    assert (job.predict.target, job.predict.replicas, job.predict.batch_size) == (
        "mine:Mine",
        (1, 3),
        8,
    )


def test_what_a_job_means_stays_in_its_file(folder: Path) -> None:
    """Mistakes in the file and in the flags are told together."""
    with pytest.raises(JobError) as caught:
        _over(folder, "keep: [row]", model="n", max_tokens=5, tp=0)

    assert [line.replace(str(folder), "HERE") for line in caught.value.mistakes] == [
        (
            "HERE/job.yaml:4: keep: should not name `row`, which the job writes itself; call it"
            " something else in the input"
        ),
        "--model: cannot be combined with a job file; change it in job.yaml, or leave the file out",
        (
            "--max-tokens: cannot be combined with a job file; change it in job.yaml, or leave the"
            " file out"
        ),
        "--tp: should be at least 1, not 0",
    ]


def test_flags_that_do_not_suit_the_file_are_told_by_the_flag(folder: Path) -> None:
    """`--tp` says nothing to a class, and ranks have no replicas."""
    with pytest.raises(JobError) as caught:
        _over(folder, "data_parallel: 2", replicas="2")

    assert caught.value.mistakes == (
        (
            "--replicas: should be left out with `mode: data-parallel`: `data_parallel.size` is its"
            " place"
        ),
    )
    path = folder / "job.yaml"
    path.write_text("read: data/chat.jsonl\nwrite: out\npredict: mine.py:Mine\n")
    with pytest.raises(JobError) as caught:
        flags.over(path, {"tp": 2})
    assert caught.value.mistakes == (
        (
            "--tp: should be left out with `predict`: the class knows its model; give it what it"
            " needs in `predict.args`"
        ),
    )


@pytest.mark.parametrize(
    "content", ["", "- a", "engine: 5", "engine: [a]", "read: 5\nengine: {args: 5}"]
)
def test_flags_over_a_broken_file_give_its_mistakes(folder: Path, content: str) -> None:
    """And nothing else."""
    path = folder / "job.yaml"
    path.write_text(content)

    with pytest.raises(JobError):
        flags.over(path, {"tp": 2, "engine_arg": ("a=1",)})
