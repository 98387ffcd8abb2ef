"""A batch job: the keys of its file, with their types, bounds, defaults and descriptions.

The launcher checks a file against these classes (`flags.check_document`) and writes a `PlacedJob`
to `job.json`; the driver in the cluster reads it with the same classes. The key of a field with a
trailing underscore has none, as in `class_`.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from ..core.values import (
    STRICT,
    Bounds,
    ClusterName,
    Converter,
    FromMapping,
    JsonValue,
    Model,
    Size,
    expand_shorthand,
    key_of,
    to_json_value,
)
from . import job_values as values
from .job_values import ColumnType, Format, Mode, Order, OutputFormat, RowKind, Task

VERSION = 1
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
# The key of a section that stands for the section's value if that is no mapping.
SHORT_FORMS = {
    "read": "paths",
    "prompt": "template",
    "data_parallel": "size",
    "predict": "class",
    "preprocess": "function",
    "write": "path",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Input rows. `read: PATH` and `read: [PATH, …]` are short for `paths`."""

    paths: Annotated[tuple[values.JobPath, ...], Bounds(min_length=1), values.Items]
    """Files, folders or patterns such as data/*.jsonl; on this machine (relative to the job's
    folder), on the nodes as nodes:/path, or at s3://, gs:// or hdfs://."""
    format: Format | None = None
    """Format of the input; text has a row per line (default: from the file name)."""
    id: values.Column | None = None
    """Column with the id of a row, written with error rows."""
    limit: Annotated[int, Bounds(ge=1, le=10**12)] | None = None
    """Read only the first rows, up to this number."""
    row_bytes: Size = 16 * 2**20
    """Size limit of a row, such as 16MiB (default); larger rows become error rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "developer", "tool"]
    """Author of the message."""
    content: values.Template
    """Template with the row's columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompt of each row: one of `column`, `template`, `chat`, `messages` and `pair`.

    `prompt: TEXT` is short for `template`.
    """

    column: values.Column | None = None
    """Column with the complete prompt."""
    template: values.Template | None = None
    """Jinja template with the row's columns, such as 'Translate: {{ text }}'."""
    chat: (
        Annotated[tuple[FromMapping[Message], ...], Bounds(min_length=1, max_length=64)] | None
    ) = None
    """Messages for the model's own chat template."""
    messages: values.Column | None = None
    """Column with a chat's messages, as a list or as JSON text."""
    pair: Annotated[tuple[values.Template, ...], Bounds(min_length=2, max_length=2)] | None = None
    """Templates of the two texts to compare (`task: score`): question, passage."""
    tools: values.Column | None = None
    """Column with the tools of a chat, as a list or as JSON text."""
    chat_args: values.JsonMapping = field(default_factory=dict)
    """Arguments of the model's chat template, such as {enable_thinking: false}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Required form of an answer: one of the first six keys."""

    json_: JsonValue = None
    """A JSON Schema, as a mapping or as text."""
    regex: values.Text | None = None
    """A regular expression."""
    choice: Annotated[tuple[str, ...], Bounds(min_length=1)] | None = None
    """Allowed answers."""
    grammar: values.Text | None = None
    """A context-free grammar."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: values.Text | None = None
    """A structural tag, as JSON text."""
    disable_any_whitespace: bool | None = None
    """Allow no whitespace between JSON tokens."""
    disable_additional_properties: bool | None = None
    """Allow only properties that the schema names."""
    whitespace_pattern: str | None = None
    """Whitespace allowed between JSON tokens, as a regex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters; omitted ones have vLLM's defaults, except `max_tokens`."""

    temperature: Annotated[float, Bounds(ge=0, le=100)] | None = None
    """Randomness; 0 always picks the likeliest token."""
    top_p: Annotated[float, Bounds(gt=0, le=1)] | None = None
    """Total probability of the tokens to sample from."""
    top_k: Annotated[int, Bounds(ge=-1)] | None = None
    """Sample from this many of the likeliest tokens; 0: all."""
    min_p: Annotated[float, Bounds(ge=0, le=1)] | None = None
    """Minimum probability relative to the top token."""
    max_tokens: Annotated[int, Bounds(ge=1, le=10_000_000)] | None = None
    """Maximum answer length (default: 512 tokens)."""
    min_tokens: values.Tokens | None = None
    """Minimum answer length, in tokens."""
    stop: values.Texts | None = None
    """Text or texts that end an answer."""
    stop_token_ids: tuple[int, ...] | None = None
    """Token ids that end an answer."""
    seed: int | None = None
    """Random seed of each row."""
    presence_penalty: values.Penalty | None = None
    """Penalty on tokens that the answer already has."""
    frequency_penalty: values.Penalty | None = None
    """Penalty on tokens by their frequency in the answer."""
    repetition_penalty: Annotated[float, Bounds(gt=0, le=100)] | None = None
    """Penalty on tokens in the prompt or the answer, if above 1."""
    ignore_eos: bool | None = None
    """Continue after the end-of-sequence token, up to `max_tokens`."""
    skip_special_tokens: bool | None = None
    """Omit special tokens from the answer."""
    spaces_between_special_tokens: bool | None = None
    """Put spaces between special tokens."""
    include_stop_str_in_output: bool | None = None
    """Include the stop text in the answer."""
    bad_words: values.Texts | None = None
    """Words that must not be generated."""
    allowed_token_ids: Annotated[tuple[int, ...], Bounds(min_length=1)] | None = None
    """Token ids to choose from; no others are generated."""
    thinking_token_budget: Annotated[int, Bounds(ge=-1)] | None = None
    """Maximum number of tokens for the model's thinking."""
    structured_outputs: FromMapping[StructuredOutputs] | None = None
    """Required form of an answer."""
    n: values.SingleAnswer | None = None
    """Always 1: each row has exactly one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """vLLM: arguments and replicas."""

    args: values.EngineArgs = field(default_factory=dict)
    """vLLM's engine arguments by name, such as {max_model_len: 8192, dtype: bfloat16}."""
    tp: values.ParallelSize = 1
    """Tensor parallel size of a replica."""
    pp: values.ParallelSize = 1
    """Pipeline parallel size of a replica."""
    replicas: values.Replicas = (1, 1)
    """Copies of the model: a number, or minimum and maximum such as [1, 4]."""
    batch_size: Annotated[int, Bounds(ge=1, le=65_536)] = 256
    """Rows that a replica receives at a time."""
    placement: values.Placement = "pack"
    """pack: a replica's GPUs on as few nodes as possible; strict-pack: on one node; spread,
    strict-spread: on many."""
    order: Order = "prefix"
    """prefix (default): group rows with a common prompt prefix, and start long ones early; given:
    keep the order of the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """One engine per rank over the nodes. `data_parallel: 4` is short for `size`."""

    size: Annotated[int, Bounds(ge=1, le=values.MAX_REPLICAS)]
    """Number of ranks."""
    expert_parallel: bool | None = None
    """Share a mixture of experts among the ranks; by default, depends on the model."""
    timeout: values.Seconds = 600.0
    """Time limit of a rank for a round, in seconds."""
    round_rows: values.Rows = 256
    """Rows that a rank receives at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict:
    """Your Python class, called on batches. `predict: FILE.py:CLASS` is short for `class`."""

    class_: values.Target
    """FILE.py:CLASS with a file on this machine, or MODULE:CLASS from the image or from `files`."""
    files: tuple[values.LocalPath, ...] = ()
    """Additional files and folders for the class, stored next to it on the nodes."""
    args: values.JsonMapping = field(default_factory=dict)
    """Keyword arguments of the class."""
    num_gpus: values.Claim = 0.0
    """GPUs per replica; fractions are allowed."""
    num_cpus: values.Claim = 1.0
    """CPUs per replica; a higher value means fewer replicas per node."""
    batch_size: values.Rows = 256
    """Rows of a batch."""
    replicas: values.Replicas = (1, 1)
    """Copies of the class: a number, or minimum and maximum such as [1, 4]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """Your Python function, called on batches on CPUs, in parallel with inference.

    `preprocess: FILE.py:NAME` is its short form.
    """

    function: values.Target
    """FILE.py:FUNCTION with a file on this machine, or MODULE:FUNCTION from the image or from
    `files`."""
    files: tuple[values.LocalPath, ...] = ()
    """Additional files and folders for the function."""
    num_cpus: values.Claim = 1.0
    """CPUs per replica."""
    batch_size: values.Rows = 256
    """Rows of a batch."""
    replicas: values.Replicas = (1, 1)
    """Copies of the function: a number, or minimum and maximum such as [1, 4]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Output of the job. `write: PATH` is short for `path`."""

    path: values.JobPath
    """Folder for answers (rows/) and error rows (errors/): on this machine (copied from the head),
    nodes:/path on storage that the head can access, or s3://, gs:// or hdfs://."""
    format: OutputFormat = "parquet"
    """Format of the output (default: parquet); openai: the input has requests of OpenAI's Batch
    API, and the output their responses."""
    rows_per_file: Annotated[int, Bounds(ge=1, le=10_000_000)] = 10_000
    """Maximum number of rows per file."""
    seconds: values.Seconds = 30.0
    """Seconds until a file with fewer rows is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits at which a job fails."""

    restarts: Annotated[int, Bounds(ge=0, le=10_000)] = 5
    """Replica restarts without a finished row in between."""
    stall: values.Seconds = 1800.0
    """Seconds without a finished row."""
    errors: Annotated[int, Bounds(ge=0)] | None = None
    """Error rows allowed (default: unlimited)."""


