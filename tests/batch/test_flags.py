"""A job from flags alone, and flags over a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.batch import flags
from launcher.batch.checked_job import CheckedJob, JobError
from launcher.batch.flags import job_from_file, job_name
from launcher.batch.job import Limits, Message, Prompt, Sampling

_LEAST: dict[str, Any] = {"model": "m", "input": ("data/chat.jsonl",), "output": "out"}
GOOD = """\
model: Qwen/Qwen3-8B
read: data/chat.jsonl
prompt:
  chat:
    - {role: system, content: Be brief.}
    - {role: user, content: "{{ text }}"}
sampling: {temperature: 0, max_tokens: 64}
keep: [id]
engine:
  replicas: 1-2
  placement: STRICT_PACK
  args: {--max-model-len: 4096, gpu_memory_utilization: 0.90}
write: out/chat
"""

BAD = """\
job: X y
modle: m
read: {paths: [../etc/passwd, "nodes:rel", "s3://a:b@c/d", data/none.jsonl], formt: 1}
prompt: {template: "{{ a.__class__ }}\\n{% include 'x' %}", column: c}
sampling: {n: 2, temperature: -1, min_tokens: 600}
keep: {answer: text, id: int}
engine: {args: {tensor-parallel-size: 2, x: hf_0123456789abcdef0123}, tp: 0, replicas: [3, 1]}
model: m
write: out.jsonl
data_parallel: {timeout: 0}
"""


def _job(folder: Path, **options: Any) -> CheckedJob:
    return flags.job_from_flags(_LEAST | options, folder)


def _flag_mistakes(folder: Path, **options: Any) -> list[str]:
    with pytest.raises(JobError) as caught:
        _job(folder, **options)
    return list(caught.value.mistakes)


def test_three_flags_are_enough(folder: Path) -> None:
    """All others have a default."""
    job = _job(folder)

    assert (job.mode, job.model, job.path, job.inside) == ("engine", "m", None, None)
    assert job.sources[0].text == str(folder / "data" / "chat.jsonl")
    assert (job.to.text, job.write.format) == (str(folder / "out"), "parquet")
    assert job.prompt == Prompt(column="prompt")


def test_every_flag_sets_its_key(folder: Path) -> None:
    """Engine arguments are parsed by their look."""
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
    assert job.sampling == Sampling(max_tokens=7, temperature=0.0)
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


def test_any_key_can_be_set(folder: Path) -> None:
    """Also one of a section in its short form, and without a flag of its own."""
    settings = ("limits.errors=3", 'sampling.stop=["a"]', "engine.order=given", "write.seconds=5")
    job = _job(folder, dp=2, set=(*settings, "data_parallel.timeout=9", "read.id=id"))

    assert (job.limits.errors, job.sampling.stop, job.engine.order) == (3, ("a",), "given")
    assert job.data_parallel is not None
    assert (job.data_parallel.size, job.data_parallel.timeout) == (2, 9)
    assert _job(folder, set=("job=mine",)).name == "mine"
    assert (job.write.seconds, job.read.id) == (5, "id")


def test_tuning_can_be_set_beside_a_file(folder: Path) -> None:
    """Other keys belong to the file."""
    job = _over(folder, "data_parallel: 4", set=("data_parallel.timeout=9", "limits.errors=1"))
    with pytest.raises(JobError) as caught:
        _over(folder, set=("sampling.seed=1", "engine.args.seed=2", "model=n"))

    assert job.data_parallel is not None
    assert (job.data_parallel.size, job.data_parallel.timeout, job.limits.errors) == (4, 9, 1)
    text = "cannot be combined with a job file; change it in job.yaml, or leave the file out"
    assert list(caught.value.mistakes) == [
        f"--set {key}: {text}" for key in ("sampling.seed", "model")
    ]


def test_ranks_by_flag(folder: Path) -> None:
    """The mode follows."""
    job = _job(folder, dp=2)

    assert job.data_parallel is not None
    assert (job.mode, job.data_parallel.size) == ("data-parallel", 2)


@pytest.mark.parametrize(
    ("payload", "messages"),
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
    folder: Path, payload: dict[str, Any], messages: tuple[Message, ...]
) -> None:
    """With a system message, or without one."""
    prompt = _job(folder, **payload).prompt

    assert prompt is not None
    assert (prompt.chat, prompt.column, prompt.template) == (messages, None, None)


def test_the_name_follows_from_the_job(folder: Path) -> None:
    """The same command is the same job, in any folder; tuning does not change it."""
    name = _job(folder).name
    same = flags.job_from_flags(
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


def test_missing_flags_are_named(folder: Path) -> None:
    """All of them, once."""
    with pytest.raises(JobError) as caught:
        flags.job_from_flags({}, folder)

    assert str(caught.value) == "3 mistakes in the options"
    assert caught.value.mistakes == (
        "--model: is missing: the model to run",
        "--input: is missing: the files with the rows",
        "--output: is missing: the folder for the answers",
    )
    assert "--help" in caught.value.hint


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (
            {"model": "m;x"},
            (
                "--model: should be a model such as Qwen/Qwen3-8B, or a path inside the container,"
                ' not "m;x"'
            ),
        ),
        ({"input": ("none.jsonl",)}, "--input: no such file: HERE/none.jsonl"),
        (
            {"input": ("data", "prompts.txt")},
            '--input: should all have one format: "chat.jsonl" is jsonl, "prompts.txt" is text',
        ),
        (
            {"output": "out.jsonl"},
            (
                "--output: should be a folder, since answers are written as several files, not"
                ' "out.jsonl"'
            ),
        ),
        ({"format": "xml"}, '--format: should be text, jsonl, csv or parquet, not "xml"'),
        (
            {"output_format": "csv"},
            '--output-format: should be parquet, jsonl or openai, not "csv"',
        ),
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
        ({"template": "{{"}, "--template: is not a valid template: unexpected 'end of template'"),
        ({"system": "{% x"}, "--system: is not a valid template: Encountered unknown tag 'x'"),
        (
            {"chat": True, "template": "{{"},
            "--template: is not a valid template: unexpected 'end of template'",
        ),
        ({"max_tokens": 0}, "--max-tokens: should be at least 1, not 0"),
        ({"temperature": -1.0}, "--temperature: should be at least 0, not -1.0"),
        ({"replicas": "3-1"}, "--replicas: should have the minimum first: 1 to 3, not 3 to 1"),
        (
            {"replicas": "2", "dp": 2},
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
        ({"set": ("limits.errors",)}, '--set: should be KEY=VALUE, not "limits.errors"'),
        (
            {"set": ("limits.errors=1", "limits.errors=2")},
            '--set: should name "limits.errors" once',
        ),
        ({"set": ("limits.errors=-1",)}, "--set limits.errors: should be at least 0, not -1"),
        (
            {"set": ("limits.eror=1",)},
            "--set limits.eror: unknown key `eror`; did you mean `errors`?",
        ),
        ({"set": ("model=n",)}, '--set: should name "model" once'),
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
def test_a_mistake_names_the_flag(folder: Path, payload: dict[str, Any], expected: str) -> None:
    """Without files and lines."""
    assert [line.replace(str(folder), "HERE") for line in _flag_mistakes(folder, **payload)] == [
        expected
    ]


def _over(folder: Path, extra: str = "", **options: Any) -> CheckedJob:
    path = folder / "job.yaml"
    path.write_text(f"model: m\nread: data/chat.jsonl\nwrite: out\n{extra}\n")
    return flags.job_from_file(path, options)


def test_flags_override_tuning_in_a_file(folder: Path) -> None:
    """In any spelling of an argument."""
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

    job = flags.job_from_file(path, {"replicas": "1-3", "batch_size": 8})

    assert job.predict is not None
    assert (job.predict.class_, job.predict.replicas, job.predict.batch_size) == (
        "mine:Mine",
        (1, 3),
        8,
    )


def test_flags_do_not_override_the_meaning_of_a_file(folder: Path) -> None:
    """Mistakes in the file and in the flags are reported together."""
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


def test_flags_that_do_not_fit_the_file_are_named(folder: Path) -> None:
    """A class ignores `--tp`, and ranks have no replicas."""
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
        flags.job_from_file(path, {"tp": 2})
    assert caught.value.mistakes == (
        (
            "--tp: should be left out with `predict`: the class chooses its own"
            " model; pass arguments in `predict.args`"
        ),
    )


@pytest.mark.parametrize(
    "content", ["", "- a", "engine: 5", "engine: [a]", "read: 5\nengine: {args: 5}"]
)
def test_flags_over_a_broken_file(folder: Path, content: str) -> None:
    """Only the file's mistakes are reported."""
    path = folder / "job.yaml"
    path.write_text(content)

    with pytest.raises(JobError):
        flags.job_from_file(path, {"tp": 2, "engine_arg": ("a=1",)})


