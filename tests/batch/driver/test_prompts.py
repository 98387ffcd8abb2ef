"""Prompts of rows: columns, templates and chats, including hostile ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.batch.driver.job_file import Refused
from launcher.batch.driver.prompts import Prompter, PromptError
from tests.batch.driver.jobs import job


def prompter(folder: Path, **prompt: Any) -> Prompter:
    return Prompter(job(folder, "x", prompt={"column": None, **prompt}))


def test_a_column_is_used_unchanged(tmp_path: Path) -> None:
    """Even if it resembles a template."""
    assert prompter(tmp_path, column="text")({"text": " {{ 7 * 7 }} "}) == " {{ 7 * 7 }} "


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "the prompt is column `text`, which this row lacks"),
        ({"text": 5}, "column `text` holds a number, not text"),
        ({"text": None}, "column `text` holds null, not text"),
        ({"text": ["a"]}, "column `text` holds a list, not text"),
        ({"text": " \n"}, "the prompt is empty"),
    ],
)
def test_a_row_without_a_prompt_has_a_reason(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    """Numbers and lists are not converted."""
    with pytest.raises(PromptError, match=reason):
        prompter(tmp_path, column="text")(row)


def test_templates_use_columns(tmp_path: Path) -> None:
    """Numbers, nested values, loops, and columns with names that are no identifiers."""
    result = prompter(
        tmp_path,
        template=(
            '{{ title|upper }} {{ n + 1 }} {{ "%.1f" % x }} {{ a.b[0] }} {{ row["the key"] }}\n'
        ),
    )

    assert (
        result({"title": "t", "n": 1, "x": 0.25, "a": {"b": [3]}, "the key": "k"}) == "T 2 0.2 3 k"
    )


def test_chats_are_messages(tmp_path: Path) -> None:
    """A chat without content apart from the system's message is empty."""
    result = prompter(
        tmp_path,
        chat=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "{{ q }}"}],
    )

    assert result({"q": "Why?"}) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Why?"},
    ]
    with pytest.raises(PromptError, match="the prompt is empty"):
        result({"q": ""})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ titel }}", "the template names `titel`, which this row lacks"),
        ("{{ a.nope }}", "reads `nope` from dict, which does not have it"),
        ("{{ text.__class__ }}", "SecurityError"),
        ("{{ text.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ ''['__class__'] }}", "SecurityError|lacks"),
        ("{{ (text|attr('__init__')).__globals__ }}", "SecurityError|lacks|fails"),
        ("{{ '{0.__class__}'.format(text) }}", "SecurityError"),
        ("{{ items.append(1) }}", "SecurityError"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "OverflowError"),
        (
            (
                "{% for i in range(99999) %}{% for j in range(99999) %}{{ text * 100 }}{% endfor"
                " %}{% endfor %}"
            ),
            "produces more than",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself endlessly"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ text + 1 }}", "TypeError"),
        ("{% include 'x' %}", "TypeError|no loader"),
    ],
)
def test_a_failing_template_is_the_rows_error(tmp_path: Path, template: str, reason: str) -> None:
    """Hostile or mistaken: no code runs, memory is limited, the reason is one line."""
    with pytest.raises(PromptError, match=reason) as raised:
        prompter(tmp_path, template=template)({"text": "abc", "a": {}, "items": []})
    assert len(str(raised.value)) < 500


def test_a_row_is_never_a_template(tmp_path: Path) -> None:
    """A row's content is text."""
    assert (
        prompter(tmp_path, template="{{ text }}")({"text": "{{ 7 * 7 }}{% raw %}"})
        == "{{ 7 * 7 }}{% raw %}"
    )


def test_a_broken_template_is_rejected_with_its_line(tmp_path: Path) -> None:
    """Before any row; the message names the message of the chat."""
    with pytest.raises(
        Refused, match=r"prompt\.chat\[0\]\.content is not a valid template"
    ) as raised:
        prompter(tmp_path, chat=[{"role": "user", "content": "a\n{{ b"}])
    assert raised.value.evidence.startswith("line 2: ")


