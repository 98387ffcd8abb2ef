"""The error of a job that cannot be run as it is written, in a file or as flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.core.errors import RequestError
from launcher.inventory.mistakes import Mistake

if TYPE_CHECKING:  # which imports yaml, and only a file needs that
    from launcher.inventory.document import Document

HINT = "every key is explained in examples/reference.yaml; nothing was touched"


class JobError(RequestError):
    """The job has mistakes; `mistakes` holds one line each: `FILE:LINE: path: what`, or `--flag:
    what`.
    """

    def __init__(self, message: str, mistakes: Sequence[str], *, hint: str = HINT) -> None:
        super().__init__(message, evidence=mistakes, hint=hint)
        self.mistakes = tuple(mistakes)


def refused(path: Path, read: Document, mistakes: Sequence[Mistake]) -> JobError:
    """Make one error of a file's mistakes, sorted by line."""
    lines = read.told(mistakes)
    return JobError(
        f"{count(len(lines))} in `{path}`", [f"{path}:{line}: {told}" for line, told in lines]
    )


def count(number: int) -> str:
    """Return `1 mistake`, or `2 mistakes`."""
    return "1 mistake" if number == 1 else f"{number} mistakes"
