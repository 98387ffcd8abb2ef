"""The nouns of a batch job: what was asked for, checked, with every default filled in. Values only.

`launcher.batch.flags` makes a `Job` of a command line, and of the file it names;
`launcher.batch.job_spec` writes it for the driver inside the cluster
(`launcher/payload/batch/job.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Mode = Literal["engine", "predict", "data-parallel"]
Format = Literal["text", "jsonl", "csv", "parquet"]
Placement = Literal["pack", "strict-pack", "spread", "strict-spread"]
ColumnType = Literal["text", "integer", "number", "boolean", "json"]


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
class Read:
    """The input. Rows larger than `row_bytes` become error rows; `limit` takes only the first
    rows.
    """

    sources: tuple[Source, ...]
    format: Format
    id: str | None = None
    limit: int | None = None
    row_bytes: int = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat; `content` is a template over the row's columns."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """How a row becomes a prompt: exactly one of the first three.

    `chat_args` go to the model's chat template.
    """

    column: str | None = None
    template: str | None = None
    chat: tuple[Message, ...] = ()
    chat_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """vLLM: `args` are its engine arguments by their Python names; `replicas` is the least and the
    most of them.
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 1
    pp: int = 1
    replicas: tuple[int, int] = (1, 1)
    batch_size: int = 256
    placement: Placement = "pack"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """One engine per rank.

    `expert_parallel` of None follows from the model; `timeout` is per rank and round, in seconds.
    """

    size: int
    expert_parallel: bool | None = None
    timeout: float = 600.0
    round_rows: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict:
    """A Python class of the user's, called on batches.

    `code` are the files shipped with the job, by their names there.
    """

    target: str
    code: Mapping[str, Path]
    args: Mapping[str, Any] = field(default_factory=dict)
    num_gpus: float = 0.0
    num_cpus: float = 1.0
    batch_size: int = 256
    replicas: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """A Python function of the user's, called on batches before inference, as a stage of its own on
    CPUs.
    """

    target: str
    code: Mapping[str, Path]
    num_cpus: float = 1.0
    batch_size: int = 256
    replicas: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """The output.

    A file is committed when it has `rows_per_file` rows, or after `seconds` with any.
    """

    to: Source
    format: Literal["parquet", "jsonl"] = "parquet"
    rows_per_file: int = 10_000
    seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a job gives up: restarts of replicas, seconds without a row, error rows. None: never."""

    restarts: int = 5
    stall: float = 1800.0
    errors: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked batch job.

    `keep` of None keeps every column; a type of None is found out from the first rows.

    `path` is the file it came from. `inside` are the folders that its paths on this machine must
    lead into, None: anywhere.
    """

    name: str
    mode: Mode
    read: Read
    write: Write
    path: Path | None = None
    inside: tuple[Path, ...] | None = None
    model: str = ""
    prompt: Prompt | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    keep: Mapping[str, ColumnType | None] | None = None
    engine: Engine = field(default_factory=Engine)
    data_parallel: DataParallel | None = None
    predict: Predict | None = None
    preprocess: Preprocess | None = None
    limits: Limits = field(default_factory=Limits)

    @property
    def gpus(self) -> tuple[float, float]:
        """Accelerators that the job needs at least, and would use at most."""
        if self.mode == "predict":
            assert self.predict is not None  # noqa: S101 - the mode says so
            least, most = self.predict.replicas
            return least * self.predict.num_gpus, most * self.predict.num_gpus
        each = self.engine.tp * self.engine.pp
        if self.data_parallel is not None:
            return float(each * self.data_parallel.size), float(each * self.data_parallel.size)
        return float(each * self.engine.replicas[0]), float(each * self.engine.replicas[1])