def test_the_models_chat_template_receives_the_jobs_arguments(tmp_path: Path) -> None:
    """Its exceptions are the row's error."""

    class Tokenizer:
        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            if messages[0]["role"] == "system":
                raise ValueError("System role not supported")
            return f"{messages[0]['content']} {sorted(options.items())}"

    result = prompter(
        tmp_path, chat=[{"role": "user", "content": "x"}], chat_args={"enable_thinking": False}
    )
    message = result.chat(Tokenizer(), [{"role": "user", "content": "hi"}])

    assert (
        message
        == "hi [('add_generation_prompt', True), ('enable_thinking', False), ('tokenize', False)]"
    )
    with pytest.raises(
        PromptError, match="the model's chat template rejects it: ValueError: System role"
    ):
        result.chat(Tokenizer(), [{"role": "system", "content": "hi"}])


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


class ToolTokenizer:
    """A tokenizer whose template shows the names of tools, or ignores them."""

    def __init__(self, template: str = "{% for tool in tools %}") -> None:
        self.template = template

    def get_chat_template(self, tools: list[Any]) -> str:
        assert tools == []
        return self.template

    def apply_chat_template(
        self, messages: Any, tools: list[Any] | None = None, **options: Any
    ) -> str:
        names = [tool["function"]["name"] for tool in tools or ()]
        return f"{names} {[message['content'] for message in messages]}"


@pytest.mark.parametrize("as_text", [False, True])
def test_a_column_of_messages_with_tools(tmp_path: Path, as_text: bool) -> None:
    """As lists, or as JSON text in a CSV; the nulls of Parquet are left out."""
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "hot?", "name": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}],
        },
        {"role": "tool", "content": [{"type": "text", "text": "30"}]},
    ]
    row: dict[str, Any] = {"chat": chat, "uses": [WEATHER]}
    if as_text:
        row = {name: json.dumps(value) for name, value in row.items()}
    make = prompter(tmp_path, messages="chat", tools="uses")
    messages = make(row)

    assert messages == [
        {"role": "user", "content": "hot?"} | ({"name": None} if as_text else {}),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bonn"}}}],
        },
        {"role": "tool", "content": [{"type": "text", "text": "30"}]},
    ]
    assert isinstance(messages, list)
    assert make.chat(ToolTokenizer(), messages, make.tools(row)).startswith("['weather'] ['hot?'")
    for empty in ({}, {"uses": None}, {"uses": []}, {"uses": ""}):
        assert make.tools(empty) is None


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        (None, "column `chat` should hold a list of objects, not null"),
        ("[", "column `chat` is not JSON"),
        ([], "column `chat` should hold a list of objects, not a list"),
        (["hi"], "column `chat` should hold a list of objects, not a list"),
        ([{"content": "hi"}], "message 1 has no role"),
        ([{"role": "user", "content": 5}], r"message 1 has content that is not text \(text\)"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            r"message 1 has content that is not text \(image_url\); images and audio go into",
        ),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "Expecting"),
    ],
)
def test_messages_that_no_template_takes(tmp_path: Path, chat: Any, reason: str) -> None:
    """They are that row's error."""
    with pytest.raises((PromptError, ValueError), match=reason):
        prompter(tmp_path, messages="chat")({"chat": chat})


def test_a_template_without_tools_is_refused(tmp_path: Path) -> None:
    """Before a row: it would ignore them."""
    make = prompter(tmp_path, messages="chat", tools="uses")
    make.check_template(ToolTokenizer())
    make.check_template(object())
    with pytest.raises(Refused, match="template does not support tools") as raised:
        make.check_template(ToolTokenizer("{{ messages }} {{ my_tools_x }}"))
    assert "column uses" in raised.value.evidence
    prompter(tmp_path, messages="chat").check_template(ToolTokenizer(""))
    own = prompter(
        tmp_path, messages="chat", tools="uses", chat_args={"chat_template": "{{ tools }}"}
    )
    own.check_template(ToolTokenizer(""))
