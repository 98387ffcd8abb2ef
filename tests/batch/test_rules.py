"""Rules between the keys of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.batch import rules
from launcher.batch.job import Sampling, to_json
from tests.batch.conftest import Load, Mistakes

_PREDICT = "predict: mine.py:Mine"
_REQUESTS = "write: {path: out, format: openai}"


def test_modes_follow_from_the_sections(load_text: Load) -> None:
    """`mode` is optional."""
    assert load_text().mode == "engine"
    assert load_text("data_parallel: 2").mode == "data-parallel"
    assert load_text(_PREDICT, model=None).mode == "predict"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("mode: predict", "4: mode: should come with `predict`, which names the class"),
        (
            "mode: data-parallel",
            "4: mode: should come with `data_parallel`, which says how many ranks: {size: 2}",
        ),
        (
            "mode: engine\ndata_parallel: 2",
            "5: data_parallel: should be left out with `mode: engine`",
        ),
        (
            "mode: engine\npredict: mine.py:Mine",
            "5: predict: should be left out with `mode: engine`; it belongs to `mode: predict`",
        ),
        (
            "data_parallel: 2\nengine: {replicas: 2}",
            (
                "5: engine.replicas: should be left out with `mode: data-parallel`:"
                " `data_parallel.size` is its place"
            ),
        ),
        (
            "data_parallel: 2\nengine: {batch_size: 2}",
            (
                "5: engine.batch_size: should be left out with `mode: data-parallel`:"
                " `data_parallel.round_rows` is its place"
            ),
        ),
        (
            "data_parallel: 2\npreprocess: mine.py:ready",
            (
                "5: preprocess: should be left out with `mode: data-parallel`, whose ranks take"
                " rows as they are"
            ),
        ),
        ("mode: offline", '4: mode: should be engine, predict or data-parallel, not "offline"'),
    ],
)
def test_a_mode_accepts_its_own_sections(mistakes: Mistakes, extra: str, expected: str) -> None:
    """Others would be ignored, and are rejected."""
    assert expected in mistakes(extra)


def test_predict_accepts_no_model_settings(mistakes: Mistakes) -> None:
    """Its class selects the model."""
    message = mistakes(
        f"{_PREDICT}\nprompt: '{{{{ a }}}}'\nsampling: {{seed: 1}}\nengine: {{tp: 2}}"
    )

    assert [line.split(":")[1].strip() for line in message] == [
        "model",
        "prompt",
        "sampling",
        "engine",
    ]
    assert all("should be left out with `predict`" in line for line in message)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            "task: embed\nsampling: {seed: 1}",
            "5: sampling: should be left out with `task: embed`, which generates nothing",
        ),
        (
            "task: embed\ndata_parallel: 2",
            "4: task: should be left out with `mode: data-parallel`",
        ),
        (
            "prompt: {pair: ['{{ a }}', '{{ b }}']}",
            "4: prompt.pair: should come with `task: score`, which compares two texts",
        ),
        (
            "task: score",
            "4: task: `task: score` compares two texts: write `prompt: {pair: [..., ...]}`",
        ),
        (
            "task: score\nprompt: '{{ a }}'",
            "5: prompt: `task: score` compares two texts: write `prompt: {pair: [..., ...]}`",
        ),
        (
            "task: score\nprompt: {pair: [a, b]}",
            (
                "5: prompt.pair: names no column, so all rows would have the same prompt; write {{"
                " text }}"
            ),
        ),
        (
            "task: embed\nkeep: [embedding]",
            (
                "5: keep: should not name `embedding`, which the job writes itself; call it"
                " something else in the input"
            ),
        ),
        (
            "engine: {args: {runner: pooling}}",
            (
                "4: engine.args.runner: should be left out: it is derived from `task`, which is"
                " written at the top level"
            ),
        ),
    ],
)
def test_a_task_accepts_its_own_settings(mistakes: Mistakes, extra: str, expected: str) -> None:
    """Settings without effect on a pooling model are rejected."""
    assert expected in mistakes(extra)


def test_a_score_is_of_two_texts(load_text: Load) -> None:
    """Without sampling."""
    job = load_text("task: score\nprompt: {pair: ['{{ question }}', '{{ passage }}']}")

    assert job.prompt is not None
    assert (job.task, job.prompt.pair, job.sampling) == (
        "score",
        ("{{ question }}", "{{ passage }}"),
        Sampling(),
    )


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ("prompt: '{{ text }}'", "4: prompt"),
        ("sampling: {max_tokens: 3}", "4: sampling"),
        ("keep: [id]", "4: keep"),
        ("data_parallel: 2", "4: data_parallel"),
        ("predict: mine.py:Mine", "4: predict"),
        ("preprocess: mine.py:ready", "4: preprocess"),
    ],
)
def test_requests_replace_these_sections(mistakes: Mistakes, extra: str, key: str) -> None:
    """Each line has its own."""
    text = "should be left out with `write.format: openai`, whose rows are complete requests"

    assert f"{key}: {text}" in mistakes(extra, write=_REQUESTS)


def test_requests_are_lines_of_json(load_text: Load, mistakes: Mistakes) -> None:
    """Also in a file with another ending; a line's id is `custom_id`."""
    job = load_text(
        "task: score", write=_REQUESTS, read="read: {paths: prompts.txt, format: jsonl}"
    )
    text = "`write.format: openai` takes requests as JSON lines (format: jsonl)"

    assert (job.row_kind, job.prompt, job.sampling, job.keep) == ("request", None, Sampling(), {})
    assert job.columns_to_keep == ("custom_id",)
    assert mistakes(write=_REQUESTS, read="read: prompts.txt") == [f"2: read: {text}"]


