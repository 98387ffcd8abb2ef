"""Shape of a batch job in `job.json`, shared by launcher and driver.

The launcher fills these classes, writes them (`to_json`) and takes a job file's defaults from them;
the driver reads them (`read_job`). Fields keep the file's order. Also the two ways in which a job
fails.
"""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

VERSION = 1
Mode = Literal["engine", "predict", "data-parallel"]
Format = Literal["text", "jsonl", "csv", "parquet"]
OutputFormat = Literal["parquet", "jsonl", "openai"]
Task = Literal["generate", "embed", "score"]
RowKind = Literal["generate", "embed", "score", "request"]  # a task, or requests for vLLM's API
Order = Literal["prefix", "given"]
ColumnType = Literal["text", "integer", "number", "boolean", "json"]
# Fields that `job.json` omits at their default, so that jobs without them stay the same to the
# byte.
OMIT_DEFAULT = {"left out": True}
# Result columns of a model besides the input columns; a class has its own.
ANSWER_COLUMNS: Mapping[str, ColumnType] = {
    "answer": "text",
    "finish_reason": "text",
    "prompt_tokens": "integer",
    "output_tokens": "integer",
}
# Result columns by kind of rows; the model determines a vector's length.
RESULT_COLUMNS: Mapping[RowKind, Mapping[str, str]] = {
    "generate": ANSWER_COLUMNS,
    "embed": {"embedding": "vector", "prompt_tokens": "integer"},
    "score": {"score": "number", "prompt_tokens": "integer"},
    "request": {"response": "text", "prompt_tokens": "integer", "output_tokens": "integer"},
}
# Prompt tokens from vLLM's cache: counted, not written.
CACHED_TOKENS = "_cached"


class Failed(Exception):
    """A failure that ends the job: message, evidence lines and hint."""

    def __init__(self, message: str, evidence: str = "", hint: str = "") -> None:
        # all three: exceptions are pickled by their arguments
        super().__init__(message, evidence, hint)
        self.message, self.evidence, self.hint = message, evidence, hint

    def __str__(self) -> str:
        return self.message


