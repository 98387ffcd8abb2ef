"""A checked batch job on this machine, with every default filled in.

`launcher.batch.flags` parses it from a command line and its file; `launcher.batch.job_spec` places
it on a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from launcher.batch.job import Job
from launcher.core.errors import RequestError
from launcher.inventory.mistakes import Mistake

if TYPE_CHECKING:
    from launcher.inventory.document import Document


HINT = "`vlaunch schema --job` describes every key; nothing was changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Source of rows, or target of answers.

    `where` is `control` (a path on this machine, shipped or gathered), `nodes` (a path in the
    head's container, written `nodes:/path`), or `remote` (`s3://…`, `gs://…`, `hdfs://…`). `text`
    is the absolute path or address; `shown` is as written.
    """

    where: Literal["control", "nodes", "remote"]
    text: str
    shown: str


@dataclass(frozen=True, kw_only=True)
class CheckedJob(Job):
    """A job without mistakes, and its resolved paths on this machine.

    `code` are the files of `predict` and `preprocess`, by their names in the cluster. `path` is the
    job file. `inside` are the folders that local paths must lead into, None: anywhere.
    """

    sources: tuple[Source, ...]
    to: Source
    code: Mapping[str, Path]
    path: Path | None = None
    inside: tuple[Path, ...] | None = None

    @property
    def gpus(self) -> tuple[float, float]:
        """Least and most accelerators that the job uses."""
        replicas = self.engine.replicas
        if self.mode == "predict":
            assert self.predict is not None  # noqa: S101 - the mode says so
            replicas = self.predict.replicas
        elif self.data_parallel is not None:
            replicas = self.data_parallel.size, self.data_parallel.size
        return replicas[0] * self.replica_gpus, replicas[1] * self.replica_gpus


class JobError(RequestError):
    """Mistakes in a job, one line each: `FILE:LINE: path: text` or `--flag: text`."""

    def __init__(self, message: str, mistakes: Sequence[str], *, hint: str = HINT) -> None:
        super().__init__(message, evidence=mistakes, hint=hint)
        self.mistakes = tuple(mistakes)


def mistakes_error(path: Path, read: Document, mistakes: Sequence[Mistake]) -> JobError:
    """Return one error for a file's mistakes, sorted by line."""
    lines = read.sorted_messages(mistakes)
    return JobError(
        f"{count_mistakes(len(lines))} in `{path}`",
        [f"{path}:{line}: {text}" for line, text in lines],
    )


def count_mistakes(number: int) -> str:
    """Return `1 mistake`, or `2 mistakes`."""
    return "1 mistake" if number == 1 else f"{number} mistakes"