def _mistakes(path: Path) -> list[str]:
    with pytest.raises(JobError) as caught:
        job_from_file(path, {})
    return list(caught.value.mistakes)


def test_a_good_file_becomes_a_job_named_after_it(folder: Path) -> None:
    """Short forms are expanded, argument names are Python's, and paths are absolute."""
    path = folder / "My Chat.yaml"
    path.write_text(GOOD)

    job = job_from_file(path, {})

    assert isinstance(job, CheckedJob)
    assert (job.name, job.mode, job.path, job.model) == ("my-chat", "engine", path, "Qwen/Qwen3-8B")
    assert [(source.where, source.text, source.shown) for source in job.sources] == [
        ("control", str(folder / "data" / "chat.jsonl"), "data/chat.jsonl")
    ]
    assert (job.read.format, job.read.row_bytes, job.keep) == ("jsonl", 16 * 2**20, {"id": None})
    assert job.prompt is not None
    assert job.prompt.chat == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="{{ text }}"),
    )
    assert job.sampling == Sampling(temperature=0.0, max_tokens=64)
    assert (job.engine.replicas, job.engine.placement) == ((1, 2), "strict-pack")
    assert job.engine.args == {"max_model_len": 4096, "gpu_memory_utilization": 0.9}
    assert type(job.engine.args["gpu_memory_utilization"]) is float
    assert (job.to.text, job.write.format, job.limits) == (
        str(folder / "out" / "chat"),
        "parquet",
        Limits(),
    )
    assert (job.inside, job.gpus) == ((folder,), (1.0, 2.0))