class Refused(Failed):
    """A failure before the start: no row was processed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The input: paths and addresses in the head's container.

    Rows larger than `row_bytes` become error rows; `limit` takes only the first rows.
    """

    sources: tuple[str, ...]
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
    """Source of a row's prompt: exactly one of the first five fields.

    `messages` is a column with a whole chat; `pair` are the templates of two compared texts.
    `tools` is the column with a chat's tools. `chat_args` go to the model's chat template.
    """

    column: str | None = None
    template: str | None = None
    chat: tuple[Message, ...] = ()
    messages: str | None = field(default=None, metadata=OMIT_DEFAULT)
    pair: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    tools: str | None = field(default=None, metadata=OMIT_DEFAULT)
    chat_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Settings of vLLM.

    `args` are engine arguments by their Python names; `replicas` is (least, most); `placement` is
    Ray's placement strategy; `order` of `prefix` groups prompts by prefix, long ones first.
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 1
    pp: int = 1
    replicas: tuple[int, int] = (1, 1)
    batch_size: int = 256
    placement: str = "PACK"
    order: Order = field(default="prefix", metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHost:
    """A node for ranks; the head is the first."""

    ip: str
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """One engine per rank, with a rendezvous at `port` of the first node.

    `expert_parallel` of None follows from the model; `timeout` is per rank and round, in seconds.
    """

    size: int
    expert_parallel: bool | None = None
    timeout: float = 600.0
    round_rows: int = 256
    port: int
    nodes: tuple[RankHost, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict:
    """A Python class of the user's, called on batches."""

    target: str
    args: Mapping[str, Any] = field(default_factory=dict)
    num_gpus: float = 0.0
    num_cpus: float = 1.0
    batch_size: int = 256
    replicas: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """A Python function of the user's, called on batches in a CPU stage before inference."""

    target: str
    num_cpus: float = 1.0
    batch_size: int = 256
    replicas: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """The output.

    A file is committed when it has `rows_per_file` rows, or after `seconds` with any.
    """

    format: OutputFormat = "parquet"
    rows_per_file: int = 10_000
    seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits after which a job gives up: restarts, seconds without a row, error rows (None:
    unlimited).
    """

    restarts: int = 5
    stall: float = 1800.0
    errors: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A batch job that works in the folder `work` and writes to `out`.

    `identity` determines its answers, `digest` is its SHA-256. `lora` are adapters' paths by name.
    `keep` of None keeps every column; a type of None is inferred from the first rows.
    """

    name: str
    cluster: str
    mode: Mode
    work: str
    out: str
    identity: Mapping[str, Any] = field(default_factory=dict, metadata={"key": "meaning"})
    digest: str = ""
    model: str = ""
    task: Task = field(default="generate", metadata=OMIT_DEFAULT)
    lora: Mapping[str, str] | None = field(default=None, metadata=OMIT_DEFAULT)
    read: Read
    prompt: Prompt | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    keep: Mapping[str, ColumnType | None] | None = None
    engine: Engine = field(default_factory=Engine)
    data_parallel: DataParallel | None = None
    predict: Predict | None = None
    preprocess: Preprocess | None = None
    write: Write = field(default_factory=Write)
    limits: Limits = field(default_factory=Limits)
    retry_errors: bool = False
    restart: bool = False

    @property
    def chats(self) -> bool:
        """True if prompts go through the model's chat template."""
        return self.prompt is not None and bool(self.prompt.chat or self.prompt.messages)

    @property
    def row_kind(self) -> RowKind:
        """Kind of the rows: requests of OpenAI's batch format, or the task's."""
        return "request" if self.write.format == "openai" else self.task

    @property
    def replica_gpus(self) -> float:
        """GPUs of a replica or rank."""
        if self.mode == "predict":
            return self.predict.num_gpus if self.predict else 0.0
        return float(self.engine.tp * self.engine.pp)

    @property
    def results(self) -> Mapping[str, str]:
        """Result columns, by type."""
        return RESULT_COLUMNS[self.row_kind]

    @property
    def columns_to_keep(self) -> tuple[str, ...] | None:
        """Input columns in the answers, including the ids; None for all."""
        if self.keep is None:
            return None
        ids = (self.read.id,) if self.read.id else ()
        return tuple(dict.fromkeys((*self.keep, *ids)))


def thin_job(job: Job) -> Job:
    """Return a job for tasks and actors to carry: it does not grow with the input."""
    return dataclasses.replace(job, read=dataclasses.replace(job.read, sources=()), identity={})


def read_job(work: str) -> Job:
    """Read WORK/job.json.

    Raises:
        Refused: the file is missing or of another version.
    """
    path = os.path.join(work, "job.json")
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        if not isinstance(content, dict) or content.get("version") != VERSION:
            version = (
                content.get("version") if isinstance(content, dict) else type(content).__name__
            )
            raise Refused(
                f"{path} is of version {version}, but this driver supports {VERSION}",
                hint="run `vlaunch batch` again",
            )
        return parse_job({**content, "work": os.path.abspath(work)})
    except OSError as error:
        raise Refused(
            f"cannot read {path}", str(error), "run `vlaunch batch` again: it writes this file"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        evidence = f"{type(error).__name__}: {error}"
        raise Refused(
            f"{path} does not describe a job",
            evidence,
            "run `vlaunch batch` again: it writes this file",
        ) from error


def parse_job(content: Mapping[str, Any]) -> Job:
    """Parse the content of `job.json`, ignoring unknown keys."""
    parsed: Job = from_json(Job, content)
    return parsed


def to_json(job: Job) -> dict[str, Any]:
    """Return the content of `job.json`, without a subclass's fields."""
    return {"version": VERSION, **to_fields(job, Job)}


def to_fields(value: Any, shape: Any) -> dict[str, Any]:
    """Return the fields of `shape` as JSON values."""
    values = {attribute: getattr(value, attribute.name) for attribute in dataclasses.fields(shape)}
    return {
        json_key(attribute): to_plain(item)
        for attribute, item in values.items()
        if not (attribute.metadata.get("left out") and item == attribute.default)
    }


def json_key(attribute: dataclasses.Field[Any]) -> str:
    """Return a field's key in `job.json`."""
    return str(attribute.metadata.get("key", attribute.name))


def from_json(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the type `kind`."""
    if dataclasses.is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        fields = [
            attribute for attribute in dataclasses.fields(kind) if json_key(attribute) in value
        ]
        make: Any = kind
        return make(
            **{
                attribute.name: from_json(kinds[attribute.name], value[json_key(attribute)])
                for attribute in fields
            }
        )
    inner = typing.get_args(kind)
    if type(None) in inner:
        return None if value is None else from_json(inner[0], value)
    if typing.get_origin(kind) is tuple:
        item_kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        return tuple(from_json(*attribute) for attribute in zip(item_kinds, value, strict=True))
    return value


def to_plain(value: Any) -> Any:
    """Return a value as JSON."""
    if dataclasses.is_dataclass(value):
        return to_fields(value, value)
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def identity_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between two identities of a job, one per line."""
    return [
        f"{key}: {brief_value(before, key)} → {brief_value(now, key)}"
        for key in sorted({*before, *now})
        if before.get(key, ...) != now.get(key, ...)
    ]


def brief_value(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "(nothing)"
    text = json.dumps(values[key], ensure_ascii=False, default=str)
    return text if len(text) <= 120 else text[:117] + "…"