def test_preprocess_comes_before_a_class_or_an_engine(load_text: Load, folder: Path) -> None:
    """On CPUs, with its files."""
    job = load_text("preprocess: {function: 'mine.py:ready', replicas: [1, 3]}")

    assert job.preprocess is not None
    assert (job.preprocess.function, job.preprocess.replicas) == ("mine:ready", (1, 3))
    assert job.code == {"mine.py": folder / "mine.py"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (
            "{}",
            (
                "4: prompt: should have one of `column`, `template`, `chat`, `messages` and `pair`,"
                " not none of them"
            ),
        ),
        (
            "{column: a, chat: [{role: user, content: '{{ a }}'}]}",
            (
                "4: prompt: should have one of `column`, `template`, `chat`, `messages` and `pair`,"
                " not `column` and `chat`"
            ),
        ),
        (
            "{column: a, chat_args: {x: 1}}",
            (
                "4: prompt.chat_args: should come with `chat` or `messages`: they go to the chat"
                " template"
            ),
        ),
        (
            "text",
            (
                "4: prompt: names no column, so all rows would have the same prompt; write {{ text"
                " }}, or `prompt: {column: text}`"
            ),
        ),
        (
            "{chat: [{role: user, content: hello}]}",
            (
                "4: prompt.chat: names no column, so all rows would have the same prompt; write {{"
                " text }}"
            ),
        ),
        (
            "{chat: [{role: usr, content: '{{ a }}'}]}",
            (
                "4: prompt.chat[0].role: should be system, user, assistant, developer or tool, not"
                ' "usr"; did you mean `user`?'
            ),
        ),
        ("{chat: []}", "4: prompt.chat: should be a list that is not empty, not a list"),
        ("' '", '4: prompt: should be a template that is not empty, not " "'),
        ("'{{ a }'", "4: prompt: is not a valid template: unexpected '}'"),
    ],
)
def test_a_prompt_has_a_single_valid_form(mistakes: Mistakes, prompt: str, expected: str) -> None:
    """It depends on the row."""
    assert mistakes(f"prompt: {prompt}") == [expected]


