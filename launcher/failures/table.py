"""Table of known failures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from .. import upstream
from .data import load_entries

# effect: consequence of another failure; possible: may be harmless; unknown: an error without an
# entry, by the code that raised it, or the last step of a log that ends without an error.
Kind = Literal["cause", "possible", "effect", "unknown"]
MODES = ("engine", "data-parallel", "predict")  # of batch jobs
_UPSTREAM = re.compile(r"@\{([\w.-]+)\}")
# Parts of regular expressions: a set of characters; a group whose text is in every match; any other
# group, with its quantifier; the rest.
_SET = re.compile(r"(?<!\\)\[\^?\]?(?:\\.|[^\]\\])*\]")
_GROUP = re.compile(r"(?<!\\)\((?:\?:|\?P<\w+>)?((?:\\.|[^()|?\\])(?:\\.|[^()|\\])*)\)(?![*?{])")
_OTHER_GROUP = re.compile(r"(?<!\\)\((?:\\.|[^()\\])*\)(?:[*+?]|\{[\d,]+\})*")
_SPECIAL = re.compile(r"[^\w\s/,:;=<>@'\"%&!-]")
WORD = re.compile(r"\w+")
_SYMBOL = re.compile(r"\\.|\{\d*,?\d*\}|.", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Versions of NCCL or the driver that hang: from `first` to before `below`; with `gpu` (a
    pattern) only on such GPUs, with `ib` only over InfiniBand or RoCE.
    """

    program: Literal["NCCL", "driver"]
    first: str
    below: str
    gpu: str = ""
    ib: bool = False
    circumstances: str
    advice: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Known failure; `{0}` in its texts is the first group that matched.

    Attributes:
        id: heading in docs/reference/failures.md.
        layer: file of the entry.
        kind: rank among the findings.
        match: patterns for a log line without its frame; case does not matter. `@{nccl.gid}`
            stands for an entry of `launcher.upstream`. Empty for failures that vlaunch knows from
            its own records.
        unless: patterns; such a line, later in the log or close before, excludes this failure.
        needs: patterns; the log must have such a line close to it.
        last: of kind `unknown`: a step at which a log ends without an error.
        rdma: counts only where RDMA is required.
        explains: for a network below its level: its effect.
        cause, fix: what failed, and the setting or command that helps on any cluster.
        vlaunch: the fix in a cluster of vlaunch, if it differs.
        batch: the fix in a batch job, by its mode; `*` for all modes.
        lines: lines to show as evidence.
        hangs: versions with this failure.
        note, source, versions, example: for the documentation; the example is also a test.
    """

    id: str
    layer: str = ""
    kind: Kind = "cause"
    match: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    last: bool = False
    rdma: bool = False
    explains: Literal["", "tcp", "no-gpudirect", "any"] = ""
    cause: str
    fix: str = ""
    vlaunch: str = ""
    batch: Mapping[str, str] = field(default_factory=dict)
    lines: int = 1
    hangs: tuple[Hang, ...] = ()
    note: str = ""
    source: str = ""
    versions: str = ""
    example: str = ""

    def choose_fix(self, *, mode: str = "", elsewhere: bool = False) -> str:
        """Return the fix for a batch job of a `mode` (`*`: unknown), a log from `elsewhere`, or
        this cluster.
        """
        if mode and self.batch:
            any_mode = self.batch.get("*", next(iter(self.batch.values())) if mode == "*" else "")
            if batch := self.batch.get(mode, any_mode):
                return batch
        if elsewhere and self.fix and self.vlaunch:
            return f"{self.fix}; with vlaunch: {self.vlaunch}"
        return self.fix if elsewhere and self.fix else self.vlaunch or self.fix


@dataclass(frozen=True, slots=True)
class Pattern:
    """Pattern of a log line, with the texts of other programs that it refers to.

    `literal` is in lower case and in all lines that match, `words` are its complete words;
    `weight` is the number of literal characters: more specific patterns have more.
    """

    text: str
    literal: str
    words: frozenset[str]
    weight: int

    @property
    def regex(self) -> re.Pattern[str]:
        """The regular expression; few of hundreds are needed for a log."""
        return _compile(self.text)


@cache
def load_failures() -> Mapping[str, Failure]:
    """Return the known failures by id."""
    return {entry["id"]: _build_failure(entry) for entry in load_entries()}


@cache
def parse_patterns(text: str) -> tuple[Pattern, ...]:
    """Return a pattern of an entry, with the texts of other programs that it refers to.

    A reference alone may have several alternatives, which become a pattern each.
    """
    alone = _UPSTREAM.fullmatch(text)
    expanded = _UPSTREAM.sub(lambda match: f"(?:{upstream.text(match[1])})", text)
    texts = _alternatives(upstream.text(alone[1])) if alone else [expanded]
    patterns = []
    for part in texts:
        literals = list(_literals(part))
        longest, weight = max(literals, key=len).lower(), sum(map(len, literals))
        words = frozenset(WORD.findall(f"x{longest}x")[1:-1])
        patterns.append(Pattern(part, longest, words, weight))
    return tuple(patterns)


@cache
def _compile(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


def _build_failure(entry: Mapping[str, Any]) -> Failure:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()
    }
    batch = entry.get("batch", {})
    fields["batch"] = batch if isinstance(batch, Mapping) else {"*": batch}
    fields["hangs"] = tuple(Hang(**hang) for hang in entry.get("hangs", ()))
    return Failure(**fields)


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a pattern, without those in its groups."""
    parts, depth = [""], 0
    for symbol in re.findall(rf"{_SET.pattern}|\\.|.", pattern):
        depth += (symbol == "(") - (symbol == ")")
        if symbol == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += symbol
    return parts


def _literals(pattern: str) -> Iterator[str]:
    """Yield the texts that are in all matches of a pattern."""
    if not _SPECIAL.search(pattern):
        yield pattern
        return
    pattern = _SET.sub(r"\\s", pattern)
    groups = 1
    while groups:
        pattern, groups = _GROUP.subn(r"\1", pattern, count=1)
        if not groups:
            pattern, groups = _OTHER_GROUP.subn(r"\\s", pattern, count=1)
    literal = ""
    for symbol in _SYMBOL.findall(pattern):
        if symbol in "*?" or (symbol[0] == "{" and len(symbol) > 1):  # the last one is optional
            literal, text = "", literal[:-1]
        elif symbol in "^$.+" or (symbol[0] == "\\" and symbol[-1:].isalnum()):
            literal, text = "", literal
        else:
            literal += symbol[-1]
            continue
        yield text
    yield literal