def _short(section: str, written: Any, *kinds: type) -> Converter:
    """Return the converter of a section's short form, a value of one of `kinds`."""
    return Converter(expand_shorthand(SHORT_FORMS[section], *kinds), written)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A vlaunch batch job: input, model and output."""

    __pydantic_config__: ClassVar[Any] = STRICT
    entries: ClassVar[Mapping[str, str]] = {}

    job: ClusterName | None = None
    """Name of the job (default: the name of the file)."""
    model_: Model | None = None
    """Model to run, such as Qwen/Qwen3-8B."""
    task: Task = "generate"
    """generate (default): text; embed: a vector for each row; score: similarity of two texts of a
    row."""
    lora: Annotated[dict[values.AdapterName, Model], Bounds(min_length=1)] | None = None
    """LoRA adapter: a name and a path inside the containers, or a model on the Hub; with
    `write.format: openai` several, which requests name as `model`."""
    mode_: Mode | None = None
    """engine (default): replicas of vLLM; predict (default with `predict`): your class;
    data-parallel (default with `data_parallel`): vLLM's ranks over the nodes."""
    read: Annotated[
        FromMapping[Read], _short("read", str | list[str] | FromMapping[Read], str, tuple)
    ]
    """Input rows: a path, a list of paths, or a mapping."""
    prompt: (
        Annotated[FromMapping[Prompt], _short("prompt", str | FromMapping[Prompt], str)] | None
    ) = None
    """Prompt of each row (default: the column `prompt`; for text files, `text`)."""
    sampling: FromMapping[Sampling] = field(default_factory=Sampling)
    """Sampling parameters."""
    keep: values.Keep | None = None
    """Input columns to write with the answers, as a list or with types (default: all)."""
    engine: FromMapping[Engine] = field(default_factory=Engine)
    """vLLM: parallelism, replicas and arguments."""
    data_parallel: (
        Annotated[
            FromMapping[DataParallel], _short("data_parallel", int | FromMapping[DataParallel], int)
        ]
        | None
    ) = None
    """vLLM's ranks over the nodes, instead of replicas."""
    predict: (
        Annotated[FromMapping[Predict], _short("predict", str | FromMapping[Predict], str)] | None
    ) = None
    """Your Python class, instead of vLLM."""
    preprocess: (
        Annotated[FromMapping[Preprocess], _short("preprocess", str | FromMapping[Preprocess], str)]
        | None
    ) = None
    """A Python function that prepares batches on CPUs, in parallel with inference."""
    write: Annotated[FromMapping[Write], _short("write", str | FromMapping[Write], str)]
    """Output: a path or a mapping."""
    limits: FromMapping[Limits] = field(default_factory=Limits)
    """Limits at which the job fails."""

    @property
    def name(self) -> str:
        """The job's name; empty before it has one."""
        return self.job or ""

    @property
    def model(self) -> str:
        """The model; empty with `predict`."""
        return self.model_ or ""

    @property
    def mode(self) -> Mode:
        """The written mode, or the one that the sections imply."""
        if self.mode_ is not None:
            return self.mode_
        if self.predict is not None:
            return "predict"
        return "engine" if self.data_parallel is None else "data-parallel"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHost:
    """A node for ranks; the head is the first."""

    ip: str
    gpus: int


@dataclass(frozen=True, kw_only=True)
class PlacedJob(Job):
    """A job in a cluster, as in `job.json`: its paths are those of the head's container, and its
    code is `MODULE:NAME`.

    `work` is its folder. `identity` determines its answers, `digest` is its SHA-256. Ranks of
    `data_parallel` meet at `rank_port` of the first of `rank_hosts`.
    """

    cluster: str
    work: str
    identity: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    rank_port: int = 0
    rank_hosts: tuple[FromMapping[RankHost], ...] = ()
    retry_errors: bool = False
    restart: bool = False


def to_json(value: Any, shape: Any = None) -> Any:
    """Return a job, or a value of it, as JSON without unset keys.

    Args:
        value: the value.
        shape: the class whose fields to write, if not that of the value.
    """
    if dataclasses.is_dataclass(value):
        names = [attribute.name for attribute in dataclasses.fields(shape or value)]
        items = {key_of(name): to_json(getattr(value, name)) for name in names}
        return {key: item for key, item in items.items() if item is not None}
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, tuple) else to_json_value(value)
