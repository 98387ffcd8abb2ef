"""Search for known failures in logs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .frames import strip_frame
from .table import WORD, Failure, Pattern, load_failures, parse_patterns

_MAX_MATCHES = 200  # lines of a log per pattern
_LAST = 5  # lines at the end of a log
_NEAR = 500  # lines between a failure and others of the same start
_KINDS = ("cause", "possible", "effect")


@dataclass(frozen=True, slots=True)
class Match:
    """Line with a known failure: its index in the log, the name in it, the end of the match in the
    line without its frame, and the weight of the pattern.
    """

    failure: Failure
    line: int
    name: str = ""
    end: int = 0
    weight: int = 0

    @property
    def cause(self) -> str:
        """The cause, with the name."""
        return fill(self.failure.cause, self.name)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key: causes before effects, earlier before later lines; effects in the table's
        order.
        """
        is_effect = self.failure.kind == "effect"
        position = list(load_failures()).index(self.failure.id) if is_effect else 0
        return _KINDS.index(self.failure.kind), position, self.line

    def choose_fix(self, *, mode: str = "", elsewhere: bool = False) -> str:
        """Return the fix (`Failure.choose_fix`) with the name."""
        return fill(self.failure.choose_fix(mode=mode, elsewhere=elsewhere), self.name)


def fill(text: str, name: str) -> str:
    """Return a text of a failure with the name from the log."""
    return " ".join(text.replace("{0}", name).split())


def find_failures(lines: Sequence[str], *, rdma: bool = False, mode: str = "") -> list[Match]:
    """Return the most specific failure of each line of a log, in the order of lines; effects only
    where a line has no other.

    Args:
        lines: lines without terminal codes, in any frame.
        rdma: include failures that count only where RDMA is required.
        mode: of the batch job that wrote the log, for failures of batch jobs.
    """
    log = _Log(lines)
    best: dict[int, tuple[tuple[bool, int], Match]] = {}
    for failure in load_failures().values():
        if (failure.rdma and not rdma) or (failure.layer == "batch" and mode not in failure.batch):
            continue
        if failure.kind == "unknown":
            continue
        for index, weight, match in log.find(failure):
            rank = (failure.kind != "effect", weight)
            if index not in best or best[index][0] < rank:
                name = next((group for group in match.groups() if group), "")
                best[index] = rank, Match(failure, index, name, match.end(), weight)
    return [best[index][1] for index in sorted(best)]


def first_failure(lines: Sequence[str], *, rdma: bool = False, mode: str = "") -> Match | None:
    """Return the most likely failure of a log: the first cause, or else the first effect."""
    matches = find_failures(lines, rdma=rdma, mode=mode)
    return min(matches, key=lambda match: match.rank, default=None)


def describe_error(error: str, origin: str) -> Match | None:
    """Return the description of an error without an entry; `origin` is the last line of its
    traceback, if it has one.
    """
    text = f"{origin.strip()} | {strip_frame(error)}" if origin else strip_frame(error)
    return next(_describe([text], last=False), None)


def describe_end(lines: Sequence[str]) -> Match | None:
    """Return the description of a step at which a log without errors ends."""
    start = max(len(lines) - _LAST, 0)
    matches = _describe([strip_frame(line) for line in lines[start:]], last=True)
    return next((replace(match, line=start + match.line) for match in matches), None)


def _describe(texts: Sequence[str], *, last: bool) -> Iterator[Match]:
    for failure in load_failures().values():
        if failure.kind != "unknown" or failure.last != last:
            continue
        for pattern in (pattern for text in failure.match for pattern in parse_patterns(text)):
            for index, text in enumerate(texts):
                if match := pattern.regex.search(text):
                    name = next((group for group in match.groups() if group), "")
                    yield Match(failure, index, name, match.end())


class _Log:
    """Different lines of a log without frames, by their words."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._indices: dict[str, list[int]] = {}
        for index, line in enumerate(lines):
            self._indices.setdefault(strip_frame(line), []).append(index)
        self._lines = list(self._indices)
        self._lowered = [line.lower() for line in self._lines]
        self._by_word: dict[str, set[int]] = {}
        for number, line in enumerate(self._lowered):
            for word in WORD.findall(line):
                self._by_word.setdefault(word, set()).add(number)

    def find(self, failure: Failure) -> list[tuple[int, int, re.Match[str]]]:
        """Return the lines of a failure, the weights of its patterns and their matches."""
        hits = [
            (index, pattern.weight, match)
            for text in failure.match
            for pattern in parse_patterns(text)
            for index, match in self._search(pattern)
        ]
        if hits and failure.unless and (numbers := self._line_numbers(failure.unless)):
            hits = [hit for hit in hits if numbers[-1] < hit[0] - _NEAR]
        if hits and failure.needs:
            numbers = self._line_numbers(failure.needs)
            hits = [hit for hit in hits if any(abs(hit[0] - number) <= _NEAR for number in numbers)]
        return hits

    def _line_numbers(self, patterns: Sequence[str]) -> list[int]:
        return sorted(
            index
            for text in patterns
            for pattern in parse_patterns(text)
            for index, _ in self._search(pattern)
        )

    def _search(self, pattern: Pattern) -> Iterator[tuple[int, re.Match[str]]]:
        """Yield the first lines that match a pattern, and the matches."""
        # Few lines have all words of a pattern.
        numbers = [self._by_word.get(word, set()) for word in pattern.words]
        numbers.sort(key=len)
        lines = sorted(set.intersection(*numbers)) if numbers else range(len(self._lines))
        matches = 0
        for number in lines:
            if pattern.literal not in self._lowered[number]:
                continue
            line = self._lines[number]
            if match := pattern.regex.search(line):
                yield from ((index, match) for index in self._indices[line][:_MAX_MATCHES])
                matches += 1
                if matches == _MAX_MATCHES:
                    return
