"""A pasted command line that starts vLLM → a `vllm serve` command. Pure.

Reads `vllm serve …`, `python -m vllm.entrypoints.openai.api_server …` and `docker run … IMAGE …`,
with variables before it, continued lines and comments.
"""

from __future__ import annotations

import re
import shlex

from launcher.core.errors import RequestError
from launcher.core.secret_patterns import clean
from launcher.recipes.vllm_command import Option, VllmCommand, options

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SKIPPED = ("$", "sudo", "env", "export", "exec", "&&", ";", "uv", "run")
_OPERATOR = re.compile(r"[();<>|&]+")
_SERVER = re.compile(
    r"(?:\S*/)?vllm serve |(?:\S*/)?python3? -m vllm\.entrypoints\.openai\.api_server "
)
# Options of `docker run` whose value, if any, is in the same word.
_DOCKER_WORD = re.compile(
    "--.*=.*|-[^-].+|-[ditP]|--(rm|privileged|init|detach|interactive|tty|read-only|publish-all)"
)
_HINT = "paste one command: `[NAME=VALUE …] vllm serve MODEL [OPTIONS]`, or `docker run …` of it"


def parse(text: str) -> VllmCommand:
    """Read a pasted command; raises RequestError when it does not start a server of vLLM."""
    text = re.sub(r"\\[ \t]*\r?\n", " ", text)
    text = re.sub(r"(?m)^\s*#.*$", "", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise _unreadable(f"a shell cannot read it: {error}".lower()) from None
    env: dict[str, str] = {}
    while words and (words[0] in _SKIPPED or _ASSIGNMENT.match(words[0])):
        name, equals, value = words.pop(0).partition("=")
        env |= {name: value} if equals else {}
    image, notes = "", list[str]()
    if words[:2] in (["docker", "run"], ["podman", "run"]):
        image, words = _docker(words[2:], env)
        notes.append("options of `docker run` are ignored: the inventory describes the containers")
    if server := _SERVER.match(" ".join(words) + " "):
        words = words[len(server[0].split()) :]
    elif not image:
        raise _unreadable("it does not start `vllm serve`")
    if operator := next(filter(_OPERATOR.fullmatch, words), None):
        raise _unreadable(f"it contains `{operator}` of the shell")
    model, given = _model(words)
    return VllmCommand(
        origin="the pasted command",
        model=model,
        options=tuple(given),
        env=env,
        image=image,
        notes=tuple(notes),
    )


def _docker(words: list[str], env: dict[str, str]) -> tuple[str, list[str]]:
    """Return the image and the words after it, and add the container's variables to `env`."""
    while words and words[0].startswith("-"):
        word = words.pop(0)
        variable = re.fullmatch("(?:-e|--env=|--env$)(.*)", word)
        value = variable[1] if variable else ""
        if words and not value and not _DOCKER_WORD.fullmatch(word):
            value = words.pop(0)
        if variable:
            name, equals, text = value.partition("=")
            env[name] = text if equals else f"${name}"
    if not words:
        raise _unreadable("`docker run` has no image")
    return words[0], words[1:]


def _model(words: list[str]) -> tuple[str, list[Option]]:
    """Return the model, which comes first or after --model, and the options."""
    model, rest = (words[0], words[1:]) if words and words[0][:1] != "-" else ("", words)
    given = options(rest)
    if given and not given[0].words[0].startswith("-"):
        raise _unreadable(f"`{clean(given[0].words[0])}` stands where an option should be")
    for option in [option for option in given if option.name == "--model"]:
        given.remove(option)
        model = model or " ".join(option.values)
    if not model:
        raise _unreadable("it names no model directly after `vllm serve`, nor with --model")
    return model, given


def _unreadable(why: str) -> RequestError:
    return RequestError("the pasted command cannot be used", evidence=why, hint=_HINT)