def test_every_mistake_is_reported_at_once_in_the_order_of_lines(folder: Path) -> None:
    """Values, unknown keys, paths, templates and rules between keys."""
    path = folder / "bad.yaml"
    path.write_text(BAD)

    assert [
        line.removeprefix(f"{path}:").replace(str(folder.parent), "UP") for line in _mistakes(path)
    ] == [
        (
            "1: job: should be a name of at most 40 lower-case letters, digits, `-`, `_` and `.`,"
            ' not "X y"'
        ),
        "2: unknown key `modle`; did you mean `mode`?",
        (
            '3: read.paths[0]: "../etc/passwd" leads to UP/etc/passwd, outside the job\'s folder;'
            " if you trust this job, add `--allow UP/etc`"
        ),
        '3: read.paths[1]: should be an absolute path without `..` after `nodes:`, not "rel"',
        (
            "3: read.paths[2]: should not hold a key; give it to the containers with `secrets` in"
            " the inventory"
        ),
        "3: read.paths[3]: no such file: UP/job/data/none.jsonl",
        "3: read: unknown key `formt`; did you mean `format`?",
        (
            "4: prompt.template: cannot reach `__class__`: a template can read values, not Python"
            " attributes (line 1 of the template)"
        ),
        (
            "4: prompt.template: cannot read other files: `include` is not available (line 2 of the"
            " template)"
        ),
        (
            "4: prompt: should have one of `column`, `template`, `chat`, `messages` and `pair`,"
            " not `column` and `template`"
        ),
        "5: sampling.min_tokens: should be at most `max_tokens`, which is 512",
        (
            "5: sampling.n: should be left out: each row has exactly one answer; repeat the"
            " row in the input for more answers"
        ),
        "5: sampling.temperature: should be at least 0, not -1",
        (
            "6: keep.answer: should not name `answer`, which the job writes itself; call it"
            " something else in the input"
        ),
        (
            '6: keep.id: should be text, integer, number, boolean or json, not "int"; did you mean'
            " `integer`?"
        ),
        "7: engine.args.tensor-parallel-size: should be left out: write `engine.tp`",
        "7: engine.args.x: a secret should not be written here; use `secrets` in the inventory",
        "7: engine.replicas: should have the minimum first: 1 to 3, not 3 to 1",
        "7: engine.tp: should be at least 1, not 0",
        '9: write: should be a folder, since answers are written as several files, not "out.jsonl"',
        "10: data_parallel.timeout: should be greater than 0, not 0",
        "10: data_parallel: `size` is missing: Number of ranks",
    ]


