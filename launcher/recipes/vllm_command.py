"""Model of a `vllm serve` command, and the parser of pasted command lines. Pure.

A command line is `vllm serve …`, `python -m vllm.entrypoints.openai.api_server …` or `docker run …
IMAGE …`, with optional variables, continued lines and comments.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from launcher.core.errors import RequestError
from launcher.core.secret_patterns import redact_secrets

_NEGATIVE_NUMBER = re.compile(r"-[\d.]")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SKIPPED = ("$", "sudo", "env", "export", "exec", "&&", ";", "uv", "run")
_OPERATOR = re.compile(r"[();<>|&]+")
_SERVER = re.compile(
    r"(?:\S*/)?vllm serve |(?:\S*/)?python3? -m vllm\.entrypoints\.openai\.api_server "
)
# Options of `docker run` without a value in the next argument.
_DOCKER_FLAG = re.compile(
    "--.*=.*|-[^-].+|-[ditP]|--(rm|privileged|init|detach|interactive|tty|read-only|publish-all)"
)
_HINT = "paste one command: `[NAME=VALUE …] vllm serve MODEL [OPTIONS]`, or `docker run …` of it"


@dataclass(frozen=True, slots=True)
class CommandOption:
    """An option with its values, as written."""

    argv: tuple[str, ...]

    @property
    def name(self) -> str:
        """The normalized name: `--max_model_len=8` sets --max-model-len, and `--no-enable-x` and
        `--disable-x` set --enable-x.
        """
        name = self.argv[0].partition("=")[0]
        if not name.startswith("--"):
            return name
        positive = re.sub("^--no-", "--", name.replace("_", "-"))
        return positive.replace("--disable-", "--enable-", 1)  # a pair since vLLM 0.33

    @property
    def values(self) -> list[str]:
        """The values after the name or after `=`."""
        return [value for value in (self.argv[0].partition("=")[2], *self.argv[1:]) if value]

    @property
    def text(self) -> str:
        """The option as typed in a shell."""
        return shlex.join(self.argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCommand:
    """A model with its arguments and variables; `origin` names the recipe or the pasted command,
    `version` is the oldest supported vLLM. `notes` are shown before the start.
    """

    origin: str
    model: str
    options: tuple[CommandOption, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    version: str = ""
    notes: tuple[str, ...] = ()


def parse_options(argv: Iterable[str]) -> list[CommandOption]:
    """Group arguments into options; `--max-model-len auto` as one argument counts as two."""
    arguments: list[str] = []
    for argument in argv:
        arguments += argument.split(" ", 1) if re.match(r"--[\w-]+ ", argument) else [argument]
    groups: list[list[str]] = []
    for argument in arguments:
        if not groups or (argument.startswith("-") and not _NEGATIVE_NUMBER.match(argument)):
            groups.append([argument])
        else:
            groups[-1].append(argument)
    return [CommandOption(tuple(group)) for group in groups]


def drop_overridden(options: Iterable[CommandOption]) -> list[CommandOption]:
    """Drop options that a later option sets again."""
    last: dict[str, CommandOption] = {}
    for option in options:
        last.pop(option.name, None)
        last[option.name] = option
    return list(last.values())


def parse_pasted(text: str) -> VllmCommand:
    """Parse a pasted command; raises RequestError unless it starts a vLLM server."""
    text = re.sub(r"\\[ \t]*\r?\n", " ", text)
    text = re.sub(r"(?m)^\s*#.*$", "", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        argv = list(lexer)
    except ValueError as error:
        raise _parse_error(f"it is not valid shell syntax: {error}".lower()) from None
    env: dict[str, str] = {}
    while argv and (argv[0] in _SKIPPED or _ASSIGNMENT.match(argv[0])):
        name, equals, value = argv.pop(0).partition("=")
        env |= {name: value} if equals else {}
    image, notes = "", list[str]()
    if argv[:2] in (["docker", "run"], ["podman", "run"]):
        image, argv = _parse_docker_run(argv[2:], env)
        notes.append("options of `docker run` are ignored: the inventory describes the containers")
    if server := _SERVER.match(" ".join(argv) + " "):
        argv = argv[len(server[0].split()) :]
    elif not image:
        raise _parse_error("it does not start `vllm serve`")
    if operator := next(filter(_OPERATOR.fullmatch, argv), None):
        raise _parse_error(f"it contains `{operator}` of the shell")
    model, options = _split_model(argv)
    return VllmCommand(
        origin="the pasted command",
        model=model,
        options=tuple(options),
        env=env,
        image=image,
        notes=tuple(notes),
    )


def _parse_docker_run(argv: list[str], env: dict[str, str]) -> tuple[str, list[str]]:
    """Return the image and the arguments after it, and add the container's variables to `env`."""
    while argv and argv[0].startswith("-"):
        argument = argv.pop(0)
        variable = re.fullmatch("(?:-e|--env=|--env$)(.*)", argument)
        value = variable[1] if variable else ""
        if argv and not value and not _DOCKER_FLAG.fullmatch(argument):
            value = argv.pop(0)
        if variable:
            name, equals, text = value.partition("=")
            env[name] = text if equals else f"${name}"
    if not argv:
        raise _parse_error("`docker run` has no image")
    return argv[0], argv[1:]


def _split_model(argv: list[str]) -> tuple[str, list[CommandOption]]:
    """Return the model, the first argument or the value of --model, and the options."""
    model, arguments = (argv[0], argv[1:]) if argv and argv[0][:1] != "-" else ("", argv)
    options = parse_options(arguments)
    if options and not options[0].argv[0].startswith("-"):
        raise _parse_error(f"`{redact_secrets(options[0].argv[0])}` is not an option")
    for option in [option for option in options if option.name == "--model"]:
        options.remove(option)
        model = model or " ".join(option.values)
    if not model:
        raise _parse_error("it names no model directly after `vllm serve`, nor with --model")
    return model, options


def _parse_error(why: str) -> RequestError:
    return RequestError("the pasted command cannot be used", evidence=why, hint=_HINT)
