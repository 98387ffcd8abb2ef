"""A batch job on this machine: what was asked for, checked, with every default filled in.

`launcher.batch.flags` makes a `Job` of a command line, and of the file it names;
`launcher.batch.job_spec` writes it for the driver inside the cluster, whose shapes these are
(`launcher/batch/driver/job.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from launcher.batch.driver import job as driver
from launcher.core.errors import RequestError
from launcher.inventory.mistakes import Mistake

if TYPE_CHECKING:
    from launcher.inventory.document import Document


HINT = "every key is explained in examples/reference.yaml; nothing was touched"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where rows come from, or where answers go.

    `where` is `control` (a path on this machine: it is shipped, or gathered), `nodes` (a path that
    the head's container sees, written `nodes:/path`), or `remote` (`s3://…`, `gs://…`, `hdfs://…`).
    `text` is the absolute path, or the address; `shown` is as it was written.
    """

    where: Literal["control", "nodes", "remote"]
    text: str
    shown: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(driver.Job):
    """A checked batch job: what its driver will be told, and what only this machine knows of it.

    What follows from a cluster and from the contents of files is empty until `job_spec` writes it:
    `cluster`, `work`, `out`, `identity`, `digest`, `read.sources`, and where ranks meet.

    `code` are the files that `predict` and `preprocess` need, by their names there. `path` is the
    file the job came from. `inside` are the folders that its paths on this machine must lead into,
    None: anywhere.
    """

    cluster: str = ""
    work: str = ""
    out: str = ""
    sources: tuple[Source, ...]
    to: Source
    code: Mapping[str, Path]
    path: Path | None = None
    inside: tuple[Path, ...] | None = None

    @property
    def gpus(self) -> tuple[float, float]:
        """Accelerators that the job needs at least, and would use at most."""
        if self.mode == "predict":
            assert self.predict is not None  # noqa: S101 - the mode says so
            least, most = self.predict.replicas
            return least * self.predict.num_gpus, most * self.predict.num_gpus
        per_replica = self.engine.tp * self.engine.pp
        if self.data_parallel is not None:
            return float(per_replica * self.data_parallel.size), float(
                per_replica * self.data_parallel.size
            )
        return float(per_replica * self.engine.replicas[0]), float(
            per_replica * self.engine.replicas[1]
        )


class JobError(RequestError):
    """The job has mistakes; `mistakes` holds one line each: `FILE:LINE: path: what`, or `--flag:
    what`.
    """

    def __init__(self, message: str, mistakes: Sequence[str], *, hint: str = HINT) -> None:
        super().__init__(message, evidence=mistakes, hint=hint)
        self.mistakes = tuple(mistakes)


def mistakes_error(path: Path, read: Document, mistakes: Sequence[Mistake]) -> JobError:
    """Make one error of a file's mistakes, sorted by line."""
    lines = read.sorted_messages(mistakes)
    return JobError(
        f"{count_mistakes(len(lines))} in `{path}`",
        [f"{path}:{line}: {text}" for line, text in lines],
    )


def count_mistakes(number: int) -> str:
    """Return `1 mistake`, or `2 mistakes`."""
    return "1 mistake" if number == 1 else f"{number} mistakes"