def test_tools_belong_to_a_chat(mistakes: Mistakes, load_text: Load) -> None:
    """Of templates or of a column."""
    prompt = load_text("prompt: {messages: chat, tools: tools}").prompt
    assert prompt is not None
    assert (prompt.messages, prompt.tools) == ("chat", "tools")
    assert not mistakes("prompt: {chat: [{role: user, content: '{{ a }}'}], tools: tools}")
    assert mistakes("prompt: {column: a, tools: tools}") == [
        "4: prompt.tools: should come with `chat` or `messages`: they go to the chat template"
    ]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("lora: {sql: /l/sql, b: c/d}", "4: lora: should have one adapter; only requests"),
        ("lora: {sql: /l}\ntask: score\nprompt: {pair: ['{{ a }}', b]}", "4: lora: should be left"),
        ("lora: {sql: /l}\ndata_parallel: 2", "4: lora: should be left out with `mode: data-para"),
        ("lora: {m: /l}", "4: lora.m: should not have the model's own name"),
        ("lora: {'a=b': /l}", "4: lora.a=b: should be a name"),
        ("lora: /l", "4: lora: should be"),
        (
            "engine: {args: {lora-modules: [a=b]}}",
            "4: engine.args.lora-modules: should be left out:",
        ),
        ("engine: {args: {--enable-lora: true}}", "4: engine.args.--enable-lora: should be left"),
        (
            "engine: {args: {lora_modules: [a=b]}}\nwrite: {path: out, format: openai}",
            "4: engine.args.lora_modules: should be left out: write `lora: {NAME: PATH}`",
        ),
    ],
)
def test_adapters_fit_the_job(mistakes: Mistakes, extra: str, expected: str) -> None:
    """Engine arguments cannot bring others past the checks."""
    top = {"write": None} if "\nwrite" in extra else {}
    (mistake,) = mistakes(extra, **top)
    if top:
        mistake = f"4{mistake[1:]}"
    assert mistake.startswith(expected)


def test_requests_choose_among_adapters(load_text: Load) -> None:
    """Other jobs have one."""
    requests = "lora: {sql: /l/sql, chat: org/l}\nwrite: {path: out, format: openai}"
    assert load_text(requests, write=None).lora == {"sql": "/l/sql", "chat": "org/l"}
    assert load_text("lora: {sql: /l/sql}").lora == {"sql": "/l/sql"}
    assert load_text().lora is None


@pytest.mark.parametrize(
    ("read", "column"), [("data/chat.jsonl", "prompt"), ("prompts.txt", "text")]
)
def test_the_default_prompt_is_a_column(load_text: Load, read: str, column: str) -> None:
    """The only one of text files, or the one with the usual name."""
    prompt = load_text(read=f"read: {read}").prompt

    assert prompt is not None
    assert prompt.column == column


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (
            "{n: 1, min_tokens: 5, max_tokens: 4}",
            "4: sampling.min_tokens: should be at most `max_tokens`, which is 4",
        ),
        (
            "{structured_outputs: {}}",
            (
                "4: sampling.structured_outputs: should have one of `json`, `regex`, `choice`,"
                " `grammar`, `json_object` and `structural_tag`, not none of them"
            ),
        ),
        (
            "{structured_outputs: {regex: a, choice: [b]}}",
            (
                "4: sampling.structured_outputs: should have one of `json`, `regex`, `choice`,"
                " `grammar`, `json_object` and `structural_tag`, not `regex` and `choice`"
            ),
        ),
        (
            "{structured_outputs: {json: 5}}",
            "4: sampling.structured_outputs.json: should be a JSON Schema, as a mapping or as text",
        ),
        (
            "{structured_outputs: {jsn: {}}}",
            "4: sampling.structured_outputs: unknown key `jsn`; did you mean `json`?",
        ),
        ("{top_p: 0}", "4: sampling.top_p: should be greater than 0, not 0"),
        ("{top_p: 1.5}", "4: sampling.top_p: should be at most 1, not 1.5"),
        ("{tempereture: 1}", "4: sampling: unknown key `tempereture`; did you mean `temperature`?"),
    ],
)
def test_sampling_is_vllms(mistakes: Mistakes, sampling: str, expected: str) -> None:
    """Checked at once, instead of by a replica ten minutes later."""
    assert expected in mistakes(f"sampling: {sampling}")


