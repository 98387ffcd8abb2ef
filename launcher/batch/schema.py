"""The shape of a job file: every key, its type and its explanation.

Rules between keys are in `rules`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from launcher.batch import values
from launcher.batch.driver.job import (
    ColumnType,
    DataParallel,
    Engine,
    Format,
    Limits,
    Mode,
    Order,
    OutputFormat,
    Predict,
    Preprocess,
    Read,
    Task,
    Write,
)
from launcher.core.values import ClusterName, EngineArg, Model, Size, expand_shorthand
from launcher.inventory.schema import Section

# Defaults come from the driver's own classes.
_READ, _WRITE = Read(sources=(), format="text"), Write()
_ENGINE, _LIMITS, _DP = Engine(), Limits(), DataParallel(size=1, port=0, nodes=())
_PREDICT, _PREPROCESS = Predict(target=""), Preprocess(target="")
Values = Annotated[dict[str, Any], values.Plain]
Rows = Annotated[int, Field(ge=1, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
ReplicasOf = values.Replicas


class ReadSection(Section):
    """Where rows come from. `read: PATH` and `read: [PATH, …]` are short for `paths`."""

    paths: values.JobPaths = Field(
        min_length=1,
        description=(
            "Files, folders or patterns such as data/*.jsonl; on this machine (relative to the"
            " job's folder), on the nodes as nodes:/path, or at s3://, gs:// or hdfs://."
        ),
    )
    format: Format | None = Field(
        default=None,
        description=(
            "text (a row per line), jsonl, csv or parquet; the files' endings tell it by default."
        ),
    )
    id: values.Column | None = Field(
        default=None, description="Column that names a row; error rows are written with it."
    )
    limit: int | None = Field(
        default=None, ge=1, le=10**12, description="Take only this many rows, from the first on."
    )
    row_bytes: Size = Field(
        default=_READ.row_bytes,
        description="Larger rows become error rows, such as 16MiB (default).",
    )


class MessageSection(Section):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "developer", "tool"] = Field(
        description="Who says it."
    )
    content: values.Template = Field(description="What is said: a template over the row's columns.")


class PromptSection(Section):
    """How a row becomes a prompt: one of `column`, `template`, `chat` and `pair`.

    `prompt: TEXT` is short for `template`.
    """

    column: values.Column | None = Field(
        default=None, description="Column that holds the whole prompt."
    )
    template: values.Template | None = Field(
        default=None,
        description="Jinja template over the row's columns, such as 'Translate: {{ text }}'.",
    )
    chat: list[MessageSection] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Messages for the model's own chat template.",
    )
    pair: list[values.Template] | None = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="Templates of two texts that are compared (`task: score`): question, passage.",
    )
    chat_args: Values = Field(
        default_factory=dict,
        description="Arguments of the model's chat template, such as {enable_thinking: false}.",
    )


class StructuredSection(Section):
    """What an answer must look like: one of the first six keys."""

    json_: Annotated[Any, values.Plain] = Field(
        default=None, alias="json", description="A JSON Schema, as a mapping or as text."
    )
    regex: str | None = Field(default=None, min_length=1, description="A regular expression.")
    choice: list[str] | None = Field(default=None, min_length=1, description="One of these texts.")
    grammar: str | None = Field(default=None, min_length=1, description="A context-free grammar.")
    json_object: bool | None = Field(default=None, description="Any JSON object.")
    structural_tag: str | None = Field(
        default=None, min_length=1, description="A structural tag, as JSON text."
    )
    disable_any_whitespace: bool | None = Field(
        default=None, description="No white space between JSON's parts."
    )
    disable_additional_properties: bool | None = Field(
        default=None, description="Only the properties the schema names."
    )
    whitespace_pattern: str | None = Field(
        default=None, description="White space between JSON's parts, as a regex."
    )


class SamplingSection(Section):
    """How answers are generated; what is left out is vLLM's default, except `max_tokens`."""

    temperature: float | None = Field(
        default=None, ge=0, le=100, description="Randomness; 0 always takes the likeliest."
    )
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="Take the likeliest tokens up to this probability."
    )
    top_k: int | None = Field(
        default=None, ge=-1, description="Take this many of the likeliest tokens; 0 takes all."
    )
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Least probability, relative to the likeliest token."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, le=10_000_000, description="Longest answer, in tokens (default 512)."
    )
    min_tokens: int | None = Field(
        default=None, ge=0, le=10_000_000, description="Shortest answer, in tokens."
    )
    stop: values.Texts | None = Field(
        default=None, min_length=1, description="Text, or texts, that end an answer."
    )
    stop_token_ids: list[int] | None = Field(
        default=None, description="Tokens that end an answer, by their numbers."
    )
    seed: int | None = Field(default=None, description="Seed of each row's random numbers.")
    presence_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Against tokens that the answer has."
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Against tokens, by how often the answer has them."
    )
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Against tokens that prompt or answer have; above 1.",
    )
    ignore_eos: bool | None = Field(
        default=None, description="Go on after the model's end, up to `max_tokens`."
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="Leave special tokens out of the answer."
    )
    spaces_between_special_tokens: bool | None = Field(
        default=None, description="Put spaces between special tokens."
    )
    include_stop_str_in_output: bool | None = Field(
        default=None, description="Keep the text that ended the answer."
    )
    bad_words: values.Texts | None = Field(
        default=None, min_length=1, description="Words that must not be generated."
    )
    allowed_token_ids: list[int] | None = Field(
        default=None, min_length=1, description="The only tokens to choose from."
    )
    thinking_token_budget: int | None = Field(
        default=None, ge=-1, description="Most tokens for a model's thinking."
    )
    structured_outputs: StructuredSection | None = Field(
        default=None, description="What an answer must look like."
    )
    n: values.SingleAnswer | None = Field(
        default=None, description="Always 1: each row has exactly one answer."
    )


