"""Parser of pasted command lines."""

from __future__ import annotations

import pytest

from launcher.core.errors import RequestError
from launcher.recipes.vllm_command import parse_pasted


def option_texts(text: str) -> list[str]:
    """Return the options of a pasted command."""
    return [option.text for option in parse_pasted(text).options]


def test_assignments_and_continued_lines() -> None:
    """As in a guide."""
    text = """
    # serve it
    $ export A='b c' && C=d vllm serve Qwen/Qwen3-32B \\
        --max-model-len 32768 \\
        --override-generation-config '{"temperature": 0.6, "stop": "a;b"}' -tp=8
    """
    command = parse_pasted(text)

    assert command.model == "Qwen/Qwen3-32B"
    assert command.env == {"A": "b c", "C": "d"}
    assert option_texts(text) == [
        "--max-model-len 32768",
        """--override-generation-config '{"temperature": 0.6, "stop": "a;b"}'""",
        "-tp=8",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve a/b --x 1",
        "vllm serve --model a/b --x 1",
        "vllm serve --model=a/b --x 1",
        "/opt/venv/bin/vllm serve a/b --x 1",
        "uv run vllm serve a/b --x 1",
        "sudo env vllm serve a/b --x 1",
        "python3 -m vllm.entrypoints.openai.api_server --model a/b --x 1",
        "docker run vllm/vllm-openai:v1 --model a/b --x 1",
        "docker run vllm/vllm-openai:v1 vllm serve a/b --x 1",
        "vllm serve a/b --model c/d --x 1",
    ],
)
def test_forms(text: str) -> None:
    """Of the program and of the model."""
    assert parse_pasted(text).model == "a/b"
    assert option_texts(text) == ["--x 1"]


def test_docker() -> None:
    """Its variables and image are used; other options are ignored, with a note."""
    command = parse_pasted(
        "docker run -itd --rm --gpus all -v/a:/b -v c:/d --ipc=host -p 8000:8000 -e A=b"
        " --env-file file --env C=d -eE=f -e G --name x vllm/vllm-openai:v0.11.0 a/b --x -1"
    )

    assert (command.image, command.model) == ("vllm/vllm-openai:v0.11.0", "a/b")
    assert command.env == {"A": "b", "C": "d", "E": "f", "G": "$G"}
    assert [option.argv for option in command.options] == [("--x", "-1")]
    assert command.notes[0].startswith("options of `docker run` are ignored")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "does not start `vllm serve`"),
        ("ls -l", "does not start `vllm serve`"),
        ("vllm bench a/b", "does not start `vllm serve`"),
        ("vllm serve", "names no model"),
        ("vllm serve --max-model-len 8 a/b", "names no model"),
        ("vllm serve a/b --x 'y", "no closing quotation"),
        ("vllm serve a/b --x | tee log", "contains `|` of the shell"),
        ("vllm serve a/b & curl x", "contains `&` of the shell"),
        ("vllm serve <model>", "contains `<` of the shell"),
        ("vllm serve a/b c --x", "`c` is not an option"),
        ("docker run --rm", "has no image"),
    ],
)
def test_other_text_is_rejected(text: str, why: str) -> None:
    """With the reason and the supported form."""
    with pytest.raises(RequestError) as raised:
        parse_pasted(text)

    assert why in raised.value.evidence
    assert raised.value.hint
    assert "vllm serve MODEL [OPTIONS]" in raised.value.hint


def test_a_misplaced_secret_is_not_shown() -> None:
    """In an error."""
    with pytest.raises(RequestError) as raised:
        parse_pasted("vllm serve a/b sk-abcdefghijklmnopqrstuv --x")

    assert "abcdefgh" not in raised.value.evidence