def test_sampling_always_has_a_length(load_text: Load) -> None:
    """vLLM's own default of 16 tokens would cut every answer."""
    assert load_text().sampling.max_tokens == 512
    job = load_text("sampling: {n: 1, stop: END, structured_outputs: {json: {type: object}}}")
    assert to_json(job.sampling) == {
        "max_tokens": 512,
        "stop": ["END"],
        "structured_outputs": {"json": {"type": "object"}},
    }


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            "{pipeline-parallel-size: 2}",
            "engine.args.pipeline-parallel-size: should be left out: write `engine.pp`",
        ),
        ("{--tp: 2}", "engine.args.--tp: should be left out: write `engine.tp`"),
        ("{model: x}", "engine.args.model: should be left out: write `model` at the top level"),
        (
            "{data_parallel_rank: 1}",
            (
                "engine.args.data_parallel_rank: should be left out: write `data_parallel` at the"
                " top level"
            ),
        ),
        ("{dtype: auto, --dtype: half}", "engine.args.--dtype: is `dtype` in another spelling"),
        (
            "{hf_overrides: {a: [sk-0123456789abcdef0123]}}",
            (
                "engine.args.hf_overrides: a secret should not be written here; use `secrets` in"
                " the inventory"
            ),
        ),
        (
            "{'a b': 1}",
            'engine.args.a b: should be the name of an argument, such as max_model_len, not "a b"',
        ),
    ],
)
def test_engine_arguments_exclude_those_the_job_sets(
    mistakes: Mistakes, args: str, expected: str
) -> None:
    """They are rejected with the key to use instead."""
    assert mistakes(f"engine: {{args: {args}}}") == [f"4: {expected}"]


def test_expert_parallel_is_an_argument_without_ranks_only(mistakes: Mistakes) -> None:
    """With ranks, a key sets it."""
    args = "engine: {args: {enable_expert_parallel: true}}"

    assert mistakes(args) == []
    assert mistakes(f"{args}\ndata_parallel: 2") == [
        "4: engine.args.enable_expert_parallel: should be left out: write"
        " `data_parallel.expert_parallel`"
    ]


@pytest.mark.parametrize(
    ("id", "fine"),
    [("id", True), ("answer", True), ("row", False), ("reason", False), ("input", False)],
)
def test_an_id_must_not_be_named_like_an_error_column(
    mistakes: Mistakes, id: str, fine: bool
) -> None:
    """It would replace the row's number, or be lost."""
    text = (
        f"2: read.id: should not be `{id}`, which error rows have already; call it something else"
        " in the input"
    )

    assert mistakes(read=f"read: {{paths: data/chat.jsonl, id: {id}}}") == ([] if fine else [text])


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (
            "[answer]",
            (
                "4: keep: should not name `answer`, which the job writes itself; call it something"
                " else in the input"
            ),
        ),
        (
            "{row: text}",
            (
                "4: keep.row: should not name `row`, which the job writes itself; call it something"
                " else in the input"
            ),
        ),
        ("[id, id]", "4: keep: should name each column once, not a list"),
        ("[1]", "4: keep: should be a list of columns, or a mapping from each column to its type"),
        ("id", '4: keep: should be a mapping of keys to values, not "id"'),
        (
            "{id: integr}",
            (
                '4: keep.id: should be text, integer, number, boolean or json, not "integr"; did'
                " you mean `integer`?"
            ),
        ),
    ],
)
def test_input_columns_exclude_output_names(mistakes: Mistakes, keep: str, expected: str) -> None:
    """Without repetition."""
    assert mistakes(f"keep: {keep}") == [expected]


def test_a_class_may_return_a_column_called_answer(mistakes: Mistakes) -> None:
    """Only `row` is reserved."""
    assert mistakes(f"{_PREDICT}\nkeep: [answer]", model=None) == []


@pytest.mark.parametrize(
    ("gpus", "fine"),
    [
        ("0", True),
        ("0.5", True),
        ("1", True),
        ("2", True),
        ("2.0", True),
        ("1.5", False),
        ("-1", False),
    ],
)
def test_a_replica_has_a_part_of_a_gpu_or_whole_ones(
    mistakes: Mistakes, gpus: str, fine: bool
) -> None:
    """As Ray assigns them."""
    assert (
        mistakes(f"predict: {{class: 'mine.py:Mine', num_gpus: {gpus}}}", model=None) == []
    ) is fine