class EngineSection(Section):
    """vLLM, as one replica of it runs."""

    args: Annotated[dict[EngineArg, Any], values.Plain] = Field(
        default_factory=dict,
        description=(
            "vLLM's engine arguments by name, such as {max_model_len: 8192, dtype: bfloat16}."
        ),
    )
    tp: int = Field(
        default=_ENGINE.tp, ge=1, le=1024, description="Tensor parallel size of a replica."
    )
    pp: int = Field(
        default=_ENGINE.pp, ge=1, le=1024, description="Pipeline parallel size of a replica."
    )
    replicas: ReplicasOf = Field(
        default=_ENGINE.replicas,
        description="Copies of the model: a number, or the least and the most such as [1, 4].",
    )
    batch_size: int = Field(
        default=_ENGINE.batch_size,
        ge=1,
        le=65_536,
        description="Rows that a replica is given at a time.",
    )
    placement: Annotated[values.Placement, values.PlacementValue] = Field(
        default=values.placement(_ENGINE.placement),
        description=(
            "pack: a replica's GPUs on as few nodes as can be; strict-pack: on one; spread,"
            " strict-spread: on many."
        ),
    )
    order: Order = Field(
        default=_ENGINE.order,
        description=(
            "prefix (default): rows whose prompts begin alike are asked one after the other, and"
            " long ones early; given: in the order of the input."
        ),
    )


class DataParallelSection(Section):
    """One engine per rank over the nodes. `data_parallel: 4` is short for `size`."""

    size: int = Field(ge=1, le=values.MAX_REPLICAS, description="Number of ranks.")
    expert_parallel: bool | None = Field(
        default=None,
        description=(
            "Share a mixture of experts among the ranks; follows from the model by default."
        ),
    )
    timeout: Seconds = Field(
        default=_DP.timeout, description="Seconds that a rank may take for a round."
    )
    round_rows: Rows = Field(
        default=_DP.round_rows, description="Rows that a rank is given at a time."
    )


class PredictSection(Section):
    """A Python class of yours, called on batches. `predict: FILE.py:CLASS` is short for `class`."""

    class_: values.Target = Field(
        alias="class",
        description=(
            "FILE.py:CLASS with a file on this machine, or MODULE:CLASS of the image or of `files`."
        ),
    )
    files: list[values.LocalPath] = Field(
        default_factory=list,
        description="More files and folders that the class needs; they lie beside it there.",
    )
    args: Values = Field(default_factory=dict, description="Arguments of the class, by name.")
    num_gpus: float = Field(
        default=_PREDICT.num_gpus,
        ge=0,
        le=1024,
        description="GPUs of a replica; parts of one are fine.",
    )
    num_cpus: float = Field(
        default=_PREDICT.num_cpus,
        ge=0,
        le=1024,
        description="CPUs of a replica: more leave room for fewer on a node.",
    )
    batch_size: Rows = Field(default=_PREDICT.batch_size, description="Rows of a batch.")
    replicas: ReplicasOf = Field(
        default=_PREDICT.replicas,
        description="Copies of the class: a number, or the least and the most such as [1, 4].",
    )


class PreprocessSection(Section):
    """A Python function of yours, called on batches on CPUs, beside inference.

    `preprocess: FILE.py:NAME` is its short form.
    """

    function: values.Target = Field(
        description=(
            "FILE.py:FUNCTION with a file on this machine, or MODULE:FUNCTION of the image or of"
            " `files`."
        )
    )
    files: list[values.LocalPath] = Field(
        default_factory=list, description="More files and folders that it needs."
    )
    num_cpus: float = Field(
        default=_PREPROCESS.num_cpus, ge=0, le=1024, description="CPUs of a replica."
    )
    batch_size: Rows = Field(default=_PREPROCESS.batch_size, description="Rows of a batch.")
    replicas: ReplicasOf = Field(
        default=_PREPROCESS.replicas,
        description="Copies of it: a number, or the least and the most such as [1, 4].",
    )


