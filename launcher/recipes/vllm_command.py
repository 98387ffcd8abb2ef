"""A `vllm serve` command, from a recipe or from a pasted command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_NEGATIVE_NUMBER = re.compile(r"-[\d.]")


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
