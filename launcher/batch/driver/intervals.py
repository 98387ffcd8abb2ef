"""Sets of row numbers as few intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Run = tuple[int, int]  # first and last


def to_runs(numbers: Iterable[int]) -> list[Run]:
    """Return the intervals that ascending numbers form."""
    runs: list[Run] = []
    first = last = None
    for number in numbers:
        if last is not None and number == last + 1:
            last = number
            continue
        if first is not None and last is not None:
            runs.append((first, last))
        first = last = number
    if first is not None and last is not None:
        runs.append((first, last))
    return runs


def count_numbers(runs: Iterable[Run]) -> int:
    """Return how many numbers are in these intervals."""
    return sum(last - first + 1 for first, last in runs)


class Intervals:
    """Disjoint, non-adjacent intervals in ascending order."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self.firsts: list[int] = []
        self.lasts: list[int] = []
        for first, last in runs:
            self.add(first, last)

    def __iter__(self) -> Iterator[Run]:
        return zip(self.firsts, self.lasts, strict=True)

    def __len__(self) -> int:
        """Return the number of intervals, not of numbers."""
        return len(self.firsts)

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self.firsts, number) - 1
        return index >= 0 and number <= self.lasts[index]

    def add(self, first: int, last: int) -> None:
        """Add an interval, merging those that it touches."""
        low = bisect_left(self.lasts, first - 1)
        high = bisect_right(self.firsts, last + 1)
        if low < high:
            first, last = min(first, self.firsts[low]), max(last, self.lasts[high - 1])
        self.firsts[low:high] = [first]
        self.lasts[low:high] = [last]

    def overlaps(self, first: int, last: int) -> bool:
        """Return True if any of these numbers is in the set."""
        low = bisect_left(self.lasts, first)
        return low < len(self.firsts) and self.firsts[low] <= last

    def missing(self, first: int, last: int) -> list[Run]:
        """Return the intervals of these numbers that are not in the set."""
        runs = []
        index = bisect_left(self.lasts, first)
        while first <= last:
            if index == len(self.firsts) or self.firsts[index] > last:
                runs.append((first, last))
                break
            if self.firsts[index] > first:
                runs.append((first, self.firsts[index] - 1))
            first = self.lasts[index] + 1
            index += 1
        return runs