class WriteSection(Section):
    """Where answers go. `write: PATH` is short for `path`."""

    path: values.JobPath = Field(
        description=(
            "Folder of the answers (rows/) and of error rows (errors/): on this machine, where they"
            " are gathered, nodes:/path on storage that the head sees, or s3://, gs:// or hdfs://."
        )
    )
    format: OutputFormat = Field(default=_WRITE.format, description="parquet (default) or jsonl.")
    rows_per_file: int = Field(
        default=_WRITE.rows_per_file,
        ge=1,
        le=10_000_000,
        description="Rows after which a file is complete.",
    )
    seconds: Seconds = Field(
        default=_WRITE.seconds,
        description="Seconds after which a file is complete, with fewer rows.",
    )


class LimitsSection(Section):
    """When a job gives up."""

    restarts: int = Field(
        default=_LIMITS.restarts,
        ge=0,
        le=10_000,
        description="Restarts of replicas without a row done in between.",
    )
    stall: Seconds = Field(default=_LIMITS.stall, description="Seconds without a row.")
    errors: int | None = Field(
        default=_LIMITS.errors, ge=0, description="Error rows; any number by default."
    )


class JobFile(Section):
    """A vlaunch batch job: what to read, what to ask of it, where to write."""

    job: ClusterName | None = Field(
        default=None, description="Name of the job; the file's name by default."
    )
    model: Model | None = Field(
        default=None, description="Model that answers, such as Qwen/Qwen3-8B."
    )
    task: Task = Field(
        default="generate",
        description=(
            "generate (default): text; embed: a vector for each row; score: how well two texts of a"
            " row fit each other."
        ),
    )
    mode: Mode | None = Field(
        default=None,
        description=(
            "engine (default): replicas of vLLM; predict (default with `predict`): a class of"
            " yours; data-parallel (default with `data_parallel`): vLLM's ranks over the nodes."
        ),
    )
    read: Annotated[
        ReadSection,
        BeforeValidator(
            expand_shorthand("paths", str, list),
            json_schema_input_type=str | list[str] | ReadSection,
        ),
    ] = Field(description="Where rows come from: a path, a list of paths, or a mapping.")
    prompt: (
        Annotated[
            PromptSection,
            BeforeValidator(
                expand_shorthand("template", str), json_schema_input_type=str | PromptSection
            ),
        ]
        | None
    ) = Field(
        default=None,
        description=(
            "How a row becomes a prompt; by default the column `prompt` (of text files: `text`)."
        ),
    )
    sampling: SamplingSection = Field(
        default_factory=SamplingSection, description="How answers are generated."
    )
    keep: Annotated[dict[values.Column, ColumnType | None], values.KeepColumns] | None = Field(
        default=None,
        description=(
            "Columns of the input to write beside the answers, as a list or with types; all by"
            " default."
        ),
    )
    engine: EngineSection = Field(
        default_factory=EngineSection, description="vLLM: its size, its number and its arguments."
    )
    data_parallel: (
        Annotated[
            DataParallelSection,
            BeforeValidator(
                expand_shorthand("size", int), json_schema_input_type=int | DataParallelSection
            ),
        ]
        | None
    ) = Field(default=None, description="vLLM's ranks over the nodes, instead of replicas.")
    predict: (
        Annotated[
            PredictSection,
            BeforeValidator(
                expand_shorthand("class", str), json_schema_input_type=str | PredictSection
            ),
        ]
        | None
    ) = Field(default=None, description="A Python class of yours, instead of vLLM.")
    preprocess: (
        Annotated[
            PreprocessSection,
            BeforeValidator(
                expand_shorthand("function", str), json_schema_input_type=str | PreprocessSection
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="A Python function that prepares batches, on CPUs, beside inference.",
    )
    write: Annotated[
        WriteSection,
        BeforeValidator(expand_shorthand("path", str), json_schema_input_type=str | WriteSection),
    ] = Field(description="Where answers go: a path, or a mapping.")
    limits: LimitsSection = Field(
        default_factory=LimitsSection, description="When the job gives up."
    )


def job_mode(file: JobFile) -> Mode:
    """Return the explicit mode, or the one that the sections imply."""
    if file.mode is not None:
        return file.mode
    if file.predict is not None:
        return "predict"
    return "engine" if file.data_parallel is None else "data-parallel"
