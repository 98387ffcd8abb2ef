"""Command lines in pieces: an option with its values, of which the last of a name counts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NEGATIVE = re.compile(r"-\d")


@dataclass(frozen=True, slots=True)
class Option:
    """An option as it is written, with the words behind it."""

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name by which two are the same: vLLM takes `--max_model_len=8` as well."""
        name = self.words[0].partition("=")[0]
        return name.replace("_", "-") if name.startswith("--") else name

    @property
    def text(self) -> str:
        """As one would type it."""
        return shlex.join(self.words)


def options(words: Iterable[str]) -> list[Option]:
    """Take words apart. Recipes are lines for a shell, where `--max-model-len auto`, written as one
    word, are two.
    """
    split: list[str] = []
    for word in words:
        split += (
            word.split()
            if word.startswith("--") and " " in word and "=" not in word.split()[0]
            else [word]
        )
    found: list[list[str]] = []
    for word in split:
        option = word.startswith("-") and not _NEGATIVE.match(word)
        if option or not found:
            found.append([word])
        else:
            found[-1].append(word)
    return [Option(tuple(each)) for each in found]


def last(found: Sequence[Option]) -> list[Option]:
    """Leave out what is given again later, as `argparse` does."""
    names = [each.name for each in found]
    return [each for at, each in enumerate(found) if each.name not in names[at + 1 :]]
