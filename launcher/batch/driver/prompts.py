"""A row becomes a prompt: a column, a template, or chat messages.

Templates run in a sandbox and have no loader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..job import PlacedJob
from .job_file import Refused

LARGEST = 64 * 2**20  # most characters of a rendered template
VALUE_LABELS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


class PromptError(Exception):
    """A row without a valid prompt."""


class Prompter:
    """Builder of prompts.

    Construct it once per process: it compiles the templates and cannot be pickled, unlike a job.

    Raises:
        Refused: a template is invalid.
    """

    def __init__(self, job: PlacedJob) -> None:
        from jinja2 import StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        prompt = job.prompt
        if prompt is None:
            raise Refused(
                "the job has no prompt",
                hint="set a column or a template under `prompt`",
            )
        self.column = prompt.column
        self.chat_args = dict(prompt.chat_args)
        self.messages_column, self.tools_column = prompt.messages, prompt.tools
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        self.template = (
            None
            if prompt.template is None
            else Template(environment, "prompt.template", prompt.template)
        )
        self.pair = [
            Template(environment, f"prompt.pair[{index}]", text)
            for index, text in enumerate(prompt.pair or ())
        ]
        self.messages = [
            (message.role, Template(environment, f"prompt.chat[{index}].content", message.content))
            for index, message in enumerate(prompt.chat or ())
        ]

    def __call__(self, columns: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Make a prompt (column, template) or messages (chat, a column of messages).

        Raises:
            PromptError: this row has none.
        """
        if self.messages_column is not None:
            messages = self.column_list(columns, self.messages_column)
            return [check_message(message, index) for index, message in enumerate(messages)]
        if self.messages:
            messages = [
                {"role": role, "content": template(columns)} for role, template in self.messages
            ]
            if not any(
                message["content"].strip() for message in messages if message["role"] != "system"
            ):
                raise PromptError("the prompt is empty")
            return messages
        text = self.template(columns) if self.template is not None else self.column_text(columns)
        if not text.strip():
            raise PromptError("the prompt is empty")
        return text

    def texts(self, columns: Mapping[str, Any]) -> list[str]:
        """Make the two texts of a pair.

        Raises:
            PromptError: this row lacks one.
        """
        texts = [template(columns) for template in self.pair]
        if not all(text.strip() for text in texts):
            raise PromptError("one of the two texts is empty")
        return texts

    def column_text(self, columns: Mapping[str, Any]) -> str:
        if self.column is None or self.column not in columns:
            raise PromptError(f"the prompt is column `{self.column}`, which this row lacks")
        value = columns[self.column]
        if not isinstance(value, str):
            raise PromptError(
                f"column `{self.column}` holds"
                f" {VALUE_LABELS.get(type(value), type(value).__name__)}, not text"
            )
        return value

    def column_list(self, columns: Mapping[str, Any], column: str) -> list[Any]:
        """Return a column's list of objects, which may be JSON text."""
        value = without_nulls(columns.get(column))
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise PromptError(f"column `{column}` is not JSON: {error}") from error
        if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
            label = VALUE_LABELS.get(type(value), type(value).__name__)
            raise PromptError(f"column `{column}` should hold a list of objects, not {label}")
        return value

    def tools(self, columns: Mapping[str, Any]) -> list[Any] | None:
        """Return the tools of a row's chat; None without any."""
        if self.tools_column is None or columns.get(self.tools_column) in (None, "", "[]", []):
            return None
        return self.column_list(columns, self.tools_column)

    def check_template(self, tokenizer: Any) -> None:
        """Check that the chat template takes tools, if rows have them.

        Raises:
            Refused: it ignores them.
        """
        if self.tools_column is None:
            return
        get_template = getattr(tokenizer, "get_chat_template", None)  # Mistral's has none
        template = self.chat_args.get("chat_template") or (get_template and get_template(tools=[]))
        if template and not re.search(r"\btools\b", template):
            raise Refused(
                "the model's chat template does not support tools",
                f"`prompt.tools` names column {self.tools_column}, but the template never reads"
                " `tools`",
                "use a model with tools, or set `prompt.chat_args.chat_template`",
            )

    def chat(
        self, tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None = None
    ) -> str:
        """Render messages with the model's chat template and the job's `chat_args`, ready for an
        answer.

        The text includes special tokens: tokenize it with `add_special_tokens=False`.

        Raises:
            PromptError: the template rejects these messages.
        """
        options = {"add_generation_prompt": True, **self.chat_args, "tokenize": False}
        if tools is not None:
            options["tools"] = tools
        try:
            return str(tokenizer.apply_chat_template(messages, **options))
        except Exception as error:  # a model's template may raise anything
            raise PromptError(
                f"the model's chat template rejects it: {describe_error(error)}"
            ) from error


def without_nulls(value: Any) -> Any:
    """Return a value without the fields that Parquet adds to objects which lack them."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def check_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a chat's message for its template, with the arguments of tool calls as objects.

    Raises:
        PromptError: it has no role, or content that is not text.
        ValueError: a tool call's arguments are not JSON.
    """
    if not isinstance(message.get("role"), str):
        raise PromptError(f"message {index + 1} has no role")
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else None
            raise PromptError(
                f"message {index + 1} has content that is not text ({kind or type(part).__name__});"
                " images and audio go into requests: `write.format: openai`"
            )
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            call["function"] = {**function, "arguments": json.loads(function["arguments"])}
    return {**message, "content": content, **({"tool_calls": calls} if calls else {})}


class Template:
    """A compiled template that explains the rows it does not fit."""

    def __init__(self, environment: Any, where: str, source: str) -> None:
        import jinja2

        try:
            self.compiled = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            line = getattr(error, "lineno", None)
            raise Refused(
                f"{where} is not a valid template",
                f"{f'line {line}: ' if line else ''}{describe_error(error)}",
            ) from error

    def __call__(self, columns: Mapping[str, Any]) -> str:
        import jinja2

        parts, length = [], 0
        try:
            # `row` gives access to columns that are not identifiers: {{ row["the title"] }}
            for part in self.compiled.generate({"row": columns, **columns}):
                length += len(part)
                if length > LARGEST:
                    raise PromptError(f"the template produces more than {LARGEST:,} characters")
                parts.append(part)
        except jinja2.UndefinedError as error:
            raise PromptError(undefined_reason(str(error))) from error
        except PromptError:
            raise
        except RecursionError as error:
            raise PromptError("the template calls itself endlessly") from error
        except MemoryError as error:
            raise PromptError("the template needs more memory than is available") from error
        except Exception as error:  # a filter may raise anything
            raise PromptError(f"the template fails on this row: {describe_error(error)}") from error
        return "".join(parts)


def undefined_reason(error: str) -> str:
    """Describe a jinja2 error: 'title' is undefined."""
    undefined = re.fullmatch(r"'(.+)' is undefined", error)
    if undefined:
        return f"the template names `{undefined[1]}`, which this row lacks"
    inner = re.fullmatch(r"'(.+) object' has no attribute '(.+)'", error)
    return (
        f"the template reads `{inner[2]}` from {inner[1]}, which does not have it"
        if inner
        else f"the template fails on this row: {error}"
    )


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