def test_missing_keys_do_not_hide_other_mistakes(folder: Path) -> None:
    """Input, output and prompt are missing, and a rule about another key is broken."""
    path = folder / "bad.yaml"
    path.write_text("model: org/m\nsampling: {min_tokens: 900}\n")

    missing = [line.partition(": ")[2] for line in _mistakes(path)]
    assert any("`read` is missing" in line for line in missing)
    assert any("`write` is missing" in line for line in missing)
    assert any("should be at most `max_tokens`" in line for line in missing)


def test_the_error_has_a_count_and_a_hint(folder: Path) -> None:
    """One line above the mistakes, one below."""
    path = folder / "bad.yaml"
    path.write_text("read: data/chat.jsonl\nwrite: out\n")

    with pytest.raises(JobError) as caught:
        job_from_file(path, {})

    assert str(caught.value) == f"1 mistake in `{path}`"
    assert (
        caught.value.evidence
        == f"{path}:1: `model` is missing: Model to run, such as Qwen/Qwen3-8B; or `predict`"
    )
    assert "`vlaunch schema --job`" in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_broken_short_form_does_not_hide_other_mistakes(folder: Path) -> None:
    """`read: [a, 5]` and others are reported."""
    path = folder / "bad.yaml"
    path.write_text(
        "model: m\nread: [data/chat.jsonl, 5]\nwrite: out\nengine: {tp: x}\nkeep: [row]\n"
    )

    assert [line.removeprefix(f"{path}:") for line in _mistakes(path)] == [
        "2: read: should be text, not 5; put it in quotes",
        '4: engine.tp: should be a whole number, not "x"',
        (
            "5: keep: should not name `row`, which the job writes itself; call it something else in"
            " the input"
        ),
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "1: the file is empty"),
        (b"- a", "1: should be a mapping that starts with `read:`, not a list"),
        (b"read: \xff", "1: the byte 0xff is not UTF-8; save the file as UTF-8"),
        (
            b"a: [",
            (
                "1: not valid YAML: expected the node content, but found '<stream end>' (while"
                " parsing a flow node, line 1)"
            ),
        ),
    ],
)
def test_an_unusable_file_is_a_single_line(folder: Path, content: bytes, expected: str) -> None:
    """Before any of its content."""
    path = folder / "job.yaml"
    path.write_bytes(content)

    (line,) = _mistakes(path)
    assert line.startswith(f"{path}:{expected[:40]}")


def test_a_file_that_cannot_be_read_is_reported(folder: Path) -> None:
    """With the reason, without a line."""
    assert _mistakes(folder / "none.yaml") == ["no such file or directory"]
    (folder / "large.yaml").write_bytes(b"#" * (1024 * 1024 + 1))
    assert _mistakes(folder / "large.yaml") == [
        "it is larger than 1024 KiB, too large for any job file"
    ]


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("chat", "chat"),
        ("My Job (2)", "my-job-2"),
        ("-x-", "x"),
        ("é", ""),
        ("a" * 60, "a" * 40),
        ("a" * 39 + ".b", "a" * 39),
    ],
)
def test_a_files_name_gives_the_jobs_name(stem: str, name: str) -> None:
    """In valid characters; empty without any."""
    assert job_name(Path(f"/x/{stem}.yaml")) == name


def test_an_underivable_name_is_required(folder: Path) -> None:
    """Names are not invented."""
    path = folder / "é.yaml"
    path.write_text(GOOD)

    assert _mistakes(path) == [
        f"{path}:1: `job` is missing: name of the job (the file's name is not a valid one)"
    ]
