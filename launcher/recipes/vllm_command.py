"""A `vllm serve` command, from a recipe or from a pasted command line. Pure.

A pasted one is `vllm serve …`, `python -m vllm.entrypoints.openai.api_server …` or `docker run …
IMAGE …`, with variables before it, continued lines and comments.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from launcher.core.errors import RequestError
from launcher.core.secret_patterns import clean

_NEGATIVE_NUMBER = re.compile(r"-[\d.]")
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


@dataclass(frozen=True, slots=True)
class Option:
    """An option with its values, as written."""

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name that argparse knows: `--max_model_len=8` sets --max-model-len, and
        `--no-enable-x` sets --enable-x.
        """
        name = self.words[0].partition("=")[0]
        return re.sub("^--no-", "--", name.replace("_", "-")) if name.startswith("--") else name

    @property
    def values(self) -> list[str]:
        """The words after the name, and after `=`."""
        return [word for word in (self.words[0].partition("=")[2], *self.words[1:]) if word]

    @property
    def text(self) -> str:
        """The option as typed in a shell."""
        return shlex.join(self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCommand:
    """A model with its arguments and variables; `origin` names the recipe or the pasted command,
    `version` is the oldest vLLM that works. `notes` are shown before the start.
    """

    origin: str
    model: str
    options: tuple[Option, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    version: str = ""
    notes: tuple[str, ...] = ()


def options(words: Iterable[str]) -> list[Option]:
    """Split words into options; `--max-model-len auto` written as one word is two."""
    split: list[str] = []
    for word in words:
        split += word.split(" ", 1) if re.match(r"--[\w-]+ ", word) else [word]
    groups: list[list[str]] = []
    for word in split:
        if not groups or (word.startswith("-") and not _NEGATIVE_NUMBER.match(word)):
            groups.append([word])
        else:
            groups[-1].append(word)
    return [Option(tuple(group)) for group in groups]


def last_of_each(given: Iterable[Option]) -> list[Option]:
    """Drop options that a later one sets again."""
    kept: dict[str, Option] = {}
    for option in given:
        kept.pop(option.name, None)
        kept[option.name] = option
    return list(kept.values())


def parse_pasted(text: str) -> VllmCommand:
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