@pytest.mark.parametrize(
    ("read", "write", "fine"),
    [
        ("data", "data/out", False),
        ("data", "data", False),
        ("data/*.jsonl", "data", True),
        ("data", "data-out", True),
        ("data/*", "data/out", False),
        ("data/*.jsonl", "data/out", True),
        ("data/**/*.jsonl", "data/out", False),
        ("{paths: 'nodes:/d', format: text}", "nodes:/d/out", False),
        ("{paths: 'nodes:/d', format: text}", "nodes:/dd", True),
        ("{paths: 's3://b/d', format: text}", "s3://b/d/out", False),
        ("{paths: 's3://b/d/', format: text}", "s3://b/d", False),
        ("{paths: 's3://b/d', format: text}", "s3://b/dd", True),
    ],
)
def test_answers_do_not_go_into_the_input(
    mistakes: Mistakes, read: str, write: str, fine: bool
) -> None:
    """A second run would read them."""
    message = mistakes(read=f"read: {read}", write=f"write: {write}")

    assert (message == []) is fine
    assert all("the answers would be read again" in line for line in message)


@pytest.mark.parametrize(
    "template",
    [
        "{{ text }}",
        "{% for one in items %}{{ loop.index }}. {{ one | upper }}\n{% endfor %}",
        "{% if a is defined %}{{ a }}{% else %}{{ b['c d'] }}{% endif %}",
        "{% macro m(x) %}{{ x }}{% endmacro %}{{ m(text) }}",
    ],
)
def test_valid_templates(template: str) -> None:
    """Loops, conditions, filters, macros."""
    assert rules.template_mistakes(template) == []


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{{ text",
            "is not a valid template: unexpected end of template, expected 'end of print"
            " statement'",
        ),
        (
            "a\nb\n{% for %}",
            (
                "is not a valid template: Expected an expression, got 'end of statement block'"
                " (line 3 of the template)"
            ),
        ),
        ("{% include '/etc/passwd' %}", "cannot read other files: `include` is not available"),
        ("{% import 'x' as y %}", "cannot read other files: `import` is not available"),
        ("{% from 'x' import y %}", "cannot read other files: `from … import` is not available"),
        ("{% extends 'x' %}", "cannot read other files: `extends` is not available"),
        (
            "{{ ''.__class__.__mro__ }}",
            "cannot reach `__class__`: a template can read values, not Python attributes",
        ),
        ("{{ a | uper }}", "names no filter `uper`; did you mean `upper`?"),
        ("{{ a is nmber }}", "names no test `nmber`; did you mean `number`?"),
    ],
)
def test_mistakes_have_line_numbers(template: str, expected: str) -> None:
    """With Jinja's messages for syntax."""
    assert expected in rules.template_mistakes(template)


def test_all_mistakes_of_a_template_are_reported() -> None:
    """Ordered by line."""
    assert rules.template_mistakes("{{ a|x }}\n{{ a|y }}\n{% include 'z' %}") == [
        "names no filter `x` (line 1 of the template)",
        "names no filter `y` (line 2 of the template)",
        "cannot read other files: `include` is not available (line 3 of the template)",
    ]


@pytest.mark.parametrize(
    "template", ["{{ 9**9**9**9 }}", "{{ 'a' * 10**12 }}", "{{ 'a'|center(10**12) }}{{ b }}"]
)
def test_templates_are_not_evaluated(template: str) -> None:
    """Compiling would fold constants, forever or until memory is full."""
    assert rules.template_mistakes(template) == []


@pytest.mark.parametrize(
    "template",
    ["{{ " + "(" * 100_000 + "a", "{{ " + "-" * 50_000 + "a }}", "{{ " + "9" * 10_000 + " }}"],
)
def test_a_deeply_nested_template_is_reported(template: str) -> None:
    """Python's stack and integers are limited."""
    (message,) = rules.template_mistakes(template)

    assert message.startswith("is n")
    assert rules.template_columns(template) == set()


@pytest.mark.parametrize(
    ("template", "columns"),
    [
        ("{{ a }} {{ b.c }} {{ d['e'] }}", {"a", "b", "d"}),
        ("{% for x in xs %}{{ x }}{{ loop.index }}{% endfor %}", {"xs"}),
        ("{% set a = 1 %}{{ a }}{{ range(3) }}", set()),
        ("plain", set()),
    ],
)
def test_the_columns_of_a_template(template: str, columns: set[str]) -> None:
    """Without its own variables and Jinja's globals."""
    assert rules.template_columns(template) == columns
